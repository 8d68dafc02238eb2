"""Requests on their way into a batch: each gets a place in the pool, and its prompt is read there while others are decoded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..strategy import PromptChunk
from .loop import Call
from .pool import RowPool
from .prefixes import NOTHING, KeptText
from .reading import Reading
from .request import Request
from .request_output import RequestOutput


@dataclass(eq=False)
class Seat:
    """A request and its place in the pool.

    Attributes:
        reading: how its prompt is read, None before that has begun.
        passes: those still to come.
        chunks: what its strategy is to be shown of the prompt, if it reads prompts: at the beginning of its first step. Without
            logits.
        row: the row of the batch that it is, None while it is read.
        turns: passes that it had, and those that others had had when it came; who has had fewest is next.
    """

    member: RequestOutput
    place: int
    reading: Reading | None = None
    passes: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[PromptChunk] = field(default_factory=list)
    row: int | None = None
    turns: int = 0

    @property
    def prompt(self) -> Tensor:
        return self.member.request.prompts[0]

    @property
    def ready(self) -> bool:
        return self.reading is not None and not self.passes


class Admission:
    """Finds places for requests and reads their prompts.

    Args:
        call: the batch that they will join.
        reserved: places of the pool that are no request's.

    Attributes:
        seats: the requests that are here, in the order in which they came.
    """

    def __init__(self, call: Call, pool: RowPool, reserved: int) -> None:
        self.call, self.pool, self.reserved = call, pool, reserved
        self.seats: list[Seat] = []
        self._pace = 0.0  # seconds per prompt token, as measured

    def take_place(self, request: Request) -> int:
        """A free place: that which holds most of the prompt, or else the one that was used least recently. What else it holds is
        given up: it need not be carried along where rows move.
        """
        taken = {seat.place for seat in self.seats}
        free = [place for place in range(self.reserved, self.pool.batch) if place not in taken]
        prompt = request.prompts[0].cpu()
        shared = {place: self.pool.texts[place].shared_with(prompt) if request.reuse else 0 for place in free}
        place = max(free, key=lambda place: (shared[place], -self.pool.used[place], -place))
        self.pool.cut(place, shared[place])
        return place

    @property
    def _rows(self) -> int:
        """How many rows wait while prompts are read."""
        return sum(seat.row is not None for seat in self.seats)

    @property
    def mixes(self) -> bool:
        """Whether a step reads prompts on the way: then nobody waits for passes of their own."""
        call = self.call
        return not call.request.strategy.reads_prompt and call.passes.mixes(self._rows, call.blocks.single)

    def read(self, pause: float) -> None:
        """Reads prompts, pass by pass in turns; at least one pass, and all of them if nobody waits meanwhile."""
        begun, first = time.perf_counter(), True
        while seat := self._next(pause):
            started = time.perf_counter()
            if self._rows and not first and started - begun >= pause:
                return
            first = False
            done, count = seat.passes.pop(0)
            seat.turns += 1
            assert seat.reading is not None
            self.pool.read_row(seat.place, seat.reading, done, count, self._run_for(seat))
            spent = time.perf_counter() - started
            self.was_read(seat, spent, count)
            if not self.call.request.strategy.reads_prompt:
                self.call.passes.book_mixed(spent, self._rows, self.call.blocks.single)

    def next_piece(self, pause: float) -> tuple[Seat, int, int] | None:
        """Whose prompt the next step reads on the way, from which slot on, and how many tokens."""
        if (seat := self._next(pause)) is None:
            return None
        assert seat.reading is not None
        done, count = seat.passes.pop(0)
        seat.turns += 1
        return seat, seat.reading.starts[0] + done, count

    def was_read(self, seat: Seat, seconds: float, count: int) -> None:
        """Notes what a pass, or a step's part of one, has spent on a piece of so many tokens."""
        self._pace = seconds / count if count >= 32 or not self._pace else self._pace
        seat.member.report.timings.prefill += seconds

    def _next(self, pause: float) -> Seat | None:
        """Who has had fewest passes of those with some to come, the first of equals."""
        while waiting := [seat for seat in self.seats if seat.row is None and not seat.ready]:
            seat = min(waiting, key=lambda each: each.turns)
            if seat.reading is None:
                started = time.perf_counter()
                self._start_reading(seat, pause)
                seat.member.report.timings.prefill += time.perf_counter() - started
            if seat.passes:
                return seat
        return None

    def _start_reading(self, seat: Seat, pause: float) -> None:
        """Puts a prompt in its place with what any other place holds of it, and says in which passes the rest is read."""
        request, prompt = seat.member.request, seat.prompt.cpu()
        self.pool.put(seat.place, seat.prompt)
        reuse = request.reuse and not request.strategy.reads_prompt  # which is shown all of it
        kept = self.pool.take_over(seat.place, prompt, self._texts(seat)) if reuse else 0
        self.pool.drop(seat.place)
        chunk = request.prefill_chunk
        if self._rows:
            chunk = min(chunk, max(int(pause / self._pace), 32) if self._pace else 128)
        seat.reading = Reading.of([len(prompt)], [kept], chunk, self.pool.target, leave=False)
        seat.passes = list(seat.reading.passes)
        seat.member.report.reused = [seat.reading.starts[0]]

    def _run_for(self, seat: Seat) -> Callable[..., None]:
        """How a pass is run: for a strategy that reads prompts what it gives is kept, all but logits, which are large."""
        if not seat.member.request.strategy.reads_prompt:
            return self.call.passes.prefill
        length = torch.tensor([len(seat.prompt)], device=self.pool.target.device)

        def run(*stretch: Any) -> None:
            seat.chunks.append(self.call.read_chunk(length, False, *stretch))

        return run

    def _texts(self, seat: Seat) -> list[KeptText]:
        """What every place holds, those in use included; the place of `seat` holds what was there before."""
        texts = list(self.pool.texts)
        for other in self.seats:
            if other is not seat and other.reading is not None:
                texts[other.place] = self.held(other)
        return texts

    def held(self, seat: Seat) -> KeptText:
        """The text whose keys and values are in a seat's slots."""
        if seat.row is not None:
            written = seat.member.text(0).cpu()
            return self.pool.kept(seat.place, written[: max(len(written) - 1 - self.call.pending, 0)])
        if seat.reading is None:
            return NOTHING
        start, end = seat.reading.starts[0], len(seat.prompt) - 1
        text = seat.prompt.cpu()[: min(start + seat.passes[0][0], end) if seat.passes else end]
        return self.pool.kept(seat.place, text)
