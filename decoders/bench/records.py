"""One line per method, dtype, batch size and kind of prompt, made from the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import median
from typing import Any, Self

from ..report import Stage
from .bandwidth import weight_bytes
from .interleave import Check, Competitor, Measurement
from .methods import BASELINE, PLAIN
from .variants import GRAMMAR

#: What a step of ours is made of, in order.
PARTS = ("propose", "mask", "core", "observe", "host")


@dataclass(frozen=True)
class Spread:
    """Median and range of repeats.

    Attributes:
        median: of all repeats.
        low: the smallest.
        high: the largest.
        count: repeats.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None of no values."""
        return cls(median(values), min(values), max(values), len(values)) if values else None


@dataclass(frozen=True)
class StepTimes:
    """Median milliseconds per step, prefill excluded. transformers tells only the `total`."""

    total: float
    propose: float | None = None
    mask: float | None = None
    core: float | None = None
    observe: float | None = None
    host: float | None = None


@dataclass(frozen=True)
class StageFigures:
    """What a draft model did per target step; medians over the calls.

    Attributes:
        model: name or path.
        depth: 0 drafts for the target, 1 for its draft model.
        drafter: what drafts for this model.
        passes: forward passes per target step.
        tokens_per_pass: written per row and pass with the drafter's help, None without one.
        forward_share: seconds of its passes, as a share of those of the target's steps.
    """

    model: str
    depth: int
    drafter: str | None
    passes: float
    tokens_per_pass: float | None
    forward_share: float | None


@dataclass
class Record:
    """Figures of one method on one kind of prompt.

    Attributes:
        method: its name.
        dtype: of the weights.
        batch: rows.
        kind: of prompt.
        status: "ok", "skipped" (the method does not do this) or "failed" (an error).
        reason: why there are no figures.
        ours: whether it is a strategy of an enabled model.
        exact: whether its output must be plain decoding's own.
        settings: given by hand.
        identical: whether the new tokens equal the baseline's in every row; None if there is nothing to compare with.
        baseline: what they were compared with: transformers; our plain decoding when sampling, or under the same grammar,
            if that is measured too.
        difference: where they first differ.
        incomparable: what to expect instead where they need not be equal ("same distribution").
        verifier: the rule that accepts our drafts.
        tokens_per_second: new tokens of all rows per second of wall time, compilation excluded; one value per repeat, over
            all prompts of the kind.
        ratio: the same repeat's value over the baseline's.
        first_token: seconds to the first token, the mean over prompts of each repeat.
        accepted_length: tokens per row and step; 1 is plain decoding. Of ours over all repeats, of transformers in one call
            per prompt.
        draft_passes: forward passes per step of the models that draft for the target.
        outside_core: share of the step outside forward, verification and commit.
        overhead: share outside the forward passes of target and draft models.
        stages: one entry per draft model, see :class:`StageFigures`.
        step_ms: the parts of a step.
        first_call: seconds of the first call, on one prompt of the run.
        second_call: seconds of the second call, on the same prompt.
        compile_seconds: spent on compiling in the first call.
        compilations: graphs compiled in the first call.
        recompilations: graphs compiled in all later calls.
        peak_memory: bytes.
        memory_kind: what of: "device", "process" or "unknown".
        cache_bytes: of the loop's key-value cache.
        weight_bytes: of the target's weights that one step reads.
        samples: the timed calls.
        model: what was measured, as it was named.
        random_weights: whether it is a shape; how often drafts are accepted means nothing there.
        prompt_tokens: the median prompt's.
        prefill: seconds of reading it.
        compiled_share: of the steps, in the compiled tier.
        cold_first_token: seconds to the first token of the first call, compilation included, on one prompt of the run.
        memory_added: bytes by which the first two calls made the process larger; the first method is charged for
            what all share.
        pack_seconds: of the first call, see :class:`~decoders.report.Timings`.
        background_seconds: of the first call, see :class:`~decoders.report.Timings`.
        bandwidth_fraction: bytes of the target's weights, read once per step, over the core's (for transformers: the
            step's) time, relative to the measured copy bandwidth. Above 1 the weights stay in a cache.
    """

    method: str
    dtype: str
    batch: int
    kind: str
    status: str = "ok"
    reason: str = ""
    ours: bool = False
    exact: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    verifier: str = ""
    identical: bool | None = None
    baseline: str = ""
    difference: str = ""
    incomparable: str = ""
    tokens_per_second: Spread | None = None
    ratio: Spread | None = None
    first_token: Spread | None = None
    accepted_length: float | None = None
    draft_passes: float | None = None
    step_ms: StepTimes | None = None
    outside_core: float | None = None
    overhead: float | None = None
    stages: list[StageFigures] = field(default_factory=list)
    first_call: float | None = None
    second_call: float | None = None
    compile_seconds: float | None = None
    compilations: int | None = None
    recompilations: int | None = None
    peak_memory: int | None = None
    memory_kind: str = "unknown"
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    bandwidth_fraction: float | None = None
    samples: list[Measurement] = field(default_factory=list)
    model: str = ""
    random_weights: bool = False
    prompt_tokens: float | None = None
    prefill: Spread | None = None
    compiled_share: float | None = None
    cold_first_token: float | None = None
    memory_added: int | None = None
    pack_seconds: float | None = None
    background_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)


def summarise(
    entries: Sequence[Competitor], bandwidth: float | None = None, model: str = "", random_weights: bool = False
) -> list[Record]:
    """One record per entry and kind; `bandwidth` of the device in bytes per second, `model` as it is to be called."""
    records = []
    for entry in entries:
        method = entry.method
        speed_baseline = _entry_of(entry, entries, BASELINE)
        token_baseline = _entry_of(entry, entries, PLAIN) if method.sampling is not None else speed_baseline
        if method.grammar:
            token_baseline = _entry_of(entry, entries, PLAIN, method.grammar) or token_baseline
        for kind in dict.fromkeys(entry.kind_of.values()):
            record = _record(entry, kind, speed_baseline, token_baseline, bandwidth)
            record.model, record.random_weights = model, random_weights
            records.append(record)
    return records


def _entry_of(entry: Competitor, entries: Sequence[Competitor], name: str, grammar: str = "") -> Competitor | None:
    """The entry of the method `name`, or `name` with a grammar, of the same dtype and number of rows, if it has figures."""
    key = (name + (f"[{GRAMMAR}={grammar}]" if grammar else ""), entry.method.dtype, entry.rows, "ok")
    return next((e for e in entries if (e.method.name, e.method.dtype, e.rows, e.status) == key), None)


def _record(
    entry: Competitor,
    kind: str,
    speed_baseline: Competitor | None,
    token_baseline: Competitor | None,
    bandwidth: float | None,
) -> Record:
    """`speed_baseline`: whose speed the ratio refers to. `token_baseline`: whose tokens "identical" refers to."""
    method = entry.method
    record = Record(
        method.name, method.dtype, entry.rows, kind, entry.status, entry.reason, method.ours,
        method.exact, dict(method.settings), method.verifier,
    )  # fmt: skip
    if entry.status != "ok":
        return record
    names = [name for name, other in entry.kind_of.items() if other == kind]
    record.samples = [s for s in entry.samples if s.workload in names]
    record.incomparable = method.incomparable
    if token_baseline is not None and not record.incomparable:
        record.baseline = token_baseline.method.name
        record.difference = next(filter(None, (_difference(entry, token_baseline, name) for name in names)), "")
        record.identical = not record.difference
    speeds = _per_repeat(record.samples)
    record.tokens_per_second = Spread.of(list(speeds.values()))
    if speed_baseline is not None:
        baseline_speeds = _per_repeat([s for s in speed_baseline.samples if s.workload in names])
        record.ratio = Spread.of([speeds[r] / baseline_speeds[r] for r in speeds if r in baseline_speeds])
    record.first_token = _first_tokens(record.samples)
    lengths = [s.prompt_tokens for s in record.samples if s.prompt_tokens is not None]
    record.prompt_tokens = median(lengths) if lengths else None
    record.prefill = Spread.of([s.prefill for s in record.samples if s.prefill is not None])
    steps = [(s.compiled_share, s.steps) for s in record.samples if s.compiled_share is not None and s.steps]
    record.compiled_share = sum(share * n for share, n in steps) / sum(n for _, n in steps) if steps else None
    _count(record, [entry.checks[name] for name in names])
    record.step_ms = _step_times(record.samples, {name: entry.checks[name].steps for name in names})
    if record.step_ms is not None and record.step_ms.core is not None and record.step_ms.total:
        record.outside_core = 1 - record.step_ms.core / record.step_ms.total
    overheads = [s.overhead for s in record.samples if s.overhead is not None]
    record.overhead = median(overheads) if overheads else None
    record.stages = _stages([(s.stages, s) for s in record.samples if s.stages])
    if entry.warmup is not None:
        warmup = entry.warmup
        record.first_call, record.second_call = warmup.first_call, warmup.second_call
        record.compile_seconds, record.compilations = warmup.compile_seconds, warmup.compilations
        record.recompilations = warmup.second_compilations + sum(s.compilations for s in entry.samples)
        record.peak_memory, record.memory_kind, record.cache_bytes = (
            warmup.peak_memory,
            warmup.memory_kind,
            warmup.cache_bytes,
        )
        record.cold_first_token, record.memory_added = warmup.first_token, warmup.memory_added
        record.pack_seconds, record.background_seconds = warmup.pack_seconds, warmup.background_seconds
    record.weight_bytes = weight_bytes(method.model)
    if bandwidth and record.step_ms is not None:
        seconds = (record.step_ms.core or record.step_ms.total) / 1e3
        record.bandwidth_fraction = record.weight_bytes / seconds / bandwidth if seconds > 0 else None
    return record


def _count(record: Record, checks: Sequence[Check]) -> None:
    """Tokens and draft passes per step: of the timed calls, which differ when sampling, or else of the untimed ones."""
    lengths = [s.accepted_lengths for s in record.samples if s.accepted_lengths]
    steps = sum(check.steps for check in checks)
    if lengths:
        tokens = sum((n + 1) * count for histogram in lengths for n, count in enumerate(histogram))
        record.accepted_length = tokens / sum(map(sum, lengths))
    elif steps:
        record.accepted_length = sum(check.accepted_length * check.steps for check in checks) / steps
    passes = [s.draft_passes / s.steps for s in record.samples if s.draft_passes is not None and s.steps]
    if not passes:
        passes = [c.draft_passes / c.steps for c in checks if c.draft_passes is not None and c.steps]
    record.draft_passes = median(passes) if passes else None


def _stages(calls: Sequence[tuple[list[Stage], Measurement]], depth: int = 0) -> list[StageFigures]:
    """Figures of the draft models, each followed by those of its drafter. `calls`: a call's stages, and the call."""
    figures: list[StageFigures] = []
    for stages in zip(*(stages for stages, _ in calls), strict=False):  # the same model in every call
        passes, tokens_and_passes, shares = [], [0, 0], []
        for stage, (_, sample) in zip(stages, calls, strict=True):
            passes.append(stage.passes / sample.steps if sample.steps else 0.0)
            tokens_and_passes[0] += sum((n + 1) * count for n, count in enumerate(stage.accepted_lengths))
            tokens_and_passes[1] += sum(stage.accepted_lengths)
            if sample.steps and sample.steps > sample.prefill_steps:
                step = sum(_parts_of_a_step(sample).values()) / 1e3
                shares.append(stage.forward_seconds / (step * sample.steps))
        figures.append(
            StageFigures(
                stages[0].model,
                depth,
                stages[0].drafter,
                median(passes),
                tokens_and_passes[0] / tokens_and_passes[1] if tokens_and_passes[1] else None,
                median(shares) if shares else None,
            )  # fmt: skip
        )
        inner_calls = [(stage.stages, sample) for stage, (_, sample) in zip(stages, calls, strict=True)]
        figures += _stages(inner_calls, depth + 1)
    return figures


def _per_repeat(samples: Sequence[Measurement]) -> dict[int, float]:
    """Tokens per second of every repeat, all its prompts together."""
    ordered = sorted(samples, key=lambda s: s.repeat)
    speeds = {}
    for repeat, group in groupby(ordered, key=lambda s: s.repeat):
        members = list(group)
        seconds = sum(s.seconds for s in members)
        if seconds > 0:
            speeds[repeat] = sum(s.new_tokens for s in members) / seconds
    return speeds


def _first_tokens(samples: Sequence[Measurement]) -> Spread | None:
    by_repeat: dict[int, list[float]] = {}
    for s in samples:
        if s.first_token is not None:
            by_repeat.setdefault(s.repeat, []).append(s.first_token)
    return Spread.of([sum(values) / len(values) for values in by_repeat.values()])


def _parts_of_a_step(sample: Measurement) -> dict[str, float]:
    """Milliseconds; a step whose core was timed as prefill has none that is known."""
    assert sample.steps is not None
    counts = dict.fromkeys(PARTS, sample.steps) | {"core": sample.steps - sample.prefill_steps}
    return {part: getattr(sample, part) / counts[part] * 1e3 for part in PARTS}


def _step_times(samples: Sequence[Measurement], steps: dict[str, int]) -> StepTimes | None:
    """Medians over the calls. For transformers: what follows the first token, over the steps after the first."""
    parts_of_calls = [_parts_of_a_step(s) for s in samples if s.steps and s.steps > s.prefill_steps]
    if parts_of_calls:
        medians = {part: median([parts[part] for parts in parts_of_calls]) for part in PARTS}
        return StepTimes(median([sum(parts.values()) for parts in parts_of_calls]), **medians)
    totals = [
        (s.seconds - s.first_token) / (steps[s.workload] - 1) * 1e3
        for s in samples
        if s.first_token is not None and steps[s.workload] > 1
    ]
    return StepTimes(median(totals)) if totals else None


def _difference(entry: Competitor, baseline: Competitor, workload: str) -> str:
    """Where the new tokens first differ from the baseline's; empty if they are the same."""
    tokens, expected = entry.checks[workload].tokens, baseline.checks[workload].tokens
    for row, (row_tokens, row_expected) in enumerate(zip(tokens, expected, strict=True)):
        if row_tokens != row_expected:
            position = next(
                (i for i, (x, y) in enumerate(zip(row_tokens, row_expected, strict=False)) if x != y),
                min(len(row_tokens), len(row_expected)),
            )
            return f"{workload}, row {row}, new token {position}"
    return ""
