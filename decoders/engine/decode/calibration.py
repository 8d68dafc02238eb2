"""Measures a model's cost curve (the seconds of a step by the number of nodes) with steps on rows of dummy text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low

import torch

from ...common.devices import processor_name
from ...common.transformers_compat import config_value
from ...common.version import __version__
from ...costs.curve import CostCurve, CostPoint, Subject, read, write
from ...costs.steps import SizeRatios, StepLine
from ...report import Report
from ...sampling.processors import SamplingPlan
from ...strategy import Draft
from ...tree import Topology
from ..model import torch_compat
from ..model.blocks import NodeBlock
from ..model.buckets import row_bucket
from ..model.compiled.forward_pass import ForwardPass
from ..model.compiled.tiers import Compile, PassKind
from ..model.kernels import cpu
from ..model.recordings import PLAIN_RUNS
from ..model.target import Target
from ..model.threads import torchs_own
from .core import CoupledRule, core_of
from .rows import no_sampling
from .sessions import Sessions

#: Numbers of nodes per block, root included, that a full calibration measures: 0, 1, 2, 4, … draft tokens.
NODES: tuple[int, ...] = (1, 2, 3, 5, 9, 17, 33, 65)
#: Number of timed steps per size.
REPEATS = 5
#: Numbers of nodes to measure within a call, once per number of rows and tier (compiled or not). They are few, because the call waits.
#: On devices that record steps (CUDA graphs), many nodes may cost as much as one. There 33 nodes are measured, too, because a
#: node budget from costs is at most twice the largest measured number.
NODES_IN_CALL: tuple[int, ...] = (1, 5, 17)
NODES_WHERE_RECORDED: tuple[int, ...] = (*NODES_IN_CALL, 33)
REPEATS_IN_CALL = 2


def subject_of(target: Target) -> Subject:
    """Returns what the cost curve of `target` is valid for: the model, the machine and the versions of the software."""
    config = target.model.config
    text = config.get_text_config()
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    sizes = [f"{config_value(text, name)}" for name in names]
    quantization = getattr(config, "quantization_config", None)
    method = (
        getattr(quantization, "quant_method", None) or (quantization or {}).get("quant_method", "")
        if quantization
        else ""
    )
    own = target.precision
    parts = [
        str(getattr(method, "value", method)),
        own.weights and f"weights={own.weights}",
        own.cache and f"kv={own.cache}",
        "" if own.exact_products else "exact_products=False",
        f"ranks={target.ranks.size}" if target.ranks.several else "",
    ]
    on_cpu, device = target.device.type == "cpu", processor_name(target.device)
    if on_cpu:  # a virtual machine may hide instructions that the processor's name implies
        kernels = cpu.chosen().kernels
        device = f"{device}, {torch_compat.instructions()}" + (f", {kernels.variant} kernels" if kernels else "")
    return Subject(
        model="-".join([type(config).__name__, *sizes, str(target.vocab_size)]),
        dtype=str(target.dtype).removeprefix("torch."), quantization=" ".join(filter(None, parts)),
        device=device, threads=torchs_own() if on_cpu else 0,
        attention=target.attends, torch=torch.__version__, package=__version__,
    )  # fmt: skip


class Calibrator:
    """The known costs of an engine's steps, in memory and in files.

    Attributes:
        line: seconds by number of nodes, fitted to observed steps as a straight line, for calls that have no cost curve.
    """

    def __init__(self, forward_pass: ForwardPass, sessions: Sessions) -> None:
        self.forward_pass, self.sessions, self.target = forward_pass, sessions, forward_pass.target
        self._curve: CostCurve | None = None
        self._read: set[Path | None] = set()
        self._ratios: dict[tuple[int, int], dict[bool, SizeRatios]] = {}
        self.line = StepLine()

    def ratios(self, rows: int, context: int) -> dict[bool, SizeRatios]:
        """Returns ratios of observed to expected seconds of steps with `rows` rows and about `context` tokens, by tier (True: compiled)
        and size.

        `StepCosts` updates the returned dict.
        """
        return self._ratios.setdefault((rows, context.bit_length() // 2), {})

    def known(self, folder: Path | None) -> CostCurve | None:
        """The curve measured so far; None if nothing was measured. folder: where curves are stored; None: read no files."""
        if folder is not None and folder not in self._read:
            self._read.add(folder)
            kept = self.target.ranks.first_object(lambda: read(folder, self._empty().subject))
            if kept is not None:
                self._curve = kept.with_points(self._curve.points if self._curve is not None else ())
        return self._curve if self._curve is not None and self._curve.points else None

    def measured(
        self, folder: Path | None, rows: Sequence[int], contexts: Sequence[int], compile: Compile, seconds: float = 10.0,
        anew: bool = False,
    ) -> CostCurve:  # fmt: skip
        """Returns the curve, after measuring the points that it lacks.

        Args:
            rows, contexts: numbers of rows, and context lengths in tokens, to measure.
            compile: a call's setting, which decides the tier (compiled or not); "auto" means the tier in which a call would run now.
            seconds: time limit. Measuring stops when the time is up, but not before two numbers of nodes are measured.
            anew: whether to measure everything again. If False, only a few numbers of nodes are measured, and only for numbers of rows
                that were not measured at any context, because a call waits for the result.
        """
        in_call = NODES_WHERE_RECORDED if self.target.static else NODES_IN_CALL
        nodes, repeats = (NODES, REPEATS) if anew else (in_call, REPEATS_IN_CALL)
        curve = self.known(folder) or self._empty()
        compiled = self._compiled(rows, compile)
        places, wanted = {point.place for point in curve.points}, []
        for row_count, context in itertools.product(rows, contexts):
            near = curve.context_near(row_count, context, compiled)
            if anew or near is None:
                wanted.append((row_count, context, nodes))
            # Steps without a draft were measured as padded blocks, but run as blocks of one node now: measure them again. A context
            # much longer than the call's is left out, because the measurement would take more memory and time than the call.
            elif (
                near <= 4 * context
                and (row_count, near, 1, compiled) not in places
                and self._runs_single(row_count, compile)
            ):
                wanted.append((row_count, near, (1,)))
        if not wanted:
            return curve
        clock = self.target.ranks.clock
        end = clock() + seconds
        points: list[CostPoint] = []
        for row_count, context, sizes in wanted:
            if not points or clock() < end:
                points += measure(self.forward_pass, self.sessions, row_count, context, sizes, compile, end, repeats)
                self._ratios = {key: ratios for key, ratios in self._ratios.items() if key[0] != row_count}
        self._curve = curve.with_points(points)
        if folder is not None and self.target.ranks.writes:
            write(folder, self._curve)
        return self._curve

    def _empty(self) -> CostCurve:
        return CostCurve(subject=subject_of(self.target))

    def _runs_single(self, rows: int, compile: Compile) -> bool:
        """Whether a step without a draft now runs one node per row, without padding."""
        with self.forward_pass.tiers.during(compile, Report("calibration")):
            return self.forward_pass.runs_single(rows)

    def _compiled(self, rows: Sequence[int], compile: Compile) -> bool:
        return bool(compile) and (compile is True or self.forward_pass.tiers.may_take(PassKind(max(rows) > 1)))


@torch.no_grad()
def measure(
    forward_pass: ForwardPass, sessions: Sessions, rows: int, context: int, nodes: Sequence[int], compile: Compile, end: float,
    repeats: int,
) -> list[CostPoint]:  # fmt: skip
    """Measures the steps of a greedy call. Returns a point per size (number of nodes after padding), with the median seconds of a step.

    Measuring stops when ``target.ranks.clock()`` reaches `end`, but not before two sizes are measured. Seconds of compilation are
    added to `end`. Sizes are measured in turns, so that a temporary slowdown of the machine does not distort only one size. In a turn
    each size runs two steps. Only the second step is timed, because the first step finds data of another size in the processor's
    caches. The slots are not filled with a text's keys and values, because a step's time does not depend on their contents.
    """
    target = forward_pass.target
    device, clock = target.device, target.ranks.clock
    rows = row_bucket(rows, target.static)
    context = min(context, (target.lengths.most or context + max(nodes)) - max(nodes))
    context = max(context, 1)
    prompts = [torch.zeros(context, dtype=torch.int64, device=device)] * rows
    sampling = no_sampling(rows, device)
    report = Report("calibration")
    points: list[CostPoint] = []
    with (
        forward_pass.tiers.during(compile, report),
        sessions.open(prompts, max(nodes), sampling, context + 2 * max(nodes), reuse=False) as (session, *_),
    ):
        forward_pass.fit(session.blocks, rows)
        plan, nothing = SamplingPlan(), Draft.nothing(rows, device)
        core = core_of(forward_pass, plan, CoupledRule(forward_pass, plan), session.recordings, copy=False)
        sizes = list(dict.fromkeys(session.blocks.size(n) for n in sorted(nodes)))
        session.reserve(context + max(sizes))

        def seconds(size: int) -> float:
            tree = session.blocks.tensors(Topology.chain(size - 1), size)
            draft = torch.full((rows, size - 1), -1, dtype=torch.int64, device=device)
            block = NodeBlock(draft, tree, session.view(context + size)[0])
            session.rows.length.fill_(context)
            session.rows.finished.fill_(False)
            begun = clock()
            out = core.forward_verify_commit(nothing, block, session.rows)
            if (states := session.rows.buffers.states) is not None:
                states.commit(out.path, out.summary[0], session.rows.length)
            out.read(session.lists)  # waits for the device, as a call does
            return clock() - begun

        times: dict[int, list[float]] = {}
        runs = 1 if session.recordings is None else PLAIN_RUNS + 1
        compiled: dict[int, bool] = {}
        for index, size in enumerate(sizes):
            needed = 2 * (repeats - 1) * sum(first for first, *_ in times.values())
            if index >= 2 and clock() + needed > end:
                break
            first = sum(seconds(size) for _ in range(runs))  # in these steps the pass is compiled and recorded
            passes = forward_pass.compiled_passes
            times[size] = [seconds(size)]
            end += max(first - times[size][0], 0.0)
            compiled[size] = forward_pass.compiled_passes > passes
        for _ in range(repeats - 1):
            for size, taken in times.items():
                seconds(size)
                taken.append(seconds(size))
        for size, taken in times.items():
            points.append(
                CostPoint(rows=rows, context=context, nodes=size, compiled=compiled[size], seconds=median_low(taken))
            )
    return points
