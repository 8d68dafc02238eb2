"""Figures of one method on one kind of prompt, computed from its samples (timed calls)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Self

import torch

from .measurement import Check, Competitor, Measurement
from .repetition import in_loops

#: The parts of a step, in order, as in :class:`~decoders.report.Timings`. `core` is the target's forward pass, verify and commit.
PARTS = ("propose", "mask", "core", "observe", "host")


@dataclass(frozen=True)
class Spread:
    """Median and range of a figure over the repeats.

    Attributes:
        median: the median of all repeats.
        low: the smallest value.
        high: the largest value.
        count: number of repeats.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """The spread of `values`; None if `values` is empty."""
        return cls(median(values), min(values), max(values), len(values)) if values else None


@dataclass(frozen=True)
class StepTimes:
    """Median milliseconds of a step and of its :data:`PARTS`, prefill excluded. Only the `total` is known for transformers."""

    total: float
    propose: float | None = None
    mask: float | None = None
    core: float | None = None
    observe: float | None = None
    host: float | None = None


def accepted_length(samples: Sequence[Measurement], checks: Sequence[Check]) -> float | None:
    """Mean tokens per row and step, over the timed calls if they report acceptance, else over the untimed calls; None without steps."""
    if lengths := [s.accepted_lengths for s in samples if s.accepted_lengths]:
        tokens = sum((n + 1) * count for histogram in lengths for n, count in enumerate(histogram))
        return tokens / sum(map(sum, lengths))
    steps = sum(check.steps for check in checks)
    return sum(check.accepted_length * check.steps for check in checks) / steps if steps else None


def passes_per_step(checks: Sequence[Check]) -> float | None:
    """Forward passes of draft models per step of the target: the median over the untimed calls; None without draft models."""
    passes = [check.draft_passes / check.steps for check in checks if check.draft_passes is not None and check.steps]
    return median(passes) if passes else None


def looping(rows: Sequence[Sequence[int]]) -> float | None:
    """The share of all rows' tokens in repetition loops (:func:`in_loops`); None if there are no tokens."""
    count = sum(map(len, rows))
    return sum(int(in_loops(torch.tensor(row)).sum()) for row in rows if row) / count if count else None


def per_repeat(samples: Sequence[Measurement]) -> dict[int, float]:
    """Maps the number of each repeat to its tokens per second over all prompts."""
    ordered = sorted(samples, key=lambda s: s.repeat)
    speeds = {}
    for repeat, group in groupby(ordered, key=lambda s: s.repeat):
        members = list(group)
        seconds = sum(s.seconds for s in members)
        if seconds > 0:
            speeds[repeat] = sum(s.new_tokens for s in members) / seconds
    return speeds


def ratio(samples: Sequence[Measurement], baseline: Sequence[Measurement]) -> Spread | None:
    """Tokens per second divided by the baseline's in the same repeat: the spread over the repeats; None if the two share no repeat."""
    speeds, others = per_repeat(samples), per_repeat(baseline)
    return Spread.of([speeds[repeat] / others[repeat] for repeat in speeds if repeat in others])


def first_tokens(samples: Sequence[Measurement]) -> Spread | None:
    by_repeat: dict[int, list[float]] = {}
    for s in samples:
        if s.first_token is not None:
            by_repeat.setdefault(s.repeat, []).append(s.first_token)
    return Spread.of([sum(values) / len(values) for values in by_repeat.values()])


def parts_of_a_step(sample: Measurement) -> dict[str, float]:
    """Mean milliseconds of each part of a step in a call. The call must have more steps than `prefill_steps`."""
    assert sample.steps is not None
    counts = dict.fromkeys(PARTS, sample.steps) | {"core": sample.steps - sample.prefill_steps}
    return {part: getattr(sample, part) / counts[part] * 1e3 for part in PARTS}


def step_times(samples: Sequence[Measurement], steps: dict[str, int]) -> StepTimes | None:
    """Median step times over the calls; None if no step was timed. transformers does not time its steps: the time after the first token
    is divided by the number of steps after the first. steps: the number of steps by workload.
    """
    parts_of_calls = [parts_of_a_step(s) for s in samples if s.steps and s.steps > s.prefill_steps]
    if parts_of_calls:
        medians = {part: median([parts[part] for parts in parts_of_calls]) for part in PARTS}
        return StepTimes(median([sum(parts.values()) for parts in parts_of_calls]), **medians)
    totals = [
        (s.seconds - s.first_token) / (steps[s.workload] - 1) * 1e3
        for s in samples
        if s.first_token is not None and steps[s.workload] > 1
    ]
    return StepTimes(median(totals)) if totals else None


def difference(entry: Competitor, baseline: Competitor, workload: str) -> str:
    """Describes the first place where the new tokens differ from the baseline's; "" if they are equal."""
    tokens, expected = entry.checks[workload].tokens, baseline.checks[workload].tokens
    for row, (row_tokens, row_expected) in enumerate(zip(tokens, expected, strict=True)):
        if row_tokens != row_expected:
            position = next(
                (i for i, (x, y) in enumerate(zip(row_tokens, row_expected, strict=False)) if x != y),
                min(len(row_tokens), len(row_expected)),
            )
            return f"{workload}, row {row}, new token {position}"
    return ""
