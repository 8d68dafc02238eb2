"""Ratios are left out where steps waited for more than half of their time; from a quarter on there is a warning."""

from __future__ import annotations

import pytest

from decoders.bench.figures import Spread
from decoders.bench.measurement import Measurement
from decoders.bench.records import Record, comparable


@pytest.mark.parametrize(
    ("waits", "said", "kept"),
    [
        ([0.1, 0.9, 0.2], "", True),
        (
            [0.4, 0.9, 0.2],
            "steps waited 40% of their time. That slows transformers more than this loop, so ratios are too high",
            True,
        ),
        ([0.6, 0.7, 0.1], "steps waited 60% of their time", False),
    ],
)
def test_ratios_of_a_busy_machine_are_left_out(waits: list[float], said: str, kept: bool) -> None:
    one = Spread.of([2.0, 3.0])
    samples = [Measurement("a", n, 0, 1.0, 0.0, 0, 8, None, waiting=share) for n, share in enumerate(waits)]
    theirs = Record(method="transformers", dtype="float32", batch=1, kind="code", status="ok", ratio=one)
    ours = Record(
        method="suffix", dtype="float32", batch=1, kind="code", status="ok", ours=True, ratio=one, plain_ratio=one,
        samples=samples,
    )  # fmt: skip
    records, message = comparable([theirs, ours])
    assert said in message and bool(message) == bool(said)
    assert [r.ratio for r in records] == ([one, one] if kept else [None, None])
