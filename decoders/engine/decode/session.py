"""Sessions: rows of tokens, keys and values of a batch or a draft model, and the texts of earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from ...errors import CacheMemoryError
from ...sampling.processors import SamplingInputs
from ...strategy import Sequences
from ..model.blocks import Blocks, PromptPiece
from ..model.buckets import slots_for, view_bucket
from ..model.recordings import Recordings
from ..model.target import Target
from .prefix_cache import NOTHING, KeptText, PrefillPlan, PrefixIndex
from .rows import Rows, shapes_of


class Session:
    """Rows with their slots, the steps' views of them, the texts that they keep, and recordings.

    The first rows are decoded, see :meth:`arrange`; other rows are being prefilled, keep the texts of earlier requests, or are free.

    Attributes:
        stored: all rows, on the device.
        rows: the decoded rows.
        batch: number of all rows.
        blocks: turns drafts into blocks.
        recordings: of passes and steps on these tensors; None if the device records nothing.
        texts: per row that no request decodes, the text in its slots.
        used: per row, the time of keeping its text, by the owner's counter.
        shared: sessions of draft models made of the target's first layers, by number of layers (:mod:`~.drafts.shared_slots`).
    """

    def __init__(self, target: Target, batch: int, slots: int, recordings: Recordings | None = None) -> None:
        self.target, self.batch = target, batch
        with room_for(batch, slots):
            self.stored = self.rows = Rows.allocate(target, batch, slots)
        self.recordings = recordings
        self.texts, self.used = [NOTHING] * batch, [0] * batch
        self.shared: dict[int, Session] = {}
        self._views: dict[int, tuple[Tensor, Sequences]] = {}
        self._sampling: dict[tuple, SamplingInputs] = {}
        self._blocks: dict[int, Blocks] = {}
        self._arranged: dict[int, Rows] = {
            batch: self.rows
        }  # by number of rows, because recorded steps work on these tensors
        self.blocks = self._blocks_for(batch)

    def _blocks_for(self, rows: int) -> Blocks:
        if rows not in self._blocks:
            self._blocks[rows] = Blocks(rows, self.target.device, self.target.static, self.target.multiple)
        return self._blocks[rows]

    def arrange(
        self, lengths: Sequence[int], prompt_lengths: Sequence[int], limits: Sequence[int], finished: Sequence[bool],
        sampling: SamplingInputs,
    ) -> None:  # fmt: skip
        """Makes the first rows the decoded rows; their tokens, keys and values are in place, or will be before a step."""
        count = len(lengths)
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
            tensor.copy_(torch.tensor(values, device="cpu"))
        rows.faults.zero_()
        self.blocks = self._blocks_for(count)
        self.blocks.exact = self.blocks.single = False  # set by an earlier call
        self._views.clear()

    def own(self, sampling: SamplingInputs) -> SamplingInputs:
        """Copies `sampling` to tensors that calls with the same shapes share, because recorded steps read them."""
        own = self._sampling.setdefault(shapes_of(sampling), sampling)
        if own is not sampling:
            for name, tensor in vars(own).items():
                if tensor is not None:
                    tensor.copy_(getattr(sampling, name))
        return own

    @property
    def replays(self) -> int:
        """The number of replays on these rows."""
        return self.recordings.replays if self.recordings is not None else 0

    @property
    def unrecorded(self) -> str:
        """See :attr:`~decoders.engine.model.recordings.Recordings.unrecorded`."""
        return self.recordings.unrecorded if self.recordings is not None else ""

    def lists(self, *tensors: Tensor) -> tuple[list, ...]:
        """The values of small tensors of a step; waits for the device."""
        if self.recordings is not None:
            return self.recordings.lists(*tensors)
        return tuple([tensor.tolist() for tensor in tensors])

    def view(self, length: int) -> tuple[Tensor, Sequences]:
        """``range`` of the slots that attention looks at to cover `length`, and the rows' tokens in these slots.

        If sizes are static, these are all slots, so that no shape depends on a row's length; the kernel reads a row's own slots only.
        """
        slots = self.rows.slots if self.target.static else view_bucket(length)
        if slots not in self._views:
            self._views[slots] = (self.rows.range[:slots], self.rows.sequences(slots))
        return self._views[slots]

    def reserve(self, length: int) -> None:
        """Makes room for a block that ends at `length`; the rows' contents stay."""
        # If sizes are dynamic, a view must stay smaller than the cache (see slots_for).
        static = self.target.static
        if (length > self.rows.slots) if static else (view_bucket(length) >= self.rows.slots):
            self.grow(slots_for(2 * length, static))

    def grow(self, slots: int) -> None:
        """Gives every row room for `slots` tokens. Drops recordings, which use the old tensors."""
        with room_for(self.batch, slots):
            self.stored = self.stored.enlarged(slots)
        count = len(self.rows.tokens)
        part = self.stored.of_rows(0, count)
        self.rows = replace(self.rows, tokens=part.tokens, buffers=part.buffers, range=part.range)
        self._arranged = {self.batch: self.stored, count: self.rows}
        self._views.clear()
        if self.recordings is not None:
            self.recordings.clear()

    def put(self, row: int, text: Tensor, shift: int = 0) -> None:
        """Writes a text's tokens, whose keys and values are computed later. shift: see :class:`CacheBuffers`."""
        self.reserve(len(text))
        self.stored.tokens[row, : len(text)] = text
        if (shifts := self.stored.buffers.shifts) is not None:
            shifts[row] = shift

    def take_over(self, prompts: Mapping[int, KeptText], held: Sequence[tuple[Session, int, KeptText]]) -> list[int]:
        """Copies to each row the longest prefix of its prompt that any slots hold; returns the number of tokens in place per row.

        Args:
            prompts: by row.
            held: a session, its row, and the text in this row.
        """
        index = PrefixIndex([text for *_, text in held])
        reused, moves = [], []
        for row, prompt in prompts.items():
            in_place = self.texts[row].shared_with(prompt)
            longest, place = index.longest(prompt)
            reused.append(min(max(longest, in_place), len(prompt.tokens) - 1))
            if reused[-1] > in_place:
                session, source_row, _ = held[place]
                moves.append((row, session.stored.buffers, source_row, reused[-1]))
        own, written = self.stored.buffers, {row for row, *_ in moves}
        # A source row may be overwritten before it is read, so its content is copied first.
        sources = [
            (source.of_row(place, count), 0) if source is own and place in written else (source, place)
            for _, source, place, count in moves
        ]
        for row in written:  # if copying fails midway, these rows have no reusable text
            self.drop(row)
        for (row, _, _, count), (source, place) in zip(moves, sources, strict=True):
            own.copy_row(row, source, place, count)
        return reused

    def prefill(
        self, lengths: list[int], reused: list[int], chunk: int | None, run: Callable[..., None], *,
        first: int = 0, leave_last_chunk: bool = False, padded: bool = False, given: bool = False,
    ) -> tuple[list[int], int]:  # fmt: skip
        """Stores keys and values of all prompt tokens except each row's last, which is node 0 of the first block.

        Args:
            lengths: tokens per prompt.
            reused: per row, number of first slots that hold its keys and values.
            chunk: greatest number of tokens per row and pass; None is the default.
            run: runs each pass, as :meth:`Target.prefill` does.
            first: the row of the first prompt.
            leave_last_chunk: whether to leave the last chunk to the first step, which then reads the weights once for both.
            padded: whether `run` tells recurrent layers which tokens are padding. Otherwise their rows are read one at a time: a
                recurrent state must see every token once, and none after a text's end.
            given: see :meth:`PrefillPlan.of`.

        Returns:
            per row, the number of reused tokens; and the number of tokens before the last that are left pending. Rows advance
            together, so a row with few tokens to read reads some tokens a second time.
        """
        if self.target.recurrent and not padded and len(lengths) > 1:
            for row, (length, kept) in enumerate(zip(lengths, reused, strict=True)):
                self.prefill([length], [kept], chunk, run, first=first + row, given=given)
            return reused, 0
        leave_last_chunk = leave_last_chunk and not self.target.recurrent
        plan = PrefillPlan.of(lengths, reused, chunk, self.target, leave_last_chunk=leave_last_chunk, given=given)
        for done, count in plan.chunks:
            self.read_rows(first, plan.starts, done, count, run)
        return plan.starts, plan.left

    def read_rows(self, first: int, starts: Sequence[int], done: int, count: int, run: Callable[..., None]) -> None:
        """One pass over `count` tokens of the texts in ``len(starts)`` rows, from the row `first` on.

        Args:
            starts: where the plan begins in each text; the pass begins `done` tokens later.
            run: see :meth:`prefill`.
        """
        latest = max(starts) + done
        self.reserve(latest + count)
        rows = self.stored.of_rows(first, first + len(starts))
        begin = torch.tensor([start + done for start in starts], device=self.target.device)
        slots = begin[:, None] + torch.arange(count, device=begin.device)
        run(rows.tokens.gather(1, slots), begin, rows.buffers, self.view(latest + count)[0], latest)

    def piece(self, begin: int, count: int) -> PromptPiece:
        """The piece for the next step: `count` tokens from slot `begin` on, of the row after the decoded rows."""
        row = len(self.rows.tokens)
        # A copy, because compiled passes guard strides: a slice would need another graph.
        tokens = self.stored.tokens[row : row + 1, begin : begin + count].clone(memory_format=torch.contiguous_format)
        start = torch.tensor([begin], device=self.target.device)
        return PromptPiece(tokens, start, begin, self.view(begin + count)[0], self.stored.buffers.of_rows(0, row + 1))

    def exchange(self, one: int, other: int, count: int, other_count: int) -> None:
        """Swaps the contents of two places, `count` slots of `one` and `other_count` of `other`."""
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
        """Moves the first `counts[i]` slots of place `sources[i]` to place ``i``; -1 for none.

        beside: slots in use at other places; their contents may move, but stay.

        Returns:
            former place → present place of the contents, for each place in use.
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

    def keep(self, lengths: list[int], prompts: Sequence[KeptText] = ()) -> None:
        """Keeps the first `lengths[i]` tokens of each row as its text. prompts: those of the first rows; other rows have no salt."""
        tokens = self.rows.tokens.cpu()
        self.forget()
        for row, length in enumerate(lengths):
            prompt = prompts[row] if row < len(prompts) else NOTHING
            self.texts[row] = self.kept(row, tokens[row, :length].clone(), prompt)

    def kept(self, row: int, text: Tensor, prompt: KeptText = NOTHING) -> KeptText:
        """The text that a row can keep: `text` (1-D, on the CPU), or nothing if a recurrent state has read more or less.

        prompt: has the text's salt and the end of its images.
        """
        states = self.stored.buffers.states
        kept = replace(prompt, tokens=text, whole=states is not None)
        return kept if states is None or int(states.reached[row]) == len(text) else NOTHING

    def cut(self, row: int, count: int) -> None:
        self.texts[row] = self.texts[row].cut(count)

    def drop(self, row: int) -> None:
        self.texts[row] = NOTHING

    def forget(self) -> None:
        self.texts = [NOTHING] * self.batch


@contextmanager
def room_for(rows: int, slots: int) -> Iterator[None]:
    """Raises CacheMemoryError if the CPU has no memory for the buffers; adds a note to other errors, CUDA's included."""
    what = f"the key-value cache of {rows} rows with {slots} slots each"
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # The CPU's allocator has no error of its own; sizes above 2⁶³ bytes "overflow".
        cpu = isinstance(error, MemoryError) or any(word in str(error) for word in ("memory", "overflow"))
        if isinstance(error, torch.OutOfMemoryError) or not cpu:
            error.add_note(f"decoders: while allocating {what}")
            raise
        raise CacheMemoryError(
            f"there is no memory for {what}: ask for fewer tokens, rows or slots ({error})"
        ) from error
