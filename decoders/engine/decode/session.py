"""Sessions: rows of a batch or a draft model, with their tokens, keys and values, and the texts that earlier calls left in the rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...sampling.processors import SamplingInputs
from ...strategy import Sequences
from ..model.blocks import Blocks, PromptPiece
from ..model.buckets import slots_for, view_sizes
from ..model.recordings import Recordings
from ..model.target import Target
from .prefix_cache import NOTHING, KeptText, PrefillPlan
from .rows import Rows, shapes_of


class Session:
    """Rows with their slots of the KV cache, the views of rows that steps use, the texts kept in the slots, and recordings of steps.

    The first rows are being decoded (:meth:`arrange`). The others are being prefilled, hold texts of earlier requests, or are free.

    Attributes:
        stored: all rows, on the device.
        rows: the rows that are decoded.
        batch: number of all rows.
        blocks: turns drafts into blocks.
        recordings: recordings of passes and steps on the rows' tensors; None if the device records nothing.
        texts: per row, the text in its slots that later requests can reuse; empty while a request uses the row.
        used: per row, a number that orders the kept texts by time: greater is later. The session's owner sets it.
        shared: maps ``n`` to the session of the draft model that consists of the target's first ``n`` layers (:class:`SharedSlots`).
    """

    def __init__(self, target: Target, batch: int, slots: int, recordings: Recordings | None = None) -> None:
        self.target, self.batch = target, batch
        self.stored = self.rows = Rows.allocate(target, batch, slots)
        self.recordings = recordings
        self.texts, self.used = [NOTHING] * batch, [0] * batch
        self.shared: dict[int, Session] = {}
        self._sampling: dict[tuple, SamplingInputs] = {}
        self._blocks: dict[int, Blocks] = {}
        # By number of rows, views of the first rows. They are kept, because recorded steps read and write them.
        self._arranged: dict[int, Rows] = {batch: self.rows}
        self.blocks = self._blocks_for(batch)
        self._forget_views()

    def _forget_views(self) -> None:
        """Drops the views of the rows, because the rows have been replaced or enlarged."""
        self._views: dict[int, tuple[Tensor, Sequences]] = {}
        self._sizes = view_sizes(self.rows.slots, self.target.static)

    def _blocks_for(self, rows: int) -> Blocks:
        if rows not in self._blocks:
            self._blocks[rows] = Blocks(rows, self.target.device, self.target.static, self.target.multiple)
        return self._blocks[rows]

    def arrange(
        self, lengths: Sequence[int], prompt_lengths: Sequence[int], limits: Sequence[int], finished: Sequence[bool],
        sampling: SamplingInputs,
    ) -> None:  # fmt: skip
        """Makes the first ``len(lengths)`` rows the decoded rows. Their tokens, keys and values must be in place before a step."""
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
        self.blocks.exact = self.blocks.single = False  # an earlier call may have set these flags
        self._forget_views()

    def own(self, sampling: SamplingInputs) -> SamplingInputs:
        """Copies `sampling` to tensors of the session, which recorded steps read. Returns the session's tensors."""
        own = self._sampling.setdefault(shapes_of(sampling), sampling)
        if own is not sampling:
            for name, tensor in vars(own).items():
                if tensor is not None:
                    tensor.copy_(getattr(sampling, name))
        return own

    @property
    def replays(self) -> int:
        """The number of replays of the session's recordings so far; 0 if the device records nothing."""
        return self.recordings.replays if self.recordings is not None else 0

    @property
    def unrecorded(self) -> str:
        """See :attr:`~decoders.engine.model.recordings.Recordings.unrecorded`."""
        return self.recordings.unrecorded if self.recordings is not None else ""

    def lists(self, *tensors: Tensor) -> tuple[list, ...]:
        """The values of small tensors of a step, as lists. Waits for the device."""
        if self.recordings is not None:
            return self.recordings.lists(*tensors)
        return tuple([tensor.tolist() for tensor in tensors])

    def view(self, length: int) -> tuple[Tensor, Sequences]:
        """The view (see :attr:`Rows.range`) of the slots that cover `length` tokens, and the rows' tokens in these slots.

        If sizes are static, the view covers all slots, so that no shape depends on a length; the kernel reads only the used slots.
        """
        place = bisect_left(self._sizes, length)
        slots = self._sizes[place] if place < len(self._sizes) else len(self.rows.range)
        if slots not in self._views:
            self._views[slots] = (self.rows.range[:slots], self.rows.sequences(slots))
        return self._views[slots]

    def reserve(self, length: int) -> None:
        """Enlarges the rows if a block that ends at slot `length` needs it. The rows' contents stay."""
        if length > self._sizes[-1]:
            self.grow(slots_for(2 * length, self.target.static))

    def grow(self, slots: int) -> None:
        """Enlarges every row to `slots` slots. Drops recordings, because they use the old tensors."""
        self.stored = self.stored.enlarged(slots)
        count = len(self.rows.tokens)
        part = self.stored.of_rows(0, count)
        self.rows = replace(self.rows, tokens=part.tokens, buffers=part.buffers, range=part.range)
        self._arranged = {self.batch: self.stored, count: self.rows}
        self._forget_views()
        if self.recordings is not None:
            self.recordings.clear()

    def put(self, row: int, text: Tensor, shift: int = 0) -> None:
        """Writes the tokens of `text` to a row; their keys and values are computed later. shift: see :class:`CacheBuffers`."""
        self.reserve(len(text))
        self.stored.tokens[row, : len(text)] = text
        if (shifts := self.stored.buffers.shifts) is not None:
            shifts[row] = shift

    def prefill(
        self, lengths: list[int], reused: list[int], chunk: int | None, run: Callable[..., None], *,
        first: int = 0, leave_last_chunk: bool = False, padded: bool = False, given: bool = False,
    ) -> tuple[list[int], int]:  # fmt: skip
        """Stores keys and values of all prompt tokens except each row's last, which is node 0 of the first block.

        Args:
            lengths: number of tokens per prompt.
            reused: per prompt, number of leading tokens whose keys and values are already in the row's slots.
            chunk: greatest number of tokens per row and pass; None for the default.
            run: runs a pass; called with the arguments of :meth:`Target.prefill`.
            first: the row of the first prompt.
            leave_last_chunk: whether to leave the last chunk to the first step, which then reads the weights once for chunk and block.
            padded: whether `run` tells recurrent layers which tokens are padding. Otherwise rows with recurrent states are prefilled
                one at a time, because a state must process every token once and no token after the text's end.
            given: see :meth:`PrefillPlan.of`.

        Returns:
            :attr:`PrefillPlan.starts` and :attr:`PrefillPlan.left`.
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
        """Runs one pass over `count` tokens in each of ``len(starts)`` adjacent rows; `first` is the index of the first row.

        Args:
            starts: see :attr:`PrefillPlan.starts`.
            done: number of tokens after `starts` that earlier passes have run.
            run: see :meth:`prefill`.
        """
        latest = max(starts) + done
        self.reserve(latest + count)
        rows = self.stored.of_rows(first, first + len(starts))
        begin = torch.tensor([start + done for start in starts], device=self.target.device)
        slots = begin[:, None] + torch.arange(count, device=begin.device)
        run(rows.tokens.gather(1, slots), begin, rows.buffers, self.view(latest + count)[0], latest)

    def piece(self, begin: int, count: int) -> PromptPiece:
        """The prompt piece for the next step: `count` tokens from slot `begin` on, in the row after the decoding rows."""
        row = len(self.rows.tokens)
        # The tokens are copied, because compiled passes guard strides: a slice would need another compiled graph.
        tokens = self.stored.tokens[row : row + 1, begin : begin + count].clone(memory_format=torch.contiguous_format)
        start = torch.tensor([begin], device=self.target.device)
        return PromptPiece(tokens, start, begin, self.view(begin + count)[0], self.stored.buffers.of_rows(0, row + 1))

    def keep(self, lengths: list[int], prompts: Sequence[KeptText] = ()) -> None:
        """Keeps the first `lengths[i]` tokens of row ``i`` as the row's text, with ``salt`` and ``least`` of ``prompts[i]``."""
        tokens = self.rows.tokens.cpu()
        self.forget()
        for row, length in enumerate(lengths):
            prompt = prompts[row] if row < len(prompts) else NOTHING
            self.texts[row] = self.kept(row, tokens[row, :length].clone(), prompt)

    def kept(self, row: int, text: Tensor, prompt: KeptText = NOTHING) -> KeptText:
        """The text that a row can keep: `text` (1-D, on the CPU), or an empty text if the row's recurrent state is at another position.

        prompt: its `salt` and `least` are copied to the kept text.
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
