"""One line per contestant, dtype, batch size and kind of prompt, made from the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import median
from typing import Any, Self

from .bandwidth import weight_bytes
from .contestants import YARDSTICK
from .interleave import Entry, Sample


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of `count` repeats."""

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
    core: float | None = None
    observe: float | None = None
    host: float | None = None


@dataclass
class Record:
    """Figures of one contestant on one kind of prompt.

    Attributes:
        status, reason: "ok", or why there are no figures ("impossible", "failed").
        identical: whether the new tokens equal the yardstick's in every row; None if there is no yardstick.
            difference: where they first differ.
        tokens_per_second: new tokens of all rows per second of wall time, compilation excluded; one value per repeat,
            over all prompts of the kind. ratio: the same repeat's value over the yardstick's.
        first_token: seconds to the first token, the mean over prompts of each repeat.
        accepted_length: tokens per row and step; 1 is plain decoding. outside_core: share of the step outside
            forward, verification and commit.
        first_call, second_call: seconds of the first two calls, on one prompt of the run. compilations: graphs
            compiled in the first call, recompilations: in all later ones.
        peak_memory: bytes, of `memory_kind` "device" or "process". cache_bytes: of the loop's key-value cache.
        bandwidth_fraction: bytes of the target's weights, read once per step, over the core's (for transformers: the
            step's) time, relative to the measured copy bandwidth. Above 1 the weights stay in a cache.
    """

    contestant: str
    dtype: str
    batch: int
    kind: str
    status: str = "ok"
    reason: str = ""
    ours: bool = False
    exact: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    identical: bool | None = None
    difference: str = ""
    tokens_per_second: Spread | None = None
    ratio: Spread | None = None
    first_token: Spread | None = None
    accepted_length: float | None = None
    step_ms: StepTimes | None = None
    outside_core: float | None = None
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
    samples: list[Sample] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)


def summarise(entries: Sequence[Entry], bandwidth: float | None = None) -> list[Record]:
    """One record per entry and kind; `bandwidth` of the device in bytes per second."""
    records = []
    for entry in entries:
        yardstick = next(
            (
                e
                for e in entries
                if e.contestant.name == YARDSTICK
                and (e.contestant.dtype, e.rows, e.status) == (entry.contestant.dtype, entry.rows, "ok")
            ),
            None,
        )
        for kind in dict.fromkeys(entry.kind_of.values()):
            records.append(_record(entry, kind, yardstick, bandwidth))
    return records


def _record(entry: Entry, kind: str, yardstick: Entry | None, bandwidth: float | None) -> Record:
    contestant = entry.contestant
    record = Record(
        contestant.name, contestant.dtype, entry.rows, kind, entry.status, entry.reason, contestant.ours,
        contestant.exact, dict(contestant.settings),
    )  # fmt: skip
    if entry.status != "ok":
        return record
    names = [name for name, other in entry.kind_of.items() if other == kind]
    record.samples = [s for s in entry.samples if s.workload in names]
    if yardstick is not None:
        record.difference = next(filter(None, (_difference(entry, yardstick, name) for name in names)), "")
        record.identical = not record.difference
    speeds = _per_repeat(record.samples)
    record.tokens_per_second = Spread.of(list(speeds.values()))
    if yardstick is not None:
        theirs = _per_repeat([s for s in yardstick.samples if s.workload in names])
        record.ratio = Spread.of([speeds[r] / theirs[r] for r in speeds if r in theirs])
    record.first_token = _first_tokens(record.samples)
    checks = [entry.checks[name] for name in names]
    steps = sum(check.steps for check in checks)
    record.accepted_length = sum(check.accepted_length * check.steps for check in checks) / steps if steps else None
    record.step_ms = _step_times(record.samples, {name: entry.checks[name].steps for name in names})
    if record.step_ms is not None and record.step_ms.core is not None and record.step_ms.total:
        record.outside_core = 1 - record.step_ms.core / record.step_ms.total
    if entry.warmup is not None:
        w = entry.warmup
        record.first_call, record.second_call = w.first_call, w.second_call
        record.compile_seconds, record.compilations = w.compile_seconds, w.compilations
        record.recompilations = w.second_compilations + sum(s.compilations for s in entry.samples)
        record.peak_memory, record.memory_kind, record.cache_bytes = w.peak_memory, w.memory_kind, w.cache_bytes
    record.weight_bytes = weight_bytes(contestant.model)
    if bandwidth and record.step_ms is not None:
        seconds = (record.step_ms.core or record.step_ms.total) / 1e3
        record.bandwidth_fraction = record.weight_bytes / seconds / bandwidth if seconds > 0 else None
    return record


def _per_repeat(samples: Sequence[Sample]) -> dict[int, float]:
    """Tokens per second of every repeat, all its prompts together."""
    ordered = sorted(samples, key=lambda s: s.repeat)
    speeds = {}
    for repeat, group in groupby(ordered, key=lambda s: s.repeat):
        members = list(group)
        seconds = sum(s.seconds for s in members)
        if seconds > 0:
            speeds[repeat] = sum(s.new_tokens for s in members) / seconds
    return speeds


def _first_tokens(samples: Sequence[Sample]) -> Spread | None:
    by_repeat: dict[int, list[float]] = {}
    for s in samples:
        if s.first_token is not None:
            by_repeat.setdefault(s.repeat, []).append(s.first_token)
    return Spread.of([sum(values) / len(values) for values in by_repeat.values()])


def _step_times(samples: Sequence[Sample], steps: dict[str, int]) -> StepTimes | None:
    """Medians over the calls. For transformers: what follows the first token, over the steps after the first."""
    split = [s for s in samples if s.steps]
    if split:
        medians = {
            part: median([getattr(s, part) / s.steps * 1e3 for s in split])
            for part in ("propose", "core", "observe", "host")
        }
        totals = [(s.propose + s.core + s.observe + s.host) / s.steps * 1e3 for s in split]
        return StepTimes(median(totals), **medians)
    totals = [
        (s.seconds - s.first_token) / (steps[s.workload] - 1) * 1e3
        for s in samples
        if s.first_token is not None and steps[s.workload] > 1
    ]
    return StepTimes(median(totals)) if totals else None


def _difference(entry: Entry, yardstick: Entry, workload: str) -> str:
    """Where the new tokens first differ from the yardstick's; empty if they are the same."""
    own, theirs = entry.checks[workload].tokens, yardstick.checks[workload].tokens
    for row, (a, b) in enumerate(zip(own, theirs, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"{workload}, row {row}, new token {at}"
    return ""
