"""Rows that come and go: the first ones of a pool are decoded, the others are read, keep the texts of earlier ones, or are free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from ...sampling.processors import SamplingInputs
from ..model.blocks import Blocks, PromptPiece
from ..model.recordings import Recordings
from ..model.target import Target
from .prefixes import NOTHING, KeptText, PrefixIndex
from .rows import Rows
from .session import Session, room_for


class RowPool(Session):
    """A session whose rows are arranged anew between two steps.

    Attributes:
        stored: all rows; ``rows`` are the first of them, those that are decoded.
        texts: per place, what its slots hold of a text that nobody decodes.
        used: per place, when that text was left there, by the user's clock.
    """

    def __init__(self, target: Target, capacity: int, slots: int, recordings: Recordings | None = None) -> None:
        super().__init__(target, capacity, slots, recordings)
        self.stored = self.rows
        self.used = [0] * capacity
        self._blocks: dict[int, Blocks] = {}
        self._arranged: dict[int, Rows] = {}  # by their number: recorded steps work on these

    def arrange(
        self, lengths: Sequence[int], prompt_lengths: Sequence[int], limits: Sequence[int], finished: Sequence[bool],
        sampling: SamplingInputs,
    ) -> None:  # fmt: skip
        """Makes the first rows those that are decoded; their tokens, keys and values are in place."""
        count, device = len(lengths), self.target.device
        if count not in self._arranged:
            own = self.stored.of_rows(0, count)
            numbers = [torch.zeros_like(own.length) for _ in range(4)]
            self._arranged[count] = Rows(
                own.tokens, numbers[0], numbers[1], torch.zeros_like(own.finished), numbers[2], numbers[3], own.buffers, sampling,
                own.range,
            )  # fmt: skip
        rows = self.rows = replace(self._arranged[count], sampling=sampling)
        for tensor, values in (
            (rows.length, lengths), (rows.prompt_length, prompt_lengths), (rows.finished, finished), (rows.limit, limits),
        ):  # fmt: skip
            tensor.copy_(torch.tensor(values))
        rows.faults.zero_()
        if count not in self._blocks:
            self._blocks[count] = Blocks(count, device, self.target.static, self.target.multiple)
        self.blocks = self._blocks[count]
        self._views.clear()

    def grow(self, slots: int) -> None:
        with room_for(self.batch, slots):
            self.stored = self.stored.enlarged(slots)
        count = len(self.rows.tokens)
        part = self.stored.of_rows(0, count)
        self.rows = replace(self.rows, tokens=part.tokens, buffers=part.buffers, range=part.range)
        self._arranged = {count: self.rows} if count in self._arranged else {}
        self._views.clear()
        if self.recordings is not None:
            self.recordings.clear()

    def put(self, place: int, text: Tensor) -> None:
        """Writes a text's tokens; its keys and values are still to be computed."""
        self.reserve(len(text))
        self.stored.tokens[place, : len(text)] = text

    def take_over(self, place: int, prompt: Tensor, texts: Sequence[KeptText], salt: str = "") -> int:
        """Copies what the slots of any place hold of `prompt` (1-D, on the CPU) to those of `place`; says how many tokens.

        Args:
            texts: what every place holds.
            salt: of the prompt: texts with another one are left alone.
        """
        longest, source = PrefixIndex(list(texts)).longest(prompt, salt)
        in_place = texts[place].shared_with(prompt, salt)
        if longest <= in_place:
            return min(in_place, len(prompt) - 1)
        count = min(longest, len(prompt) - 1)
        self.stored.buffers.copy_row(place, self.stored.buffers, source, count)
        return count

    def read_rows(self, place: int, starts: Sequence[int], done: int, count: int, run: Callable[..., None]) -> None:
        """One pass over `count` tokens of the texts in as many places as there are `starts`, from `place` on.

        Args:
            starts: where each text is read from; the pass begins `done` tokens behind that.
            run: as of :meth:`prefill`.
        """
        latest = max(starts)
        self.reserve(latest + done + count)
        begin = torch.tensor(starts, device=self.target.device)
        self.read(self.stored.of_rows(place, place + len(starts)), begin, latest, done, count, run)

    def piece(self, begin: int, count: int) -> PromptPiece:
        """`count` tokens from slot `begin` on of the row behind those that are decoded, for their next step to read."""
        row = len(self.rows.tokens)
        # Where passes are compiled strides are guarded: those of a slice would be another graph.
        tokens = self.stored.tokens[row : row + 1, begin : begin + count].clone(memory_format=torch.contiguous_format)
        start = torch.tensor([begin], device=self.target.device)
        return PromptPiece(tokens, start, begin, self.view(begin + count)[0], self.stored.buffers.of_rows(0, row + 1))

    def exchange(self, one: int, other: int, count: int, other_count: int) -> None:
        """Two places change what they hold, `count` slots of `one` and `other_count` of `other`."""
        if one == other:
            return
        buffers, tokens = self.stored.buffers, self.stored.tokens
        if count < other_count:
            one, other, count, other_count = other, one, other_count, count
        aside = (buffers.of_row(other, other_count), tokens[other, :other_count].clone()) if other_count else None
        buffers.copy_row(other, buffers, one, count)
        tokens[other, :count] = tokens[one, :count]
        if aside is not None:
            buffers.copy_row(one, aside[0], 0, other_count)
            tokens[one, :other_count] = aside[1]
        self.texts[one], self.texts[other] = self.texts[other], self.texts[one]
        self.used[one], self.used[other] = self.used[other], self.used[one]

    def reorder(
        self, sources: Sequence[int], counts: Sequence[int], beside: Mapping[int, int] = MappingProxyType({})
    ) -> dict[int, int]:
        """Brings the first `counts[i]` slots of place `sources[i]` to place ``i``; -1 is nothing.

        Args:
            beside: slots in use at other places, which are kept wherever that is.

        Returns:
            where what stood at each place in use is now.
        """
        in_use = {**beside, **{source: count for source, count in zip(sources, counts, strict=True) if source >= 0}}
        where = {place: place for place in in_use}
        for place, source in enumerate(sources):
            if source < 0 or where[source] == place:
                continue
            present = next((s for s, p in where.items() if p == place), None)
            kept = in_use[present] if present is not None else len(self.texts[place].tokens)
            if present is not None:
                where[present] = where[source]
            self.exchange(place, where[source], kept, in_use[source])
            where[source] = place
        return where

    def note(self, place: int, text: Tensor, salt: str = "") -> None:
        """Notes that a place holds the keys and values of `text` (1-D int64)."""
        self.texts[place] = self.kept(place, text.cpu(), salt)

    def kept(self, row: int, text: Tensor, salt: str = "") -> KeptText:
        states = self.stored.buffers.states
        if states is None:
            return KeptText(text, salt=salt)
        return KeptText(text, whole=True, salt=salt) if int(states.reached[row]) == len(text) else NOTHING

    def cut(self, place: int, count: int) -> None:
        """Gives up what a place holds behind the first `count` tokens of its text."""
        text = self.texts[place]
        if count < len(text.tokens):
            self.texts[place] = NOTHING if text.whole else KeptText(text.tokens[:count], salt=text.salt)

    def drop(self, place: int) -> None:
        self.texts[place] = NOTHING
