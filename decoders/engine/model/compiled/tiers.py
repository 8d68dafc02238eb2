"""In which tier code runs: uncompiled at once, compiled as soon as that has been worth its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ....common import devices
from ....errors import UnsupportedError
from ....report import Report
from ....sampling.processors import SamplingPlan
from ....tree import TreeTensors
from .. import mixed
from ..attention import STRETCH
from ..blocks import Blocks, LeadingText, PromptPiece, causal_block
from ..buckets import LEAST_NODES
from ..cache import CacheBuffers
from ..recordings import Recordings
from ..self_check import can_mix
from ..static_inputs import copied
from ..target import ForwardResult, Target
from . import regions
from .background import BackgroundCompile, worth_compiling
from .regions import RegionalForward

#: Setting ``compile``: in the background when it pays, before the first step, or never.
Compile = Literal["auto"] | bool

#: Seconds that compiling a forward pass is expected to take on two cores.
FORWARD_SECONDS = 12.0
#: Nodes that get logits where nobody wants them: of one Dynamo would make a graph of its own.
FEWEST_LOGITS = 2


class PassKind(NamedTuple):
    """What a forward pass is compiled for.

    Attributes:
        several_rows: whether it is over more than one row.
        single_node: whether each row has one node, which gets a graph of its own.
        mixed: whether it reads a piece of a prompt as well (:mod:`~decoders.engine.model.mixed`).
    """

    several_rows: bool
    single_node: bool = False
    mixed: bool = False


class Tier(NamedTuple):
    """What of a step runs compiled; what was recorded in one tier is not replayed in another.

    Attributes:
        compiled: the forward pass.
        draws: plans, and the kinds of arguments for which drawing by them is.
    """

    compiled: bool
    draws: frozenset[Hashable] = frozenset()


@dataclass
class _Tier:
    """Passes of one kind.

    Attributes:
        seconds: spent in uncompiled passes so far.
        job: the compilation, under way or over; None before it has begun.
        booked: whether a report has its seconds.
    """

    seconds: float = 0.0
    job: BackgroundCompile | None = None
    booked: bool = False


class ForwardPass:
    """The forward pass of one model, shared by all that runs it: as target, draft model or stage.

    Uncompiled and compiled passes give the same tokens in float32. In lower precision they round differently, so there a
    call stays in the tier in which it began: its tokens do not depend on when the compiler is ready. What a step does beside the
    pass, in the same tier, is a subclass's (:class:`~decoders.engine.decode.passes.StepPass`).

    Attributes:
        compiled_passes: how many passes ran compiled so far.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.compiled_passes = 0
        self.forget()
        self.mode: Compile = False
        self.report = Report("")
        self._allowed: set[Hashable] | None = None
        self._steady = target.dtype in (torch.float32, torch.float64) and not target.rounds

    def forget(self) -> None:
        """Drops compiled code; a compilation under way is left to end by itself."""
        self._tiers = {PassKind(*kind): _Tier() for kind in product((False, True), repeat=3)}
        self._regional: RegionalForward | None = None
        self._regional_mixed: RegionalForward | None = None

    @contextmanager
    def during(self, mode: Compile, report: Report, allowed: set[Hashable] | None = None) -> Iterator[None]:
        """A call, or a step of one, that compiles as `mode` says and books what that costs in `report`.

        Args:
            allowed: as of :meth:`steady_tiers` where the call began; by default as of now.

        Raises:
            UnsupportedError: it must be compiled and is not to be.
        """
        if self.target.recurrent:
            if mode is True:
                raise UnsupportedError(
                    f"{type(self.target.model).__name__} keeps recurrent states: its blocks run level by level, as their tree says, "
                    "which is no graph for every tree. Leave compile='auto', which runs it uncompiled."
                )
            mode = False
        before = self.mode, self.report, self._allowed
        self.mode, self.report = mode, report
        self._allowed = self.steady_tiers(mode) if allowed is None else allowed
        try:
            yield
        finally:
            self.mode, self.report, self._allowed = before

    def compiles(self, several: bool) -> bool:
        """Whether the next pass over one row, or over `several`, may run compiled."""
        return bool(self.mode) and (self.mode is True or (self.ready(PassKind(several)) and self.allows(several)))

    def mixes(self, rows: int, *, single: bool) -> bool:
        """Whether the next pass of so many rows, with a `single` node in each or more, may read a prompt: uncompiled, or by a graph
        of its own.
        """
        if rows < 2 or not self._can_mix:
            return False
        return not self.compiles(several=True) or self.ready(PassKind(True, single, mixed=True))

    def book_mixed(self, seconds: float, rows: int, *, single: bool) -> None:
        """Notes a pass over a prompt that might have been a mixed one; once these have taken long enough, they get a graph."""
        if rows >= 2 and self._can_mix and self.compiles(several=True):
            self._spend(PassKind(True, single, mixed=True), seconds)

    @cached_property
    def _can_mix(self) -> bool:
        return can_mix(self.target)

    def _spend(self, kind: PassKind, seconds: float) -> None:
        """Notes uncompiled passes that a graph of their own would make faster, begins to compile that when it is due, and books it."""
        tier = self._tiers[kind]
        tier.seconds += seconds
        if worth_compiling(tier.seconds, FORWARD_SECONDS):
            self._begin(kind)
        if tier.job is not None and tier.job.ready:
            self._book(tier)

    def runs_single(self, rows: int) -> bool:
        """Whether the next pass may have one node in each of its rows: uncompiled, or by a graph of its own.

        The graph for any number of nodes is made for three and more, and dynamic sizes leave one out. One node has the same bits in
        both (:mod:`~decoders.engine.model.invariance`), so that a call may take whichever is there.
        """
        if not self.target.takes_single_nodes(rows):
            return False
        return not self.compiles(rows > 1) or self.ready(PassKind(rows > 1, single_node=True))

    def fit(self, blocks: Blocks, rows: int) -> None:
        """Says how `blocks` of so many rows are padded, by what the next pass runs as."""
        blocks.exact = rows > 1 and not (self.target.static or self.target.rounds or self.compiles(several=True))
        blocks.single = self.runs_single(rows)

    def book_single(self, seconds: float, rows: int) -> None:
        """Notes a step with one node per row, padded or not; once these have taken long enough, they get a graph."""
        kind = PassKind(rows > 1, single_node=True)
        if not self.mode or not self.target.takes_single_nodes(rows) or not self.ready(PassKind(kind.several_rows)):
            return
        if self.mode is True and self._tiers[kind].job is None:
            self.compile(kind.several_rows, self.report, single=True)
        self._spend(kind, seconds)

    def steady_tiers(self, mode: Compile) -> set[Hashable] | None:
        """What a call that begins now may run compiled, passes over several rows or one, and draws; None: whatever is ready."""
        if mode != "auto" or self._steady:
            return None
        return {*(several for several in (False, True) if self.ready(PassKind(several))), *self.draws_ready()}

    def tier(self, rows: int, plan: SamplingPlan | None = None) -> Tier:
        """How a pass over so many rows runs now, and drawing by `plan`; begins to compile when that is due."""
        compiled = self.runs_compiled(rows > 1)
        draws = self.draws_ready(plan) if plan is not None and self.mode else frozenset()
        return Tier(compiled, frozenset(filter(self.allows, draws)))

    def draws_ready(self, plan: SamplingPlan | None = None) -> frozenset[Hashable]:
        """What a subclass draws by has been compiled: plans, or the one, with the kinds of arguments they are compiled for."""
        return frozenset()

    def replayed(
        self, recordings: Recordings | None, key: Hashable, function: Callable[..., Any], given: tuple, rows: int,
        plan: SamplingPlan | None = None, *, copy: bool,
    ) -> Any:  # fmt: skip
        """``function(*given)``, which runs this pass over so many rows: as a replay, once it has been recorded.

        Args:
            key, given: as of :meth:`~decoders.engine.model.recordings.Recordings.run`.
            plan: by which it draws.
            copy: whether the result is to outlive the next replay.
        """
        if recordings is None:
            return function(*given)
        replays = recordings.replays
        result = recordings.run(lambda: (self, key, self.tier(rows, plan)), function, given)
        if recordings.replays == replays:
            return result
        self.compiled_passes += self.tier(rows, plan).compiled
        return copied(result) if copy else result

    def book_replay(self, seconds: float, rows: int) -> None:
        """Notes the time of a replay over so many rows, which is not seen otherwise."""
        if not self.runs_compiled(rows > 1):
            self._tiers[PassKind(rows > 1)].seconds += seconds

    def worth_compiling(self) -> bool:
        """Whether passes have been found worth compiling."""
        return any(tier.job is not None for tier in self._tiers.values())

    def __call__(
        self, nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: Tensor,
        text: LeadingText = LeadingText(), piece: PromptPiece | None = None,
    ) -> ForwardResult:  # fmt: skip
        """As :meth:`Target.forward`. view: ``[view]``, whose length says how many slots attention looks at.

        Args:
            piece: is read as well, in the same pass if :meth:`mixes` says so.
        """
        if piece is not None:
            compiled, single = self.runs_compiled(several=True), nodes.shape[1] == 1
            faster_alone = self.target.dequantizes(piece.tokens.numel())
            if not faster_alone and self.mixes(len(nodes), single=single):
                return self._mixed(nodes, base, tree, view, text.length, piece, compiled)
            # Otherwise the block has other sizes than was foreseen, or a graph became ready meanwhile.
            started = time.perf_counter()
            self.prefill(*piece.alone)
            self.book_mixed(time.perf_counter() - started, len(nodes), single=single)
        if self.runs_compiled(len(nodes) > 1):
            kept = torch.arange(text.length, nodes.shape[1], device=nodes.device)
            return self._run(nodes, base, tree, buffers, view, kept).behind(text.length)
        with self._counted(nodes):
            return self.target.forward(nodes, base, tree, buffers, view, text)

    def prefill(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int,
        recordings: Recordings | None = None,
    ) -> None:  # fmt: skip
        """As :meth:`Target.prefill`. recordings: of the session that the rows are of."""
        if recordings is not None:
            # How far a stretch looks is a size: in a recording at all slots.
            key = "prefill", buffers.place, len(view)
            read = lambda tokens, start: self.prefill(tokens, start, buffers, view, buffers.slots)  # noqa: E731
            self.replayed(recordings, key, read, (tokens, start), len(tokens), copy=False)
            return
        if self._reads_compiled(tokens):
            self._run(tokens, start, causal_block(len(tokens), tokens.shape[1], tokens.device), buffers, view)
            return
        with self._counted(tokens):
            self.target.prefill(tokens, start, buffers, view, latest)

    def features(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool,
        valid: Tensor | None = None, recordings: Recordings | None = None,
    ) -> ForwardResult:  # fmt: skip
        """As :meth:`Target.features`; without `logits` these are those of some tokens. recordings: as of :meth:`prefill`."""
        if recordings is not None:
            key = "features", buffers.place, len(view), logits

            def read(tokens: Tensor, start: Tensor) -> ForwardResult:
                return self.features(tokens, start, buffers, view, buffers.slots, logits=logits)

            return self.replayed(recordings, key, read, (tokens, start), len(tokens), copy=True)
        if self._reads_compiled(tokens):
            kept = torch.arange(tokens.shape[1], device=tokens.device) if logits else None
            return self._run(
                tokens, start, causal_block(len(tokens), tokens.shape[1], tokens.device), buffers, view, kept
            )
        with self._counted(tokens):
            return self.target.features(tokens, start, buffers, view, latest, logits=logits, valid=valid)

    def _run(
        self, nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: Tensor, kept: Tensor | None = None
    ) -> ForwardResult:  # fmt: skip
        """A compiled pass. kept: ``[K]`` int64, the nodes that get logits; None: as few as a graph for any number of them gives."""
        assert self._regional is not None
        self.compiled_passes += 1
        kept = torch.arange(FEWEST_LOGITS, device=nodes.device) if kept is None else kept
        return ForwardResult(*self._regional(nodes, base, regions.laid_out(tree), buffers, view, kept))

    def _mixed(
        self, nodes: Tensor, base: Tensor, tree: TreeTensors, view: Tensor, text: int, piece: PromptPiece, compiled: bool
    ) -> ForwardResult:  # fmt: skip
        if not compiled:
            with self._counted(nodes):
                return mixed.forward(self.target, nodes, base, tree, view, text, piece)
        assert self._regional_mixed is not None
        self.compiled_passes += 1
        rows, n = nodes.shape
        kept = mixed.with_logits(rows, n, text, nodes.device)
        given = self._regional_mixed(nodes, base, regions.laid_out(tree), view, regions.laid_out_piece(piece), kept)
        return mixed.by_row(ForwardResult(*given), rows, n).behind(text)

    def _reads_compiled(self, tokens: Tensor) -> bool:
        """Whether a stretch of text is read compiled."""
        return (
            not self.target.dequantizes(tokens.numel())
            and tokens.shape[1] >= LEAST_NODES
            and self.runs_compiled(len(tokens) > 1)
        )

    @contextmanager
    def _counted(self, nodes: Tensor) -> Iterator[None]:
        """Counts the time of an uncompiled pass; of a long one as much as a short one takes: the rest is matrix products."""
        started = time.perf_counter()
        yield
        share = min(STRETCH / nodes.shape[1], 1.0)
        self._tiers[PassKind(len(nodes) > 1)].seconds += share * (time.perf_counter() - started)

    def allows(self, kind: Hashable) -> bool:
        return self._allowed is None or kind in self._allowed

    def compile(self, several: bool, report: Report, *, single: bool = False) -> bool:
        """Compiles passes over one row, or over `several`, waits for it, and says whether it succeeded.

        Args:
            single: compile those with one node in each row as well.
        """
        ready = self._wait(self._begin(PassKind(several)), report)
        return self._wait(self._begin(PassKind(several, single)), report) if ready and single else ready

    def compile_for(self, rows: int, report: Report) -> None:
        """Compiles what a batch may need that has up to so many rows at a time, before the first step holds anybody up."""
        for several in (True, False) if rows > 1 else (False,):
            self.compile(several, report, single=self.target.takes_single_nodes(1 + several))
        singles = (False, True) if self.target.takes_single_nodes(2) else (False,)
        for single in singles if rows > 1 and self._can_mix else ():
            self._wait(self._begin(PassKind(True, single, mixed=True)), report)

    def _wait(self, tier: _Tier, report: Report) -> bool:
        """Waits for the compilation of `tier`, books it, and says whether it succeeded."""
        assert tier.job is not None
        started = time.perf_counter()
        ready = tier.job.wait()
        report.timings.compile += time.perf_counter() - started
        report.compilations += not tier.booked
        tier.booked = True
        return ready

    def _book(self, tier: _Tier) -> None:
        """Books a compilation that is over and that nobody has waited for."""
        if tier.job is not None and not tier.booked:
            tier.booked = True
            self.report.timings.background += tier.job.seconds
            self.report.compilations += 1

    def ready(self, kind: PassKind) -> bool:
        """Whether passes of a `kind` have been compiled."""
        job = self._tiers[kind].job
        return job is not None and job.poll()

    def runs_compiled(self, several: bool) -> bool:
        """Whether a pass of this call is to run compiled; begins to compile when that is due."""
        kind = PassKind(several)
        tier = self._tiers[kind]
        if not self.mode:
            return False
        if tier.job is None or not (tier.job.ready or tier.job.failed):
            if self.mode is True:
                return self.compile(several, self.report)
            if tier.job is None and not devices.recorded() and worth_compiling(tier.seconds, FORWARD_SECONDS):
                self._begin(kind)
            return False
        self._book(tier)
        return tier.job.poll() and self.allows(several)

    def _begin(self, kind: PassKind) -> _Tier:
        """Begins to compile passes of a `kind`, if that has not begun."""
        tier, target = self._tiers[kind], self.target
        if tier.job is not None:
            return tier
        rows, count = 3 if kind.several_rows else 1, 1 if kind.single_node else 11
        if kind.mixed:
            with_piece = self._regional_mixed = self._regional_mixed or regions.regional_mixed(target)
            tier.job = BackgroundCompile(
                "the mixed forward pass", lambda: with_piece.compile(*regions.mixed_examples(target, count))
            )
            return tier
        plain, compile_beside = self._regional or regions.regional_forward(target), self.compiling_beside()
        self._regional = plain

        def work() -> None:
            plain.compile(*regions.examples(target, rows, count))
            compile_beside(rows, count)

        tier.job = BackgroundCompile("the forward pass", work)
        return tier

    def compiling_beside(self) -> Callable[[int, int], object]:
        """Compiles, for so many rows and nodes, what a subclass has compiled with each pass."""
        return lambda rows, count: None
