"""A strategy that knows the answer, to test a loop with: it proposes a given text, wrong here and there."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Strategy


class ReplaySettings(Settings):
    """The text and how to spoil it."""

    texts: tuple[tuple[int, ...], ...] = Field((), description="Prompt and output of every row, without padding.")
    length: int = Field(6, ge=1, description="Tokens proposed per branch.")
    branches: int = Field(1, ge=1, description="Branches; the right one changes place from step to step.")
    wrong_every: int = Field(5, ge=0, description="Spoils the token at every such position; 0 spoils none.")


class Replay(Strategy):
    """Proposes the next tokens of a known text: acceptance is high and of every length."""

    name = "replay"
    summary = "Proposes a known text, wrong here and there (for tests)."
    settings_class = ReplaySettings
    on_device = True
    rows_apart = False  # a text belongs to a place in the batch

    def start(self, context: Context) -> Tensor:
        texts = self.settings.texts
        width = max(map(len, texts), default=0) + self.settings.length + 1
        known = torch.full((context.rows, max(width, context.slots)), -1, dtype=torch.int64)
        for row, text in enumerate(texts[: context.rows]):
            known[row, : len(text)] = torch.tensor(text)
        return known.to(context.device)

    def propose(self, state: Tensor, sequences: Sequences) -> Draft:
        s: ReplaySettings = self.settings
        at = sequences.length[:, None] + torch.arange(s.length, device=state.device)
        draft_token = state.gather(1, at.clamp(max=state.shape[1] - 1))
        if s.wrong_every:
            # Rows are spoilt at different places, so that they advance unevenly.
            row = torch.arange(state.shape[0], device=state.device)[:, None]
            draft_token = torch.where((at + 2 * row) % s.wrong_every == 0, (draft_token - 1).clamp(min=-1), draft_token)
        branch = torch.arange(s.branches, device=state.device)
        right = branch[None] == sequences.length[:, None] % s.branches
        decoy = (draft_token - 2).clamp(min=-1)
        return Draft.branches(torch.where(right[:, :, None], draft_token[:, None], decoy[:, None]))
