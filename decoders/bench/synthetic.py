"""A drafter with a given acceptance rate, to estimate the gain of a real drafter with this rate in planning and load tests.

vLLM's synthetic verification accepts arbitrary drafts at random, so the output consists of draft tokens. Here the draft is the
text of plain decoding with a wrong token at a random place. It is verified like any other draft, so the output is plain decoding's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ..errors import SettingsError
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Strategy

#: Number of draft tokens if the acceptance is given as one number.
LENGTH = 5


def _powers(share: float) -> tuple[float, ...]:
    return tuple(share**n for n in range(1, LENGTH + 1))


class SyntheticSettings(Settings):
    """How often draft tokens are accepted."""

    acceptance: tuple[float, ...] = Field(
        (0.8,),
        min_length=1,
        max_length=64,
        description="Shares of the drafts whose first token, first two tokens … are accepted. Each share stands for one draft token.",
    )
    seed: int = Field(0, description="Random seed of the positions at which draft tokens are wrong.")

    @field_validator("acceptance")
    @classmethod
    def _shares(cls, acceptance: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= share <= 1 for share in acceptance) or list(acceptance) != sorted(acceptance, reverse=True):
            raise ValueError("shares must lie between 0 and 1, and none may be larger than the share before it")
        return acceptance


@dataclass
class _State:
    """The state of a call.

    Attributes:
        texts: the text that each row will write; empty if it is not known.
        drawn: generator that draws the places of the wrong tokens.
        vocabulary: size of the vocabulary.
    """

    texts: list[list[int]]
    drawn: random.Random
    vocabulary: int


class Synthetic(Strategy):
    """Drafts the known continuation of a prompt (:meth:`learn`), with a wrong token at a random place; nothing for other prompts.

    Attributes:
        texts: the known continuations of prompts.
        rehearsed: prompts, seed and number of tokens of the last call whose text was learned.
    """

    name = "synthetic"
    summary = "Proposes a known text at a given acceptance rate, to plan for a drafter of that quality."
    settings_class = SyntheticSettings
    rows_apart = False

    def __init__(self, settings: SyntheticSettings | None = None, /, **values: object) -> None:
        super().__init__(settings, **values)
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.rehearsed: object = None

    def __str__(self) -> str:
        shares = self.settings.acceptance
        shares = shares[:1] if shares == _powers(shares[0]) else shares
        return f"{self.name}[{','.join(f'{share:g}' for share in shares)}]"

    @classmethod
    def of(cls, text: str) -> Self:
        """The strategy for a text such as ``0.9,0.8,0.6``: entry n is the share of drafts whose first n tokens are accepted.

        One number ``p`` stands for five draft tokens: ``p, p², …, p⁵``.

        Raises:
            SettingsError: a number is not between 0 and 1.
        """
        try:
            shares = [float(part) for part in text.split(",")]
        except ValueError:
            raise SettingsError(
                f"acceptance must be a rate such as 0.8, or a share for each draft token such as 0.9,0.8,0.6, not {text!r}"
            ) from None
        return cls(acceptance=_powers(shares[0]) if len(shares) == 1 else tuple(shares))

    def learn(self, prompt: Sequence[int], continuation: Sequence[int]) -> None:
        """Stores the text that plain decoding writes after a prompt."""
        self.texts[tuple(prompt)] = list(continuation)

    def start(self, context: Context) -> _State:
        s: SyntheticSettings = self.settings
        return self.rebatch(_State([], random.Random(s.seed), context.vocab_size), torch.empty(0), context)

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        given = context.sequences
        prompts = [] if given is None else zip(given.tokens.tolist(), given.prompt_length.tolist(), strict=True)
        state.texts = [self.texts.get(tuple(tokens[:prompt]), []) for tokens, prompt in prompts]
        return state

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        s: SyntheticSettings = self.settings
        known = sequences.read()
        drafts = []
        for text, length, prompt in zip(state.texts, known.lengths, known.prompt_lengths, strict=True):
            begin = length - prompt
            draft, chance = text[begin : begin + len(s.acceptance)], state.drawn.random()
            right = sum(chance < share for share in s.acceptance)
            if right < len(draft):
                draft[right] = (draft[right] + 1) % state.vocabulary
            drafts.append(draft + [-1] * (len(s.acceptance) - len(draft)))
        return Draft.listed(drafts)
