"""``decoders bench capacity`` compares step times in caches of two sizes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from decoders_lab import capacity
from decoders_lab.capacity import check_capacity
from typer.testing import CliRunner

from decoders.cli import app
from decoders.report import Report, Timings


def test_capacity_check_compares_every_capacity_with_the_first(methods: list[Any]) -> None:
    ours = methods[1]

    def decode(method: Any, workload: Any, new_tokens: int) -> Any:
        slots = method.arguments["decoders_config"]["slots"]
        return SimpleNamespace(
            report=Report("fake", accepted_lengths=[0, 5], steps=5, timings=Timings(core=0.01 * slots))
        )

    small, large = check_capacity([ours], 1, slots=(256, 512), repeats=3, decode=decode)
    assert (small.slots, small.core_ms.median, small.ratio.median) == (256, pytest.approx(512.0), 1.0)
    assert (large.slots, large.ratio.median) == (512, pytest.approx(2.0))
    assert small.core_ms.count == 3, "the warm-up round does not count"


def test_capacity_check_runs_for_real(methods: list[Any]) -> None:
    rows = check_capacity(methods[1:2], 2, slots=(96, 400), length=16, new_tokens=4, repeats=1)
    assert [(c.slots, c.reason) for c in rows] == [(96, ""), (400, "")]
    assert all(c.core_ms.median > 0 for c in rows)


@pytest.mark.usefixtures("tiny_demo")
def test_the_command_prints_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "SLOTS", (256, 320))
    done = CliRunner().invoke(app, ["bench", "capacity", "--no-compile", "--repeats", "1", "--json", "-"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["capacity"]
    assert {"dtype", "batch", "length", "slots", "core_ms", "ratio", "reason"} == set(rows[0])
    assert [row["reason"] for row in rows] == ["", ""]
