"""Records: the figures of one method, dtype, batch size and kind of prompt, computed from samples (timed calls)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from ..report import BUSY
from ..report.surroundings import WAITING
from .figures import (
    Spread,
    StepTimes,
    accepted_length,
    difference,
    first_tokens,
    looping,
    passes_per_step,
    per_repeat,
    ratio,
    step_times,
)
from .machine import weight_bytes
from .measurement import Competitor, Measurement
from .methods import BASELINE, PLAIN
from .variants import GRAMMAR


@dataclass
class Record:
    """Figures of one method on one kind of prompt.

    Attributes:
        method: the method's name.
        dtype: dtype of the weights.
        batch: number of rows.
        kind: kind of prompt.
        status: "ok", "skipped" (not supported, or no time was left) or "failed" (an error).
        reason: why there are no figures.
        ours: whether the method is a strategy; false for transformers' methods and other engines.
        exact: whether its output must equal plain decoding's.
        settings: the settings that the user gave.
        identical: whether the new tokens equal the baseline's in every row; None if there is nothing to compare with.
        baseline: the method that the tokens were compared with: transformers; or, when sampling or with a grammar, our plain decoding.
        difference: where the tokens first differ from the baseline's.
        looping: share of the new tokens in repetition loops (:func:`~decoders.bench.repetition.in_loops`). Loops flatter methods
            that draft from the text so far.
        incomparable: text shown in place of `identical` if the tokens need not be equal, such as "same distribution"; else "".
        verifier: name of the verifier; "" for transformers' methods.
        tokens_per_second: new tokens of all rows per second of wall time, compilation excluded; one value per repeat, over all
            prompts of the kind.
        ratio: tokens per second divided by the baseline's in the same repeat.
        plain_ratio: tokens per second divided by our plain decoding's, if plain decoding was measured.
        first_token: seconds to the first token; one value per repeat, the mean over the prompts.
        accepted_length: mean number of tokens per row and step, 1 for plain decoding; over all repeats for our strategies, over
            one call per prompt for transformers.
        draft_passes: number of forward passes per target step, of the models that draft for the target.
        overhead: share of the step outside the forward passes of target and draft models.
        step_ms: times of the parts of a step.
        first_call, compile_seconds, compilations: as in :class:`.WarmupCost`.
        recompilations: number of graphs compiled in all later calls.
        peak_memory, cache_bytes: as in :class:`.WarmupCost`.
        weight_bytes: bytes of the target's weights that one step reads.
        samples: the timed calls.
        model: the measured model, as the user named it.
        random_weights: whether the model has random weights (:mod:`~decoders.bench.shapes`); then acceptance means nothing.
        scaled: ``cost-scaled to 0.49B`` if a small model was padded to this size, else "".
        engine: name of another engine; "" for transformers and for our strategies.
        prompt_tokens: median number of tokens of the prompts.
        prefill: seconds of the prefill.
        compiled_share: share of the steps that ran compiled.
        cold_first_token: seconds to the first token of the first call, compilation included, on one prompt of the run.
        memory_added: growth of the process's resident memory in the first two calls, in bytes. Memory that all methods share is
            counted for the first method.
        temperature: temperature of the sampling; 0: greedy.
        bandwidth_fraction: the speed at which a step's core (transformers: the whole step) reads the target's weights, in bytes per
            second, divided by the measured copy bandwidth. A value above 1 shows that weights stay in a cache.
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
    looping: float | None = None
    incomparable: str = ""
    tokens_per_second: Spread | None = None
    ratio: Spread | None = None
    plain_ratio: Spread | None = None
    first_token: Spread | None = None
    accepted_length: float | None = None
    draft_passes: float | None = None
    step_ms: StepTimes | None = None
    overhead: float | None = None
    first_call: float | None = None
    compile_seconds: float | None = None
    compilations: int | None = None
    recompilations: int | None = None
    peak_memory: int | None = None
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    bandwidth_fraction: float | None = None
    samples: list[Measurement] = field(default_factory=list)
    model: str = ""
    random_weights: bool = False
    scaled: str = ""
    engine: str = ""
    prompt_tokens: float | None = None
    prefill: Spread | None = None
    compiled_share: float | None = None
    cold_first_token: float | None = None
    memory_added: int | None = None
    temperature: float = 0.0

    @property
    def group(self) -> tuple[str, str, int, float]:
        """Model, dtype, number of rows and temperature: methods are compared if these are equal."""
        return self.model, self.dtype, self.batch, self.temperature

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON-safe data."""
        return asdict(self)


def waiting(records: Sequence[Record]) -> float:
    """The median over our calls of :attr:`Report.waiting`, the share of a step's time spent waiting for processors; 0 without calls."""
    return median([sample.waiting for r in records if r.ours for sample in r.samples] or [0.0])


