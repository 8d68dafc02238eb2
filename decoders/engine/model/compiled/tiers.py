"""The two tiers of a pass: uncompiled at first, compiled once compiling is worth its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from ....common import host_reads
from ....errors import UnsupportedError
from ....report import Report
from ....sampling.processors import SamplingPlan
from ..self_check import can_mix
from ..target import Target
from . import regions
from .background import BackgroundCompile, worth_compiling
from .regions import RegionalForward

#: The setting ``compile``. "auto": compile passes in the background once this pays; True: before the first step; False: never.
Compile = Literal["auto"] | bool

#: Seconds that compiling a forward pass is expected to take on two cores.
FORWARD_SECONDS = 12.0
#: If each layer is a single operator, compiling saves only a few percent, so compiling begins after PATIENCE times as many seconds.
PATIENCE = 10.0


class PassKind(NamedTuple):
    """A kind of pass. Each kind is compiled separately.

    Attributes:
        several_rows: whether the pass has more than one row.
        single_node: whether each row has a single node.
        mixed: whether the pass also prefills a piece of a prompt (:mod:`~decoders.engine.model.mixed`).
    """

    several_rows: bool
    single_node: bool = False
    mixed: bool = False


class Tier(NamedTuple):
    """Which parts of a step run compiled. A recorded step (CUDA graph) is replayed only in the tier in which it was recorded.

    Attributes:
        compiled: whether the forward pass runs compiled.
        draws: pairs of a sampling plan and a kind of arguments, for which the drawing of tokens runs compiled.
    """

    compiled: bool
    draws: frozenset[Hashable] = frozenset()


@dataclass
class _Tier:
    """The compilation of the passes of one kind.

    Attributes:
        seconds: seconds spent so far in passes and steps that would be faster if this kind were compiled.
        job: the compilation, running or finished; None before it has begun.
        booked: whether the compilation's seconds are in a report.
    """

    seconds: float = 0.0
    job: BackgroundCompile | None = None
    booked: bool = False


class Beside:
    """The functions of a step, such as drawing tokens, that are compiled together with the step's pass. This base class has none."""

    def forget(self) -> None:
        """Drops compiled code."""

    def compiling(self, target: Target) -> Callable[[int, int], object]:
        """Returns a function that takes a number of rows and a number of nodes, and compiles this object's functions for them."""
        return lambda rows, count: None

    def ready(self, plan: SamplingPlan | None = None) -> frozenset[Hashable]:
        """Pairs of a sampling plan (only `plan` if given) and a kind of arguments for which the drawing of tokens is compiled."""
        return frozenset()


