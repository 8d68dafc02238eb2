"""The tiers of passes: uncompiled at first, compiled once that is worth its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from ....common import devices
from ....errors import UnsupportedError
from ....report import Report
from ....sampling.processors import SamplingPlan
from ..blocks import Blocks
from ..self_check import can_mix
from ..target import Target
from . import regions
from .background import BackgroundCompile, worth_compiling
from .regions import RegionalForward

#: Setting ``compile``: "auto" in the background once it pays, True before the first step, False never.
Compile = Literal["auto"] | bool

#: Seconds that compiling a forward pass is expected to take on two cores.
FORWARD_SECONDS = 12.0


class PassKind(NamedTuple):
    """The kinds of passes that have graphs of their own.

    Attributes:
        several_rows: more than one row.
        single_node: one node in each row.
        mixed: with a piece of a prompt (:mod:`~decoders.engine.model.mixed`).
    """

    several_rows: bool
    single_node: bool = False
    mixed: bool = False


class Tier(NamedTuple):
    """Which parts of a step run compiled. A recording of one tier is not replayed in another.

    Attributes:
        compiled: whether the forward pass does.
        draws: plans with the kinds of arguments for which drawing is compiled.
    """

    compiled: bool
    draws: frozenset[Hashable] = frozenset()


@dataclass
class _Tier:
    """Passes of one kind.

    Attributes:
        seconds: spent in uncompiled passes so far.
        job: the compilation, running or finished; None before it has begun.
        booked: whether its seconds are in a report.
    """

    seconds: float = 0.0
    job: BackgroundCompile | None = None
    booked: bool = False


class Beside:
    """The functions of a step that are compiled beside its pass. This base class has none."""

    def forget(self) -> None:
        """Drops compiled code."""

    def compiling(self, target: Target) -> Callable[[int, int], object]:
        """Returns the function that compiles the functions used beside the pass, for so many rows and nodes."""
        return lambda rows, count: None

    def ready(self, plan: SamplingPlan | None = None) -> frozenset[Hashable]:
        """The plans, or the one given, with the kinds of arguments for which drawing is compiled."""
        return frozenset()


class Tiers:
    """Decides whether passes of one model run compiled: uncompiled at first, compiled once they have taken long enough.

    The two round differently, so a call stays in the tier in which it began: its tokens do not depend on when the compiler is ready.

    Attributes:
        kinds: for each kind of passes, its compilation and the seconds of its uncompiled passes.
        regional: the compiled pass, None before compiling begins; `regional_mixed` is the compiled pass with a piece of a prompt.
        mode: the setting ``compile`` of the present call.
        report: of the present call.
        beside: the functions that are compiled together with the pass.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.beside = target, Beside()
        self.forget()
        self.mode: Compile = False
        self.report = Report("")
        self._allowed: set[Hashable] | None = None

    def forget(self) -> None:
        """Drops compiled code; a running compilation is not interrupted."""
        self.kinds = {PassKind(*kind): _Tier() for kind in product((False, True), repeat=3)}
        self.regional: RegionalForward | None = None
        self.regional_mixed: RegionalForward | None = None
        self.beside.forget()

    @contextmanager
    def during(self, mode: Compile, report: Report, allowed: set[Hashable] | None = None) -> Iterator[None]:
        """Surrounds a call, or a step of one, that compiles by `mode` and books its costs in `report`.

        Args:
            allowed: :meth:`steady_tiers` from the beginning of the call; by default the present ones, or those of an enclosing call.

        Raises:
            UnsupportedError: compilation is required and not possible.
        """
        if (reason := self.target.uncompiled) is not None:
            if mode is True:
                raise UnsupportedError(f"compile=True: {reason}. Leave compile='auto', which runs it uncompiled.")
            mode = False
        before = self.mode, self.report, self._allowed
        if allowed is None:
            allowed = self._allowed if mode == self.mode else self.steady_tiers(mode)
        self.mode, self.report, self._allowed = mode, report, allowed
        try:
            yield
        finally:
            self.mode, self.report, self._allowed = before

    def steady_tiers(
        self, mode: Compile, plan: SamplingPlan | None = None, *, joined: bool = False
    ) -> set[Hashable] | None:
        """The kinds of passes and draws that a call beginning now may run compiled; None: as `mode` says.

        Args:
            plan: only draws by this plan.
            joined: whether requests join and leave, so that a request's passes are over one row or several: then both are compiled
                or neither (:meth:`compile_both`).
        """
        if mode != "auto":
            return None
        kinds = {kind for kind in self.kinds if self.ready(kind)}
        if joined and not {PassKind(False), PassKind(True)} <= kinds:
            kinds.clear()
        return kinds | self.beside.ready(plan)

    def outdated(self, tiers: set[Hashable] | None, mode: Compile, plan: SamplingPlan, *, joined: bool = False) -> bool:
        """Whether more was compiled since :meth:`steady_tiers` returned `tiers`."""
        return tiers is not None and not (self.steady_tiers(mode, plan, joined=joined) or set()) <= tiers

    def tier(self, rows: int, plan: SamplingPlan | None = None) -> Tier:
        """The tier of a pass over so many rows, and of drawing by `plan`; begins to compile when that is due."""
        compiled = self.runs_compiled(rows > 1)
        draws = self.beside.ready(plan) if plan is not None and self.mode else frozenset()
        return Tier(compiled, frozenset(filter(self.allows, draws)))

    def compiles(self, several: bool) -> bool:
        """Whether the next pass over one row, or over `several`, may run compiled."""
        return bool(self.mode) and (self.mode is True or self.may_take(PassKind(several)))

    def runs_compiled(self, several: bool) -> bool:
        """Whether a pass of this call runs compiled; begins to compile when that is due."""
        kind = PassKind(several)
        tier = self.kinds[kind]
        if not self.mode:
            return False
        if tier.job is None or not (tier.job.ready or tier.job.failed):
            if self.mode is True:
                return self.compile(several, self.report)
            if tier.job is None and not devices.recorded() and worth_compiling(tier.seconds, FORWARD_SECONDS):
                self._begin(kind)
            return False
        self._book(tier)
        return tier.job.poll() and self.allows(kind)

    def allows(self, kind: Hashable) -> bool:
        return self._allowed is None or kind in self._allowed

    def ready(self, kind: PassKind) -> bool:
        """Whether passes of a `kind` are compiled."""
        job = self.kinds[kind].job
        return job is not None and job.poll()

    def may_take(self, kind: PassKind) -> bool:
        """Whether passes of a `kind` are compiled, and this call may use that."""
        return self.ready(kind) and self.allows(kind)

    def worth_compiling(self) -> bool:
        """Whether compiling passes has begun."""
        return any(tier.job is not None for tier in self.kinds.values())

    def compile(self, several: bool, report: Report, *, single: bool = False) -> bool:
        """Compiles passes over one row, or over `several`, waits for it, and returns whether it succeeded.

        Args:
            single: also compile passes with one node in each row.
        """
        ready = self._wait(self._begin(PassKind(several)), report)
        return self._wait(self._begin(PassKind(several, single)), report) if ready and single else ready

    def compile_both(self) -> None:
        """Begins to compile passes over one row if those over several are being compiled, and vice versa."""
        kinds = PassKind(False), PassKind(True)
        if self.mode == "auto" and any(self.kinds[kind].job is not None for kind in kinds):
            for kind in kinds:
                self._begin(kind)

    def compile_for(self, rows: int, report: Report) -> None:
        """Compiles everything that a batch of up to so many rows may need, before its first step."""
        for several in (True, False) if rows > 1 else (False,):
            self.compile(several, report, single=self.target.takes_single_nodes(1 + several))
        singles = (False, True) if self.target.takes_single_nodes(2) else (False,)
        for single in singles if rows > 1 and self._can_mix else ():
            self._wait(self._begin(PassKind(True, single, mixed=True)), report)

    def book_single(self, seconds: float, rows: int) -> None:
        """Books a step with one node per row, padded or not; once these have taken long enough, they get a graph."""
        kind = PassKind(rows > 1, single_node=True)
        if not self.mode or not self.target.takes_single_nodes(rows) or not self.ready(PassKind(kind.several_rows)):
            return
        if self.mode is True and self.kinds[kind].job is None:
            self.compile(kind.several_rows, self.report, single=True)
        self._spend(kind, seconds)

    def book_mixed(self, seconds: float, rows: int, *, single: bool) -> None:
        """Books a pass over a prompt that could have been a mixed one; once these have taken long enough, they get a graph."""
        if rows >= 2 and self._can_mix and self.compiles(several=True):
            self._spend(PassKind(True, single, mixed=True), seconds)

    def book_replay(self, seconds: float, rows: int) -> None:
        """Books the time of a replay over so many rows."""
        if not self.runs_compiled(rows > 1):
            self.kinds[PassKind(rows > 1)].seconds += seconds

    def _spend(self, kind: PassKind, seconds: float) -> None:
        """Books uncompiled passes that a graph of their own would make faster, and begins to compile that when it is due."""
        tier = self.kinds[kind]
        tier.seconds += seconds
        if worth_compiling(tier.seconds, FORWARD_SECONDS):
            self._begin(kind)
        if tier.job is not None and tier.job.ready:
            self._book(tier)

    def _book(self, tier: _Tier) -> None:
        """Books a compilation that ended in the background."""
        if tier.job is not None and not tier.booked:
            tier.booked = True
            self.report.timings.background += tier.job.seconds
            self.report.compilations += 1

    def _wait(self, tier: _Tier, report: Report) -> bool:
        """Waits for the compilation of `tier`, books it, and returns whether it succeeded."""
        assert tier.job is not None
        started = time.perf_counter()
        ready = tier.job.wait()
        report.timings.compile += time.perf_counter() - started
        report.compilations += not tier.booked
        tier.booked = True
        return ready

    def _begin(self, kind: PassKind) -> _Tier:
        """Begins to compile passes of a `kind`, unless that has begun."""
        tier, target = self.kinds[kind], self.target
        if tier.job is not None:
            return tier
        rows, count = 3 if kind.several_rows else 1, 1 if kind.single_node else 11
        if kind.mixed:
            with_piece = self.regional_mixed = self.regional_mixed or regions.regional_mixed(target)
            tier.job = BackgroundCompile(
                "the mixed forward pass", lambda: with_piece.compile(*regions.mixed_examples(target, count))
            )
            return tier
        plain, compile_beside = self.regional or regions.regional_forward(target), self.beside.compiling(target)
        self.regional = plain

        def work() -> None:
            plain.compile(*regions.examples(target, rows, count))
            compile_beside(rows, count)

        tier.job = BackgroundCompile("the forward pass", work)
        return tier

    def runs_single(self, rows: int) -> bool:
        """Whether the next pass may have one node in each of its rows: uncompiled, or with a graph of its own.

        The graph with dynamic sizes is for three nodes and more.
        """
        if not self.target.takes_single_nodes(rows):
            return False
        return not self.compiles(rows > 1) or self.may_take(PassKind(rows > 1, single_node=True))

    def mixes(self, rows: int, *, single: bool) -> bool:
        """Whether the next pass over so many rows, with a `single` node in each or more, may read a piece of a prompt: uncompiled, or
        with a graph of its own.
        """
        if rows < 2 or not self._can_mix:
            return False
        return not self.compiles(several=True) or self.may_take(PassKind(True, single, mixed=True))

    @cached_property
    def _can_mix(self) -> bool:
        return can_mix(self.target)

    def fit(self, blocks: Blocks, rows: int) -> None:
        """Sets how `blocks` of so many rows are padded, by the tier of the next pass."""
        blocks.exact = rows > 1 and not (self.target.static or self.target.rounds or self.compiles(several=True))
        blocks.single = self.runs_single(rows)
