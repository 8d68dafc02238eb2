"""Admits requests to a batch. Each request gets a place, a row of the pool of KV cache slots. Its prompt is prefilled there, while
other rows are decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...strategy import PromptChunk
from ..model.buckets import LEAST_CHUNK, chunk_bucket
from ..model.target import PREFILL_CHUNK
from ..model.weights.state import WeightState
from .output import RequestOutput
from .prefix_cache import NOTHING, KeptText, PrefillPlan
from .prompt_reader import PromptReader, read_chunk
from .request import Request
from .session import Session
from .sessions import take_over

#: Greatest number of tokens in a pass over several prompts. Longer prompts are prefilled alone: one of them keeps the processor busy.
SHARED_PASS = 512


@dataclass(eq=False)
class Seat:
    """A request of a lane, and its place: a row of the pool. The pool is the session with keys and values of all requests of the lane.

    Attributes:
        member: the request and its output.
        place: index of the request's row in the pool.
        plan: which passes prefill the prompt; None before the prefill begins.
        to_read: the chunks of the plan that are not prefilled yet, each as ``(offset from the plan's start, number of tokens)``.
        chunks: results of the prefill passes, kept for a strategy that reads prompts. Logits are left out, because they are large.
        weights: state of the model's weights when the prefill began; None before the prefill begins.
        row: index of the request's row in the batch; None until the prompt is prefilled.
        turns: number of passes over the prompt so far. The seat with the fewest turns is prefilled next. A new seat starts at the
            smallest `turns` of the waiting seats, so that it does not get several passes in a row.
    """

    member: RequestOutput
    place: int
    plan: PrefillPlan | None = None
    to_read: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[PromptChunk] = field(default_factory=list)
    weights: WeightState | None = None
    row: int | None = None
    turns: int = 0

    @property
    def prompt(self) -> Tensor:
        return self.member.request.prompts[0]

    @property
    def prefix(self) -> KeptText:
        return self.member.request.prefix_of(0)

    @property
    def ready(self) -> bool:
        return self.plan is not None and not self.to_read


class Admission:
    """Finds a place in the pool for each request, and prefills its prompt.

    Args:
        prompts: the prompt reader of the batch that the requests will join.
        pool: the session with the keys and values of all requests; each of its rows is a place for one request.
        reserved: number of places at the start of the pool that :meth:`take_place` never returns.

    Attributes:
        seats: all requests, in order of arrival.
    """

    def __init__(self, prompts: PromptReader, pool: Session, reserved: int) -> None:
        self.batch, self.prompts, self.pool, self.reserved = prompts.batch, prompts, pool, reserved
        self.seats: list[Seat] = []
        self._pace = 0.0  # seconds per prompt token, as measured

    def take_place(self, request: Request) -> int:
        """Returns the free place whose text, left by an earlier request, shares the longest prefix with the prompt.

        Of several such places, returns the least recently used. The place keeps only the shared prefix of its text, so that a move to
        another row copies only the prefix.
        """
        taken = {seat.place for seat in self.seats}
        free = [place for place in range(self.reserved, self.pool.batch) if place not in taken]
        prompt = request.prefix_of(0)
        shared = {place: self.pool.texts[place].shared_with(prompt) if request.runtime.reuse else 0 for place in free}
        place = max(free, key=lambda place: (shared[place], -self.pool.used[place], -place))
        self.pool.cut(place, shared[place])
        return place

    @property
    def _rows(self) -> int:
        """Number of rows that are being decoded. These rows wait while prompts are prefilled."""
        return sum(seat.row is not None for seat in self.seats)

    @property
    def mixes(self) -> bool:
        """Whether a step's pass also prefills a piece of a waiting prompt (chunked prefill), so that no row waits for a prefill."""
        batch = self.batch
        return not batch.request.strategy.reads_prompt and batch.forward_pass.tiers.mixes(
            self._rows, single=batch.blocks.single
        )

    def read(self, pause: float) -> None:
        """Prefills waiting prompts in turns. If rows are being decoded, stops after about `pause` seconds; at least one pass runs."""
        begun, first = time.perf_counter(), True
        while seat := self._next(pause, together=True):
            started = time.perf_counter()
            if self._rows and not first and started - begun >= pause:
                return
            first = False
            seats, count = self._read_alike(seat), seat.to_read[0][1]
            self._pass(seats)
            spent = time.perf_counter() - started
            for each in seats:
                self.was_read(each, spent, count * len(seats))
            if not self.batch.request.strategy.reads_prompt:
                self.batch.forward_pass.tiers.book_mixed(spent, self._rows, single=self.batch.blocks.single)

    def _pass(self, seats: list[Seat]) -> None:
        """Runs one pass over the next chunk of each seat's prompt; the seats are in adjacent places."""
        done, count = seats[0].to_read[0]
        starts = [seat.plan.starts[0] for seat in seats if seat.plan is not None]
        for seat in seats:
            seat.to_read.pop(0)
            seat.turns += 1
        self.pool.read_rows(seats[0].place, starts, done, count, self._run_for(seats[0]))

    def next_piece(self, pause: float) -> tuple[Seat, int, int] | None:
        """Chooses the piece of a waiting prompt that the next step's pass prefills. Returns the prompt's seat, and the piece's first
        slot and number of tokens; None if no piece is due. pause: about how many seconds the piece may take.
        """
        if (seat := self._next(pause)) is None:
            return None
        assert seat.plan is not None
        done, count = seat.to_read.pop(0)
        seat.turns += 1
        return seat, seat.plan.starts[0] + done, count

    def was_read(self, seat: Seat, seconds: float, count: int) -> None:
        """Adds the `seconds` of a prefill pass to the seat's report, and updates the measured seconds per prompt token.

        count: number of prompt tokens in the pass, of all seats together.
        """
        self._pace = seconds / count if count >= 32 or not self._pace else self._pace
        seat.member.report.timings.prefill += seconds

    def _next(self, pause: float, together: bool = False) -> Seat | None:
        """Returns the waiting seat with the fewest turns, which is prefilled next; None if no pass is due. Plans the seat's passes.

        together: whether several prompts may share passes.
        """
        while waiting := [s for s in self.seats if s.row is None and not s.ready and s.member.error is None]:
            seat = min(waiting, key=lambda each: each.turns)
            if seat.plan is None:
                started = time.perf_counter()
                read = self._start_reading(self._companions(seat) if together else [seat], pause)
                seat.member.report.timings.prefill += time.perf_counter() - started
                if read and self._rows:  # reading images took a whole pass, so the waiting rows get their step now
                    return None
            if seat.to_read:
                return seat
        return None

    def _read_alike(self, seat: Seat) -> list[Seat]:
        """Returns `seat` and the other seats whose next chunk can run in the same pass."""
        following = seat.to_read[0]
        return self._beside(seat, lambda other: other.to_read[:1] == [following], lambda other: following[1])

    def _companions(self, seat: Seat) -> list[Seat]:
        """Returns `seat` and the seats whose prompts are prefilled in the same passes.

        The lengths of their prompts are between half and twice the length of the prompt of `seat`. Prompts that share more than half of
        their text are prefilled one after the other, so that the common part is computed once and copied.
        """
        own, prompt = seat.prefix, seat.prompt
        if seat.member.request.multimodal is not None:
            return [seat]

        def fits(other: Seat) -> bool:
            return (
                other.plan is None and other.member.request.multimodal is None
                and len(prompt) <= 2 * len(other.prompt) and len(other.prompt) <= 2 * len(prompt)
                and 2 * own.shared_with(other.prefix) < len(other.prompt)
            )  # fmt: skip

        return self._beside(seat, fits, lambda other: len(other.prompt))

    def _beside(self, seat: Seat, fits: Callable[[Seat], bool], tokens: Callable[[Seat], int]) -> list[Seat]:
        """Returns `seat` and the waiting seats that are in adjacent places and for which `fits` is True, in the order of places.

        tokens: returns the number of tokens that a seat adds to a pass. All seats of a pass add at most :data:`SHARED_PASS` tokens.
        """
        target = self.pool.target
        if target.recurrent or target.static or self.batch.request.strategy.reads_prompt:
            return [seat]
        waiting = {other.place: other for other in self.seats if other.row is None and (other is seat or fits(other))}
        first = last = seat.place
        while first - 1 in waiting:
            first -= 1
        while last + 1 in waiting:
            last += 1
        most = max(SHARED_PASS // max(tokens(waiting[place]) for place in range(first, last + 1)), 1)
        first = max(first, seat.place + 1 - most)
        return [waiting[place] for place in range(first, min(first + most, last + 1))]

    def _start_reading(self, seats: list[Seat], pause: float) -> bool:
        """Writes the seats' prompts to their places, copies keys and values of shared prefixes from other places, and plans the passes.

        Returns whether the model's own forward pass read images. An exception in this pass is stored in the output of the request, and
        ends only this request.
        """
        kept, read = [], set[Seat]()
        for seat in seats:
            request = seat.member.request
            # A strategy that reads prompts gets the results of passes over the whole prompt, so no keys and values are reused.
            reuse = request.runtime.reuse and not request.strategy.reads_prompt
            inputs, length = request.multimodal, len(seat.prompt)
            self.pool.put(seat.place, seat.prompt, inputs.shifts[0] if inputs is not None else 0)
            kept += take_over(self.pool, {seat.place: seat.prefix}, self._texts(seat)) if reuse else [0]
            self.pool.drop(seat.place)
            if inputs is not None and not self.prompts.images_in_place(inputs, [length], kept[-1:]):
                try:
                    shown = self.prompts.read_images(inputs, [length], seat.place, logits=False)
                except Exception as error:
                    seat.member.error = error
                    return True
                seat.chunks += [shown] if shown is not None else []
                kept[-1] = length - 1
                read.add(seat)
        chunk = min(seat.member.request.runtime.prefill_chunk or PREFILL_CHUNK for seat in seats)
        if self._rows:
            wanted = max(int(pause / self._pace / len(seats)), LEAST_CHUNK) if self._pace else 128
            chunk = min(chunk, chunk_bucket(wanted, self.pool.target.static))
        lengths = [len(seat.prompt) for seat in seats]
        plan = PrefillPlan.of(lengths, kept, chunk, self.pool.target, given=bool(read))
        for seat, start in zip(seats, plan.starts, strict=True):
            seat.plan, seat.weights = replace(plan, starts=[start]), self.pool.target.weights
            seat.to_read = list(plan.chunks)
            seat.member.report.reused = [0 if seat in read else start]
        return bool(read)

    def _run_for(self, seat: Seat) -> Callable[..., None]:
        """Returns the function that runs a prefill pass. For a strategy that reads prompts, the function also appends the results to
        `seat.chunks`, unless the prompt has images: :meth:`_start_reading` has already appended the results of the whole prompt.
        """
        if not seat.member.request.strategy.reads_prompt or seat.member.request.multimodal is not None:
            return self.batch.prefill
        length = torch.tensor([len(seat.prompt)], device=self.pool.target.device)

        def run(*stretch: Any) -> None:
            seat.chunks.append(read_chunk(self.batch, length, *stretch, logits=False))

        return run

    def _texts(self, seat: Seat) -> list[tuple[Session, int, KeptText]]:
        """Returns ``(pool, place, text in its slots)`` for each place. The place of `seat` still has the text of an earlier request."""
        texts = list(self.pool.texts)
        for other in self.seats:
            if other is not seat and other.plan is not None:
                texts[other.place] = self.held(other)
        return [(self.pool, place, text) for place, text in enumerate(texts)]

    def held(self, seat: Seat) -> KeptText:
        """The text whose keys and values are in a seat's slots; empty before the prefill, or if the weights have changed since."""
        if seat.weights is not None and seat.weights is not self.pool.target.weights:
            return NOTHING
        if seat.row is not None:
            written = seat.member.text(0).cpu()
            return self.pool.kept(seat.place, written[: max(len(written) - 1 - self.batch.pending, 0)], seat.prefix)
        if seat.plan is None:
            return NOTHING
        start, end = seat.plan.starts[0], len(seat.prompt) - 1
        text = seat.prompt.cpu()[: min(start + seat.to_read[0][0], end) if seat.to_read else end]
        return self.pool.kept(seat.place, text, seat.prefix)