class Tiers:
    """Decides which passes of a model run compiled. A kind of pass is compiled once its uncompiled passes have taken long enough.

    Compiled and uncompiled passes round differently. So a call stays in the tier in which it began, and the call's tokens do not depend
    on when the compiler is ready.

    Attributes:
        kinds: for each kind of pass, its compilation and the seconds spent without it.
        regional, regional_mixed: the compiled pass without and with a piece of a prompt; None before their compilation begins.
        mode: the setting ``compile`` of the current call.
        report: the current call's report.
        beside: the functions that are compiled together with the pass.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.beside = target, Beside()
        self.forget()
        self.mode: Compile = False
        self.report = Report("")
        self._allowed: set[Hashable] | None = None

    def forget(self) -> None:
        """Drops compiled code. A running compilation is not interrupted."""
        self.kinds = {PassKind(*kind): _Tier() for kind in product((False, True), repeat=3)}
        self.regional: RegionalForward | None = None
        self.regional_mixed: RegionalForward | None = None
        self.beside.forget()

    @contextmanager
    def during(self, mode: Compile, report: Report, allowed: set[Hashable] | None = None) -> Iterator[None]:
        """Within this context, `mode` decides which passes are compiled, and the compilations are added to `report`.

        Args:
            allowed: the result of :meth:`steady_tiers` at the beginning of the call. If None, an enclosing context of the same mode
                decides; without one, :meth:`steady_tiers` is called now.

        Raises:
            UnsupportedError: `mode` is True, and the model cannot be compiled.
        """
        if (reason := self.target.uncompiled) is not None:
            if mode is True:
                raise UnsupportedError(f"compile=True: {reason}. Leave compile='auto': passes then run uncompiled.")
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
        """What a call that begins now may run compiled: kinds of passes, and the pairs of :attr:`Tier.draws`. None means everything.

        Args:
            mode: the call's setting ``compile``; if it is not "auto", the result is None.
            plan: if given, the pairs of other sampling plans are left out.
            joined: whether requests join and leave the batch. A request is then part of passes over one row and over several rows, so
                either both kinds of passes run compiled or neither (:meth:`compile_both`).
        """
        if mode != "auto":
            return None
        kinds = {kind for kind in self.kinds if self.ready(kind)}
        if joined and not {PassKind(False), PassKind(True)} <= kinds:
            kinds.clear()
        return kinds | self.beside.ready(plan)

    def outdated(self, tiers: set[Hashable] | None, mode: Compile, plan: SamplingPlan, *, joined: bool = False) -> bool:
        """Whether more is compiled now than when :meth:`steady_tiers` returned `tiers`. False if `tiers` is None."""
        return tiers is not None and not (self.steady_tiers(mode, plan, joined=joined) or set()) <= tiers

    def tier(self, rows: int, plan: SamplingPlan | None = None) -> Tier:
        """Which parts of a step over `rows` rows, with tokens drawn by `plan`, run compiled now. May begin to compile the pass."""
        compiled = self.runs_compiled(rows > 1)
        draws = self.beside.ready(plan) if plan is not None and self.mode else frozenset()
        return Tier(compiled, frozenset(filter(self.allows, draws)))

    def compiles(self, several: bool) -> bool:
        """Whether the next pass may run compiled. several: whether it has more than one row."""
        return bool(self.mode) and (self.mode is True or self.may_take(PassKind(several)))

    def runs_compiled(self, several: bool) -> bool:
        """Whether the next pass of this call runs compiled. May begin to compile such passes. several: see :meth:`compiles`."""
        kind = PassKind(several)
        tier = self.kinds[kind]
        if not self.mode:
            return False
        if tier.job is None or not (tier.job.ready or tier.job.failed):
            if self.mode is True:
                return self.compile(several, self.report)
            seconds = FORWARD_SECONDS * (PATIENCE if self.target.runs_whole_layers else 1)
            if tier.job is None and not host_reads.recorded() and worth_compiling(tier.seconds, seconds):
                self._begin(kind)
            return False
        self._book(tier)
        return tier.job.poll() and self.allows(kind)

    def allows(self, kind: Hashable) -> bool:
        return self._allowed is None or kind in self._allowed

    def ready(self, kind: PassKind) -> bool:
        """Whether passes of `kind` are compiled."""
        job = self.kinds[kind].job
        return job is not None and job.poll()

    def may_take(self, kind: PassKind) -> bool:
        """Whether passes of `kind` are compiled, and this call may run them compiled."""
        return self.ready(kind) and self.allows(kind)

    def worth_compiling(self) -> bool:
        """Whether some kind of pass has been worth compiling: its compilation has begun."""
        return any(tier.job is not None for tier in self.kinds.values())

    def compile(self, several: bool, report: Report, *, single: bool = False) -> bool:
        """Compiles a pass and waits for it; returns whether it succeeded. several: see :meth:`compiles`.

        Args:
            single: whether to compile passes with a single node in each row, too.
        """
        ready = self._wait(self._begin(PassKind(several)), report)
        return self._wait(self._begin(PassKind(several, single)), report) if ready and single else ready

    def compile_both(self) -> None:
        """If passes over one row or over several rows are compiled in "auto" mode, begins to compile the other kind, too."""
        kinds = PassKind(False), PassKind(True)
        if self.mode == "auto" and any(self.kinds[kind].job is not None for kind in kinds):
            for kind in kinds:
                self._begin(kind)

    def compile_for(self, rows: int, report: Report) -> None:
        """Compiles, before the first step, all passes that a batch of up to `rows` rows may need."""
        for several in (True, False) if rows > 1 else (False,):
            self.compile(several, report, single=self.target.takes_single_nodes(1 + several))
        singles = (False, True) if self.target.takes_single_nodes(2) else (False,)
        for single in singles if rows > 1 and self._can_mix else ():
            self._wait(self._begin(PassKind(True, single, mixed=True)), report)

    def book_single(self, seconds: float, rows: int) -> None:
        """Adds the seconds of a step without a draft to the total that decides when passes with a single node per row are compiled."""
        kind = PassKind(rows > 1, single_node=True)
        if not self.mode or not self.target.takes_single_nodes(rows) or not self.ready(PassKind(kind.several_rows)):
            return
        if self.mode is True and self.kinds[kind].job is None:
            self.compile(kind.several_rows, self.report, single=True)
        self._spend(kind, seconds)

    def book_mixed(self, seconds: float, rows: int, *, single: bool) -> None:
        """Adds the seconds of a prefill that fits a mixed pass to the total that decides when mixed passes are compiled."""
        if rows >= 2 and self._can_mix and self.compiles(several=True):
            self._spend(PassKind(True, single, mixed=True), seconds)

    def book_replay(self, seconds: float, rows: int) -> None:
        """Adds the seconds of a replayed pass over `rows` rows to the seconds of its kind, if the pass is uncompiled."""
        if not self.runs_compiled(rows > 1):
            self.kinds[PassKind(rows > 1)].seconds += seconds

    def _spend(self, kind: PassKind, seconds: float) -> None:
        """Adds seconds of work that would be faster if `kind` were compiled. After enough seconds, begins to compile `kind`."""
        tier = self.kinds[kind]
        tier.seconds += seconds
        if worth_compiling(tier.seconds, FORWARD_SECONDS):
            self._begin(kind)
        if tier.job is not None and tier.job.ready:
            self._book(tier)

    def _book(self, tier: _Tier) -> None:
        """Adds a compilation that ended in the background to the report, once."""
        if tier.job is not None and not tier.booked:
            tier.booked = True
            self.report.timings.background += tier.job.seconds
            self.report.compilations += tier.job.ready

    def _wait(self, tier: _Tier, report: Report) -> bool:
        """Waits for the compilation of `tier`, adds it to the report, and returns whether it succeeded."""
        assert tier.job is not None
        started = time.perf_counter()
        ready = tier.job.wait()
        report.timings.compile += time.perf_counter() - started
        report.compilations += ready and not tier.booked
        tier.booked = True
        return ready

    def _begin(self, kind: PassKind) -> _Tier:
        """Begins to compile passes of `kind`, unless their compilation has begun already."""
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

    def mixes(self, rows: int, *, single: bool) -> bool:
        """Whether the next pass over `rows` rows may also prefill a piece of a prompt: if it runs uncompiled, or mixed passes are
        compiled. single: whether each row has a single node.
        """
        if rows < 2 or not self._can_mix:
            return False
        return not self.compiles(several=True) or self.may_take(PassKind(True, single, mixed=True))

    @cached_property
    def _can_mix(self) -> bool:
        return can_mix(self.target)
