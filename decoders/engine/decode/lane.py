"""A lane: requests of a scheduler, with one row each, that join and leave a :class:`Batch` between steps."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ...strategy import PromptChunk
from ..model.buckets import row_bucket, slots_for
from .admission import Admission, Seat
from .batch import Batch
from .engine import Engine
from .grammar.host_guide import HostGuide
from .losses import warn_of_load
from .output import RequestOutput
from .prompt_reader import PromptReader
from .proposer import Proposer
from .request import Request, empty_report
from .sampling import sampling_of
from .session import Session
from .sessions import reorder
from .step import TimedSteps

#: Number of slots per place (row) of a new pool; the pool is enlarged when its texts need more.
FIRST_SLOTS = 256


class Lane:
    """Requests that share their steps, because they have the same strategy, sampling plan and verifier.

    In float32 a request gets the same tokens as in a separate call of ``generate``: noise depends only on the request's seed and
    on positions; parameters, stop tokens, grammars and budgets are per row. Other requests change the request's timing, not its tokens.

    Args:
        engine: the model's engine.
        request: the first request; it defines what all requests have in common.
        capacity: greatest number of requests at once. If the strategy reads prompts, and has no `rebatch` or the prompts have images,
            the capacity becomes 1: the strategy would have to read all texts again when another request joins or leaves.

    Attributes:
        admission: finds places for new requests and prefills their prompts.
        batch: the requests whose prompts have been prefilled, and which are being decoded.
        proposer: the strategy that drafts for the batch.
        prompts: prefills images and sounds; passes all texts to a strategy that reads prompts and was started again.
        rows: the requests in the batch, in the order of its rows; requests that have left are removed before the next step.
    """

    def __init__(self, engine: Engine, request: Request, capacity: int) -> None:
        self._sees = request.multimodal is not None
        if request.strategy.reads_prompt and (self._sees or not request.strategy.rebatches):
            capacity = 1
        request = replace(
            request, multimodal=None
        )  # drops the images, which are large: the lane may outlive the request
        self.engine, self.template, self.capacity = engine, request, capacity
        self.stack = ExitStack()
        self.batch = batch = Batch(engine, request, capacity)
        self.proposer = Proposer(batch, self.stack)
        self.prompts, self._steps = PromptReader(self.proposer), TimedSteps(self.proposer)
        static = engine.target.static
        # The batch may be padded with rows. Places are reserved for the whole batch, so that padding rows overwrite no kept texts.
        reserved = row_bucket(capacity) if static else 0
        slots, recordings = slots_for(FIRST_SLOTS, engine.target.static), engine.sessions.recordings()
        self.pool = Session(engine.target, reserved + capacity, slots, recordings)
        batch.session = self.pool
        self.admission = Admission(self.prompts, self.pool, reserved)
        self.rows: list[Seat] = []
        self._weights = engine.target.weights
        self._tiers: set[Hashable] | None = None
        self._uses = 0

    @property
    def seats(self) -> list[Seat]:
        """All requests of the lane, in order of arrival."""
        return self.admission.seats

    @property
    def free(self) -> int:
        """The number of requests that can still join the lane."""
        return self.capacity - len(self.seats)

    @property
    def outdated(self) -> bool:
        """Whether code has been compiled since the lane's requests began. Only requests in a new lane will run the compiled code."""
        if not self.seats:
            return False
        batch, mode = self.batch, self.template.runtime.compile
        return any(drafter.outdated for drafter in self.proposer.drafters) or batch.forward_pass.tiers.outdated(
            self._tiers, mode, batch.request.plan, joined=self.capacity > 1
        )

    def fits(self, engine: Engine, request: Request) -> bool:
        """Whether `request` can share steps with the lane's requests."""
        # For a strategy that reads prompts, requests with images need a lane of their own: prompts with images cannot be read again.
        seen = self._sees == (request.multimodal is not None) or not request.strategy.reads_prompt
        return engine is self.engine and seen and share_steps(self.template, request)

    def offer(self, request: Request) -> RequestOutput:
        """Gives a request of one row a place in the pool; the following steps prefill its prompt. Returns its output."""
        assert len(request.prompts) == 1 and self.free > 0
        if not self.seats:
            mode, joined = self.template.runtime.compile, self.capacity > 1
            self._tiers = self.batch.forward_pass.tiers.steady_tiers(mode, joined=joined)
        if self._weights is not self.engine.target.weights:  # kept texts were computed with other weights
            self._weights = self.engine.target.weights
            self.pool.forget()
        member = RequestOutput(request, empty_report(request, self.engine.target))
        seat = Seat(member, self.admission.take_place(request))
        seat.turns = min((other.turns for other in self.seats if other.row is None), default=0)
        self.seats.append(seat)
        return member

    def advance(self, pause: float) -> list[RequestOutput]:
        """Prefills prompts for about `pause` seconds, runs a step, and returns the outputs of the requests that have ended or failed.

        An exception that concerns all requests, for example an exception of the strategy, is raised.
        """
        with self._running():
            if self.template.runtime.compile is True and not self.proposer.arranged:
                self.batch.forward_pass.tiers.compile_for(self.capacity, self.batch.report)
            if self.capacity > 1:
                self.batch.forward_pass.tiers.compile_both()
            # Decided once per step: either separate passes prefill prompts, or the step's own pass prefills a piece.
            mixes = self.admission.mixes
            if not mixes:
                self.admission.read(pause)
            self._join()
            if self.rows:
                self._step(pause if mixes else None)
            return self._leave()

    def remove(self, member: RequestOutput) -> None:
        """Takes a request out of the lane between two steps. Its output so far stays in `member`."""
        with self._running():
            self._take_out([seat for seat in self.seats if seat.member is member])

    def close(self, cause: Exception | None = None) -> None:
        """Ends the requests and the strategy of the lane, and frees the lane's buffers.

        If `cause` is an out-of-memory error, also drops the model's unused sessions and its recordings.

        An exception of the strategy's `finish` becomes a note on `cause`; without a `cause` it becomes a warning.
        """
        with self._running(), self.stack:
            for seat in self.seats:
                seat.member.close(cause)
            try:
                self.proposer.finish(cause)
            except Exception as error:
                message = f"finish of {self.template.strategy.name!r} failed: {error!r}"
                warnings.warn(f"decoders: {message}", stacklevel=2)
            if isinstance(cause, torch.OutOfMemoryError):
                cause.add_note(f"decoders: {self.engine.sessions.make_room()}")
        # The batch is in a reference cycle. Without this line its buffers would not be freed until the garbage collector runs.
        del self.batch.session

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A context that holds the model's lock for a step of the lane: calls wait for the step, and the lane waits for calls."""
        batch = self.batch
        with (
            self.engine.decoding(self.template.rope_table),
            batch.forward_pass.tiers.during(self.template.runtime.compile, batch.report, self._tiers),
        ):
            yield

    def _join(self) -> None:
        """Adds to the batch the requests whose prompts have been prefilled, in free rows if there are any."""
        rows = in_place([seat for seat in self.seats if seat.row is not None or seat.ready])
        if rows != self.rows:
            self._rebatch(rows)

    def _step(self, pause: float | None) -> None:
        """Runs a step of the batch. Unless `pause` is None, the pass also prefills a prompt piece for about `pause` seconds."""
        batch = self.batch
        piece = self.admission.next_piece(pause) if pause is not None and self.admission.mixes else None
        if piece is None:
            self._steps.advance()
            return
        seat, begin, count = piece
        self._move_to_front([*self.rows, seat])
        batch.next_piece = functools.partial(self.pool.piece, begin, count)
        try:
            self._steps.advance()
        finally:
            batch.next_piece = None
        self.admission.was_read(seat, self._steps.piece, count)

    def _leave(self) -> list[RequestOutput]:
        """Removes and returns the requests that have ended or failed. Their rows are free from the next step on."""
        guide = self.batch.guide
        if isinstance(guide, HostGuide):
            for row, error in guide.faults.items():
                member = self.rows[row].member
                member.error = member.error or error
            guide.faults.clear()
        ended = [seat for seat in self.seats if seat.member.ended or seat.member.error is not None]
        self._take_out(ended)
        return [seat.member for seat in ended]

    def _take_out(self, leaving: list[Seat]) -> None:
        if not leaving:
            return
        for seat in leaving:
            self.seats.remove(seat)
            seat.member.report.recorded_memory = self.engine.sessions.recorded_nbytes
            seat.member.report.unrecorded = self.pool.unrecorded
            seat.member.close()
            warn_of_load(seat.member.report)
            if seat.plan is not None:
                self.pool.texts[seat.place] = self.admission.held(seat)
                self._uses += 1
                self.pool.used[seat.place] = self._uses
        if not self.seats:
            self._rebatch([])

    def _rebatch(self, seats: list[Seat]) -> None:
        """Makes `seats` the rows of the batch, in this order, and passes the prompts of new rows to a strategy that reads prompts."""
        batch, pool, device = self.batch, self.pool, self.engine.target.device
        texts = [seat.member.text(0) for seat in seats]
        self._move_to_front(seats)
        sources = [-1 if seat.row is None else seat.row for seat in seats]
        for row, seat in enumerate(seats):
            seat.row = row
            pool.stored.tokens[row, : len(texts[row])] = texts[row]
            pool.drop(row)
        self.rows = seats
        if not seats:
            batch.members.clear()
            batch.pending = 0
            return
        requests = [seat.member.request for seat in seats]
        added = row_bucket(len(seats), self.engine.target.static) - len(seats)
        lengths = [len(text) for text in texts] + [1] * added
        prompts = [len(request.prompts[0]) for request in requests] + [1] * added
        limits = [len(request.prompts[0]) + request.new_tokens for request in requests] + [1] * added
        ended = [seat.member.ended for seat in seats] + [True] * added
        pool.arrange(lengths, prompts, limits, ended, pool.own(sampling_of(requests, len(lengths), device)))
        grammars = tuple(request.grammars[0] if request.grammars else None for request in requests)
        shared = replace(
            self.template, plan=replace(self.template.plan, masked=any(grammar is not None for grammar in grammars)),
            grammars=grammars, salts=(*(request.salt_of(0) for request in requests), *[""] * added),
            prompts=[*texts, *[texts[0].new_zeros(1)] * added], new_tokens=max(request.new_tokens for request in requests),
        )  # fmt: skip
        members = [(seat.member, row) for row, seat in enumerate(seats)]
        anew = self.proposer.arrange(shared, members, sources + [-1] * added)
        if shared.strategy.reads_prompt:
            self._show_prompts(anew and any(source >= 0 for source in sources))

    def _move_to_front(self, seats: list[Seat]) -> None:
        """Moves keys, values and tokens of `seats` to the first places of the pool, in this order."""
        others = {seat.place: self._slots_used(seat) for seat in self.seats if seat not in seats}
        places = reorder(self.pool, [seat.place for seat in seats], [self._slots_used(seat) for seat in seats], others)
        for seat in self.seats:
            seat.place = places.get(seat.place, seat.place)

    def _slots_used(self, seat: Seat) -> int:
        """The number of used slots in a seat's place. Before the prefill begins, they hold an earlier request's text."""
        if seat.row is not None:
            return seat.member.lengths[0]
        return len(seat.prompt) if seat.plan is not None else len(self.pool.texts[seat.place].tokens)

    def _show_prompts(self, anew: bool) -> None:
        """Passes the prompts of new rows to the strategy. anew: whether the strategy was started again and needs all rows' texts."""
        batch = self.batch
        if anew:
            self.prompts.read(batch.lengths, [0] * batch.width)
        for row, seat in enumerate(self.rows):
            for chunk in seat.chunks if not anew else ():
                if batch.request.strategy.prompt_logits:
                    chunk = replace(chunk, logits=self.engine.head(chunk.hidden))
                self.proposer.show(among_rows(chunk, row, self.pool.rows.length), max(batch.lengths))
            seat.chunks.clear()


