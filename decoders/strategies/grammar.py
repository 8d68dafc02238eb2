"""Jump-ahead decoding: what a grammar forces is proposed, not written token by token.

Inside a schema much of the text is settled: quotes, keys, punctuation. The bytes that every legal continuation begins with
are proposed as the tokenizer itself would write them (as SGLang's jump-forward decoding does, Zheng et al. 2024), but as
guesses: other tokens may spell the same bytes, and which ones the target prefers is for it to say. A target that would rather have
written something else often spells what it must in single bytes, so that is a second branch.
"""

from __future__ import annotations

import torch
from pydantic import Field

from ..engine.device_guide import DeviceGuide
from ..engine.guide import Guide
from ..errors import UnsupportedError
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Strategy


class GrammarSettings(Settings):
    """How far to jump."""

    length: int = Field(16, ge=1, le=64, description="Most forced tokens proposed per step, in each spelling.")
    bytewise: bool = Field(True, description="Propose the forced bytes spelled one by one, too.")


class Grammar(Strategy):
    """Proposes the tokens that the grammar of a row forces. Needs ``grammar=``; rows without one are decoded plainly."""

    name = "grammar"
    summary = "Proposes what the grammar forces anyway: keys, quotes, punctuation."
    settings_class = GrammarSettings
    needs_grammar = True

    def start(self, context: Context) -> Guide | DeviceGuide:
        if context.guide is None:  # as a part of another strategy; by itself the call was refused
            raise UnsupportedError("strategy 'grammar' needs grammar=")
        return context.guide

    def propose(self, state: Guide | DeviceGuide, sequences: Sequences) -> Draft:
        s: GrammarSettings = self.settings
        spelled = [state.forced(s.length)]
        if s.bytewise:
            spelled.append(state.forced(s.length, bytewise=True))
        longest = max(run.shape[1] for run in spelled)
        runs = [torch.nn.functional.pad(run, (0, longest - run.shape[1]), value=-1) for run in spelled]
        return Draft.branches(torch.stack(runs, dim=1))
