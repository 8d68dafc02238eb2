"""Requests of one row that come and go while others are decoded: admitted, read and retired between two steps of a :class:`Call`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..constraints.base import CompiledGrammar
from ..sampling.processors import SamplingInputs, row_keys
from ..strategy import Strategy, finish_all
from .buckets import row_bucket, slots_for
from .engine import Engine
from .grammar.guide import Guide
from .grammar.host_guide import HostGuide
from .loop import Call
from .pool import RowPool
from .prefixes import NOTHING, KeptText
from .request import Request
from .rows import stop_tensor
from .session import Reading
from .worth import DraftWorth
from .written import Written

#: Slots of a new pool; it grows with its texts.
FIRST_SLOTS = 256


@dataclass(eq=False)
class Seat:
    """A request and its place in the pool.

    Attributes:
        reading: how its prompt is read, None before that has begun.
        passes: those still to come.
        row: the row of the batch that it is, None while it is read.
    """

    member: Written
    place: int
    reading: Reading | None = None
    passes: list[tuple[int, int]] = field(default_factory=list)
    row: int | None = None

    @property
    def prompt(self) -> Tensor:
        return self.member.request.prompts[0]

    @property
    def ready(self) -> bool:
        return self.reading is not None and not self.passes


class Lane:
    """Requests that share their steps: of one strategy, one sampling plan, one verifier.

    A request has the tokens of a call of its own (float32): its noise depends on its own seed and position, its parameters,
    stop tokens, grammar and budget are its row's, and what others do changes nothing but when it is decoded.

    Args:
        engine: of the model.
        request: the first one; it says what all have in common.
        capacity: most requests at a time. A strategy that reads prompts is shown a batch's together, so its requests come one by one.

    Attributes:
        seats: the requests that are here, in the order in which they came.
    """

    def __init__(self, engine: Engine, request: Request, capacity: int) -> None:
        capacity = 1 if request.strategy.reads_prompt else capacity
        self.engine, self.template, self.capacity = engine, request, capacity
        self.stack = ExitStack()
        self.call = call = Call(engine, request, self.stack)
        call.isolates, call.capacity, call.worth = True, capacity, DraftWorth()
        static = engine.target.static
        # Where rows are padded to a bucket, the padding must not touch what is read or kept behind them.
        self._reserved = row_bucket(capacity) if static else 0
        self.pool = RowPool(
            engine.target, self._reserved + capacity, slots_for(FIRST_SLOTS, engine.target.static_slots)
        )
        call.session, call.blocks = self.pool, self.pool.blocks
        call.held = []
        self.seats: list[Seat] = []
        self._batch: list[Seat] = []
        self._weights = engine.target.weights
        self._tiers: set[bool] | None = None
        self._pace = 0.0  # seconds per prompt token, as measured
        self._clock = 0
        self._begun = self._started = False  # the first batch was made; the strategy has a state that is not finished

    @property
    def free(self) -> int:
        """How many more requests can come."""
        return self.capacity - len(self.seats)

    def fits(self, engine: Engine, request: Request) -> bool:
        """Whether a request can share steps with those that are here."""
        own = self.template
        return (
            engine is self.engine and same_strategy(own.strategy, request.strategy)
            and replace(own.plan, masked=False) == replace(request.plan, masked=False)
            and (own.processors is None) == (request.processors is None)
            and own.assistant_model is request.assistant_model and own.tokenizer is request.tokenizer
            and own.compile == request.compile and type(own.verifier) is type(request.verifier)
            and getattr(own.verifier, "settings", None) == getattr(request.verifier, "settings", None)
        )  # fmt: skip

    def offer(self, request: Request) -> Written:
        """Gives a request of one row a place; its prompt is read in the next steps."""
        assert len(request.prompts) == 1 and self.free > 0
        if not self.seats:
            self._begin()
        member = Written(request, self.call.new_report(request))
        seat = Seat(member, self._place_for(request))
        self.seats.append(seat)
        return member

    def advance(self, pause: float) -> list[Written]:
        """Reads prompts for about `pause` seconds, makes one step, and gives those that have ended; an error is theirs.

        What belongs to all, a strategy that raises, say, is raised.
        """
        with self._running():
            self._read(pause)
            self._settle()
            if self._batch:
                self.call.advance()
            return self._leave()

    def remove(self, member: Written) -> None:
        """Takes a request out; what it has written stays with it. Between two steps."""
        with self._running():
            self._part([seat for seat in self.seats if seat.member is member])

    def close(self, cause: Exception | None = None) -> None:
        """Frees everything. cause: what has ended the lane; what the strategy's `finish` raises is told with it, or is a warning."""
        with self._running(), self.stack:
            try:
                self._finish(cause)
            except Exception as error:
                message = f"finish of {self.template.strategy.name!r} failed: {error!r}"
                warnings.warn(f"decoders: {message}", stacklevel=2)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The model is this lane's for a step; calls take turns with it."""
        engine = self.engine
        with (
            engine.lock,
            engine.active(),
            torch.autocast(engine.target.device.type, enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
            self.call.passes.during(self.template.compile, self.call.report, self._tiers),
        ):
            yield

    def _begin(self) -> None:
        """The first request after a rest."""
        target = self.engine.target
        if self._weights is not target.weights:  # they were written to: what is kept is not theirs
            self._weights = target.weights
            self.pool.forget()
        self._tiers = self.call.passes.steady_tiers(self.template.compile)

    def _place_for(self, request: Request) -> int:
        """A free place: that which holds most of the prompt, or else the one that was used least recently."""
        taken = {seat.place for seat in self.seats}
        begin = self._reserved or len(self._batch)
        free = [place for place in range(begin, self.pool.batch) if place not in taken]
        prompt = request.prompts[0].cpu()
        shared = {place: self.pool.texts[place].shared_with(prompt) if request.reuse else 0 for place in free}
        return max(free, key=lambda place: (shared[place], -self.pool.used[place], -place))

    def _read(self, pause: float) -> None:
        """Reads prompts, in the order in which they came; at least one pass, and all of them if nobody waits meanwhile."""
        begun = time.perf_counter()
        for seat in self.seats:
            while seat.row is None and not seat.ready:
                left = pause - (time.perf_counter() - begun)
                if self._batch and left <= 0 and seat.reading is not None:
                    return
                started = time.perf_counter()
                if seat.reading is None:
                    self._start_reading(seat, pause)
                if seat.passes:
                    done, count = seat.passes.pop(0)
                    assert seat.reading is not None
                    self.pool.read_row(seat.place, seat.reading, done, count)
                    spent = time.perf_counter() - started
                    self._pace = spent / count if count >= 32 or not self._pace else self._pace
                seat.member.report.timings.prefill += time.perf_counter() - started

    def _start_reading(self, seat: Seat, pause: float) -> None:
        """Puts a prompt in its place with what any other place holds of it, and says in which passes the rest is read."""
        request, prompt = seat.member.request, seat.prompt.cpu()
        self.pool.put(seat.place, seat.prompt)
        if request.strategy.reads_prompt:  # read when the strategy has started
            self.pool.drop(seat.place)
            seat.reading = Reading([0], [], 0)
            return
        kept = self.pool.take_over(seat.place, prompt, self._texts(seat)) if request.reuse else 0
        self.pool.drop(seat.place)
        chunk = request.prefill_chunk
        if self._batch and self._pace:
            chunk = min(chunk, max(int(pause / self._pace), 32))
        elif self._batch:
            chunk = min(chunk, 128)
        seat.reading = Reading.of([len(prompt)], [kept], chunk, self.engine.target, leave=False)
        seat.passes = list(seat.reading.passes)
        seat.member.report.reused = [seat.reading.starts[0]]

    def _texts(self, seat: Seat) -> list[KeptText]:
        """What every place holds, those in use included; the place of `seat` holds what was there before."""
        texts = list(self.pool.texts)
        for other in self.seats:
            if other is not seat and other.reading is not None:
                texts[other.place] = self._held(other)
        return texts

    def _held(self, seat: Seat) -> KeptText:
        """The text whose keys and values are in a seat's slots."""
        if seat.row is not None:
            written = seat.member.text(0).cpu()
            return self.pool.kept(seat.place, written[: max(len(written) - 1 - self.call.pending, 0)])
        if seat.reading is None or self.template.strategy.reads_prompt:
            return NOTHING
        start, end = seat.reading.starts[0], len(seat.prompt) - 1
        text = seat.prompt.cpu()[: min(start + seat.passes[0][0], end) if seat.passes else end]
        return self.pool.kept(seat.place, text)

    def _settle(self) -> None:
        """Those whose prompts are read join the batch."""
        new = [seat for seat in self.seats if seat.row is None and seat.ready]
        if new:
            self._rebatch([*self._batch, *new])

    def _leave(self) -> list[Written]:
        """Those that have ended leave the batch."""
        ended = [seat for seat in self.seats if seat.member.ended or seat.member.error is not None]
        self._part(ended)
        return [seat.member for seat in ended]

    def _part(self, leaving: list[Seat]) -> None:
        if not leaving:
            return
        for seat in leaving:
            self.seats.remove(seat)
            if seat.reading is not None:
                self.pool.texts[seat.place] = self._held(seat)
                self._clock += 1
                self.pool.used[seat.place] = self._clock
        staying = [seat for seat in self._batch if seat not in leaving]
        if len(staying) < len(self._batch):
            self._rebatch(staying)

    def _rebatch(self, seats: list[Seat]) -> None:
        """Makes `seats` the rows of the batch, in this order, and tells the strategy."""
        call, pool, template, static = self.call, self.pool, self.template, self.engine.target.static
        texts = [seat.member.text(0) for seat in seats]
        beside = {seat.place: len(seat.prompt) for seat in self.seats if seat not in seats and seat.reading is not None}
        places = pool.reorder([seat.place for seat in seats], [len(text) for text in texts], beside)
        sources = [-1 if seat.row is None else seat.row for seat in seats]
        for seat in self.seats:
            seat.place = places.get(seat.place, seat.place)
        for row, seat in enumerate(seats):
            seat.row = row
            pool.stored.tokens[row, : len(texts[row])] = texts[row]
            pool.drop(row)
        self._batch = seats
        call.members[:] = [(seat.member, row) for row, seat in enumerate(seats)]
        call.held = [1] * len(seats)
        if not seats:
            call.pending = 0
            return
        requests = [seat.member.request for seat in seats]
        call.width = row_bucket(len(seats), static)
        added = call.width - len(seats)
        call.longest = max(len(request.prompts[0]) + request.new_tokens for request in requests)
        lengths = [len(text) for text in texts] + [1] * added
        prompts = [len(request.prompts[0]) for request in requests] + [1] * added
        limits = [len(request.prompts[0]) + request.new_tokens for request in requests] + [1] * added
        ended = [seat.member.ended for seat in seats] + [True] * added
        pool.arrange(lengths, prompts, limits, ended, self._sampling(requests, added))
        call.blocks, call.noise_keys = pool.blocks, pool.rows.sampling.keys.clone()
        grammars = [request.grammars[0] if request.grammars else None for request in requests]
        plan, before = (
            replace(template.plan, masked=any(grammar is not None for grammar in grammars)),
            call.request.plan,
        )
        call.request = replace(
            template, plan=plan, grammars=tuple(grammars),
            prompts=[*texts, *[texts[0].new_zeros(1)] * added], new_tokens=max(request.new_tokens for request in requests),
        )  # fmt: skip
        sources += [-1] * added
        call.guide = self._guide(sources, [*grammars, *[None] * added])
        if not self._begun or plan != before:
            call.step = call.make_step()
        self._inform(sources, restart=not self._begun or plan != before)
        self._begun = True

    def _sampling(self, requests: list[Request], added: int) -> SamplingInputs:
        """The tensors that the plan reads: one row for all where all ask for the same."""
        device = self.engine.target.device
        values = [request.values or (0.0,) for request in requests]
        stops = [request.stop_tokens for request in requests]
        if len(set(values)) == 1:
            values = values[:1]
        if len(set(stops)) == 1:
            stops = stops[:1]
        keys = [row_keys(request.seed, 1, device) for request in requests]
        several = len(values) > 1 or len(stops) > 1
        return SamplingInputs(
            torch.tensor(
                values + [values[0]] * added if len(values) > 1 else values[0], dtype=torch.float32, device=device
            ),
            torch.cat([*keys, *keys[:1] * added]),
            stop_tensor(stops + [stops[0]] * added, device)
            if several and len(stops) > 1
            else stop_tensor(stops, device)[0],
        )

    def _guide(self, sources: list[int], grammars: list[CompiledGrammar | None]) -> Guide | None:
        """Where the rows stand in their grammars. Rows that stay go on where they are."""
        if all(grammar is None for grammar in grammars):
            return None
        guide, target = self.call.guide, self.engine.target
        stays = any(source >= 0 and grammar is not None for source, grammar in zip(sources, grammars, strict=True))
        if isinstance(guide, HostGuide) and stays:
            return guide.rebatch(sources, grammars)
        return HostGuide.of(grammars, target.vocab_size, target.device)

    def _finish(self, cause: Exception | None = None) -> None:
        """Tells the strategy that its state is given up. cause: see :func:`~decoders.strategy.finish_all`."""
        if self._started:
            self._started = False
            finish_all([(self.template.strategy, self.call.state)], cause)

    def _inform(self, sources: list[int], restart: bool) -> None:
        """Tells the strategy and its draft models which rows there are now."""
        call, strategy = self.call, self.template.strategy
        call.where, call.costs = "rebatch", None
        if restart or type(strategy).rebatch is Strategy.rebatch:
            self._finish()
            call.drafting.close()
            call.drafters.clear()
            call.modules.clear()
            call.state = strategy.start(call.context())
            self._started = True
            if strategy.reads_prompt:
                call.where = "prefill"
                call.read_prompts(call.lengths, [0] * call.width, leave=False)
            return
        context, drafters = call.context(), list(call.drafters)
        for drafter in drafters:
            drafter.rebatch(sources, call.settings, context, call.guide)
        call.state = strategy.rebatch(call.state, torch.tensor(sources, device=self.engine.target.device), context)


def same_strategy(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies are set alike, those that they are made of included."""
    if one is other:
        return True
    own, others = vars(one), vars(other)
    return type(one) is type(other) and own.keys() == others.keys() and all(_same(own[k], others[k]) for k in own)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Strategy) and isinstance(other, Strategy):
        return same_strategy(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return one is other or bool(one == other)
    except Exception:  # tensors and the like: whoever cannot say is not the same
        return False
