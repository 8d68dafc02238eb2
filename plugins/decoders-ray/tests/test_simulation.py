"""The simulation, compared with results that are computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoders_ray.cli import app
from decoders_ray.simulation import Load, Replica, replicas_for, simulate, sustainable
from typer.testing import CliRunner

from decoders.costs import CostCurve, CostPoint, Subject

ALIKE = Load(prompt=64, new=50, spread=0.0)


def flat(nodes: int, rows: int, context: int) -> float:
    return 0.01


def test_a_replica_that_never_waits_serves_what_comes() -> None:
    outcome = simulate(Replica(flat, overhead=0.0), ALIKE, rate=0.2, requests=300)
    # A request takes one pass for its prompt, then a step per token.
    assert outcome.first[0] == pytest.approx(0.02)
    assert outcome.each[0] == pytest.approx(0.01, rel=0.1)
    assert outcome.busy == pytest.approx(0.2 * 51 * 0.01, rel=0.2)


def test_throughput_comes_to_the_rows_full() -> None:
    outcome = simulate(Replica(flat, rows=8, overhead=0.0), ALIKE, rate=1000, requests=800)
    # 8 requests take 50 steps that they share, and one pass each for their prompts.
    assert outcome.tokens_per_second == pytest.approx(8 * 50 / 0.58, rel=0.05)
    assert outcome.busy == pytest.approx(1.0, abs=0.01)


def test_accepted_tokens_save_steps() -> None:
    plain = simulate(Replica(flat, overhead=0.0), ALIKE, rate=1000, requests=800)
    drafted = simulate(Replica(flat, accepted=2.5, overhead=0.0), ALIKE, rate=1000, requests=800)
    assert drafted.tokens_per_second == pytest.approx(plain.tokens_per_second * 0.58 / 0.28, rel=0.1)


def test_prompts_that_were_read_before_cost_less() -> None:
    long = Load(prompt=640, new=50, spread=0.0)
    slow, fast = (simulate(Replica(flat, shared=share, overhead=0.0), long, 1000, 400) for share in (0.0, 0.9))
    assert fast.tokens_per_second > 1.8 * slow.tokens_per_second


def test_the_sustainable_rate_is_just_below_where_waiting_grows() -> None:
    replica = Replica(flat, overhead=0.0)
    rate, outcome = sustainable(replica, ALIKE, first=1.0, requests=800)
    assert outcome.first[1] <= 1.0 < simulate(replica, ALIKE, 1.3 * rate, 800).first[1]
    with pytest.raises(ValueError, match="a request by itself takes"):
        sustainable(replica, ALIKE, first=0.005, requests=200)


def test_replicas_grow_with_the_load() -> None:
    assert [replicas_for(rate, 2.0, 0.5) for rate in (0.1, 1.0, 1.1, 100.0)] == [1, 1, 2, 100]


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    subject = Subject(
        model="Tiny", dtype="float32", quantization="", device="a CPU", threads=2, attention="sdpa", torch="2"
    )
    points = [
        CostPoint(rows=1, context=context, nodes=nodes, compiled=False, seconds=0.01 + 0.0001 * nodes)
        for nodes in (1, 8, 64)
        for context in (64, 512)
    ]
    path = tmp_path / "tiny.costs.json"
    path.write_text(CostCurve(subject=subject, points=tuple(points)).model_dump_json())
    arguments = ["simulate", "--curve", str(path), "--requests", "200", "--rates", "1000,1000000", "--price", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "| 1,000,000.0 |" in result.output
    figures = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    few, many = (load["replicas"] for load in figures["loads"])
    assert many == pytest.approx(1000 * few, rel=0.5) and figures["replica"]["tokens_per_second"] > 0
    assert CliRunner().invoke(app, [*arguments, "--first", "0.0001"]).exit_code == 2
