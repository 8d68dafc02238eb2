"""Estimates the remaining time of a bench run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from .workloads import Workload


class Competitor(Protocol):
    """The attributes of a measured method that the estimate reads."""

    @property
    def status(self) -> str:
        """ "ok" while it is measured."""

    @property
    def warmup(self) -> Any:
        """The times of the method's first two calls (:class:`~decoders.bench.measurement.WarmupCost`); None before these calls."""


#: Assumed share of a call's time until its first token, used until a call has been timed.
FIRST_TOKEN = 0.25


def expected(
    warmed: Sequence[Competitor], taken: Mapping[bool, Sequence[float]], coming: Sequence[bool], texts: float
) -> float:
    """Expected remaining seconds of a run, compiling included. A method without a warm-up so far is assumed to take as long as the
    finished methods of its kind (ours, or transformers'). Infinite if no method of its kind has finished.

    Args:
        taken: durations of the warm-ups so far, by whether the method is ours.
        coming: whether each method without a warm-up so far is ours.
        texts: number of texts that each method writes after its warm-up.
    """
    if not all(ours in taken for ours in coming):
        return math.inf
    calls = [entry.warmup.second_call for entry in warmed if entry.warmup is not None]
    warm_ups = sum(sum(taken[ours]) / len(taken[ours]) for ours in coming)
    return warm_ups + texts * sum(calls) * (1 + len(coming) / max(len(calls), 1))


class Pace:
    """Estimates the remaining time of a run. For each prompt, a method is assumed to need as long as in the round before.

    Args:
        sample: assumed ratio of a timed call's seconds to an untimed call's, used until the first timed call.
        checks: whether there are untimed calls.
    """

    def __init__(
        self, entries: Sequence[Competitor], workloads: Sequence[Workload], repeats: int, sample: float, checks: bool
    ) -> None:
        self.entries, self.sample_over_check, self.checked = entries, sample, checks
        self.checks, self.samples = dict[tuple[int, str], float](), dict[tuple[int, str], float]()
        self.rounds = {(id(entry), workload.name): repeats for entry in entries for workload in workloads}

    @contextmanager
    def check(self, entry: Competitor, workload: Workload) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.checks[id(entry), workload.name] = time.perf_counter() - began

    @contextmanager
    def sample(self, entry: Competitor, workload: Workload) -> Iterator[None]:
        key, began = (id(entry), workload.name), time.perf_counter()
        yield
        self.samples[key] = time.perf_counter() - began
        self.rounds[key] -= 1

    def round(self) -> float:
        """Expected seconds of another round."""
        going = {id(entry) for entry in self.entries if entry.status == "ok"}
        return sum(seconds for (entry, _), seconds in self.samples.items() if entry in going)

    def left(self) -> float:
        """Expected seconds until the end."""
        going = {id(entry): entry for entry in self.entries if entry.status == "ok"}
        # Prompts may be longer than the warm-up's prompt, so times of the warm-up are scaled by times of finished calls.
        once = self.checks if self.checked else self.samples
        known = [(once[key], self._warm(going[key[0]])) for key in once if key[0] in going]
        scale = sum(check for check, _ in known) / max(sum(warm for _, warm in known), 1e-9) if known else 1.0
        timed = [(self.samples[key], once[key]) for key in self.samples if key[0] in going]
        if timed:
            self.sample_over_check = sum(s for s, _ in timed) / max(sum(check for _, check in timed), 1e-9)
        total = 0.0
        for key in [key for key in self.rounds if key[0] in going]:
            check = once.get(key, scale * self._warm(going[key[0]]))
            total += (self.checked and key not in self.checks) * check
            total += self.rounds[key] * self.samples.get(key, self.sample_over_check * check)
        return total

    @staticmethod
    def _warm(entry: Competitor) -> float:
        return entry.warmup.second_call if entry.warmup is not None else 0.0