def comparable(records: Sequence[Record]) -> tuple[list[Record], str]:
    """Returns `records`, and a warning if steps waited for processors for more than the share `WAITING` of their time, else "". If this
    share is above `BUSY`, the records are copies without ratios.
    """
    if (waits := waiting(records)) <= WAITING:
        return list(records), ""
    too_busy = waits > BUSY
    return [replace(r, ratio=None, plain_ratio=None) if too_busy else r for r in records], (
        f"Busy: other processes take the cores, steps waited {waits:.0%} of their time. That slows transformers more than this "
        f"loop, so ratios are {'left out' if too_busy else 'too high'}: measure again on a quiet machine."
    )


def summarise(
    entries: Sequence[Competitor], bandwidth: float | None = None, model: str = "", random_weights: bool = False
) -> list[Record]:
    """One record per entry and kind of prompt.

    Args:
        bandwidth: the device's copy speed in bytes per second.
        model: the model's name in the records.
    """
    records = []
    for entry in entries:
        method = entry.method
        speed_baseline = _entry_of(entry, entries, BASELINE)
        token_baseline = _entry_of(entry, entries, PLAIN) if method.sampling is not None else speed_baseline
        if method.grammar:
            token_baseline = _entry_of(entry, entries, PLAIN, method.grammar)
        plain = _entry_of(entry, entries, PLAIN)
        for kind in dict.fromkeys(entry.kind_of.values()):
            record = _record(entry, kind, speed_baseline, token_baseline, bandwidth)
            record.plain_ratio = ratio(record.samples, _samples(plain, kind))
            record.temperature = method.sampling.temperature if method.sampling is not None else 0.0
            record.model, record.random_weights = model, random_weights
            record.scaled = getattr(method.model.config, "cost_scaled", "")
            record.engine = str(method.settings["engine"]) if method.engine is not None else ""
            records.append(record)
    return records


def _samples(entry: Competitor | None, kind: str) -> list[Measurement]:
    return [] if entry is None else [s for s in entry.samples if entry.kind_of[s.workload] == kind]


def _entry_of(entry: Competitor, entries: Sequence[Competitor], name: str, grammar: str = "") -> Competitor | None:
    """The entry of the method `name` (with `grammar`, if given) that has the dtype and rows of `entry`; None if it has no figures."""
    key = (name + (f"[{GRAMMAR}={grammar}]" if grammar else ""), entry.method.dtype, entry.rows, "ok")
    return next((e for e in entries if (e.method.name, e.method.dtype, e.rows, e.status) == key), None)


def _record(
    entry: Competitor, kind: str, speed_baseline: Competitor | None, token_baseline: Competitor | None,
    bandwidth: float | None,
) -> Record:  # fmt: skip
    """The record of `entry` for one kind of prompt. Its speed is compared with `speed_baseline`, its tokens with `token_baseline`."""
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
        record.difference = next(filter(None, (difference(entry, token_baseline, name) for name in names)), "")
        record.identical = not record.difference
    record.tokens_per_second = Spread.of(list(per_repeat(record.samples).values()))
    record.ratio = ratio(record.samples, _samples(speed_baseline, kind))
    record.first_token = first_tokens(record.samples)
    lengths = [s.prompt_tokens for s in record.samples if s.prompt_tokens is not None]
    record.prompt_tokens = median(lengths) if lengths else None
    record.prefill = Spread.of([s.prefill for s in record.samples if s.prefill is not None])
    steps = [(s.compiled_share, s.steps) for s in record.samples if s.compiled_share is not None and s.steps]
    record.compiled_share = sum(share * n for share, n in steps) / sum(n for _, n in steps) if steps else None
    checks = [entry.checks[name] for name in names]
    record.accepted_length = accepted_length(record.samples, checks)
    record.draft_passes = passes_per_step(checks)
    record.looping = looping([row for check in checks for row in check.tokens])
    record.step_ms = step_times(record.samples, {name: entry.checks[name].steps for name in names})
    overheads = [s.overhead for s in record.samples if s.overhead is not None]
    record.overhead = median(overheads) if overheads else None
    if entry.warmup is not None:
        warmup = entry.warmup
        record.first_call = warmup.first_call
        record.compile_seconds, record.compilations = warmup.compile_seconds, warmup.compilations
        record.recompilations = warmup.second_compilations + sum(s.compilations for s in entry.samples)
        record.peak_memory, record.cache_bytes = warmup.peak_memory, warmup.cache_bytes
        record.cold_first_token, record.memory_added = warmup.first_token, warmup.memory_added
    record.weight_bytes = weight_bytes(method.model)
    if method.bits is not None:
        record.weight_bytes = int(record.weight_bytes * method.bits / 8 / method.model.dtype.itemsize)
    if bandwidth and record.step_ms is not None:
        seconds = (record.step_ms.core or record.step_ms.total) / 1e3
        record.bandwidth_fraction = record.weight_bytes / seconds / bandwidth if seconds > 0 else None
    return record