def in_place(seats: list[Seat]) -> list[Seat]:
    """Returns `seats` in an order that moves few seats: a seat whose place is below ``len(seats)`` stays in its place."""
    by_place = {seat.place: seat for seat in seats if seat.place < len(seats)}
    others = iter(seat for seat in seats if seat.place >= len(seats))
    return [by_place[row] if row in by_place else next(others) for row in range(len(seats))]


def among_rows(chunk: PromptChunk, row: int, lengths: Tensor) -> PromptChunk:
    """Expands the chunk of one row to all rows; other rows' tokens are marked invalid. lengths: ``[B]``, number of tokens per row."""
    rows = len(lengths)
    if rows == 1:
        return chunk
    own_row = (torch.arange(rows, device=lengths.device) == row)[:, None]
    index = torch.arange(chunk.tokens.shape[1], device=lengths.device)
    positions = torch.where(own_row, chunk.positions[:, :1], lengths[:, None] - 1) + index

    def expanded(values: Tensor) -> Tensor:
        return values.expand(rows, *values.shape[1:])

    # The copies are contiguous, so that drafters get the same memory layout for one row and for many.
    layers = expanded(chunk.layers).contiguous() if chunk.layers is not None else None
    logits = expanded(chunk.logits) if chunk.logits is not None else None
    return PromptChunk(
        expanded(chunk.tokens), positions, chunk.valid & own_row, expanded(chunk.hidden).contiguous(), layers, logits
    )


def share_steps(one: Request, other: Request) -> bool:
    """Whether two requests on the same engine can share steps."""
    return (
        one.kind.shared == other.kind.shared
        and one.memory_salt == other.memory_salt
        # The first row with a grammar restarts the strategy, and a strategy that reads prompts would have to read all texts again.
        and (one.plan.masked == other.plan.masked or not one.strategy.reads_prompt)
        and one.models.assistant_model is other.models.assistant_model and one.models.tokenizer is other.models.tokenizer
    )  # fmt: skip
