"""``decoders bench sampling`` measures plans over made-up logits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from decoders.cli import app


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "sampling", *arguments])


def test_every_plan_is_measured_at_every_size() -> None:
    common = ("--vocabulary", "300,1k", "--nodes", "1,3", "--repeats", "1", "--definitions", "1")
    done = run(*common, "--plan", "greedy,top_p", "--json", "-")
    assert done.exit_code == 0, done.output
    times = json.loads(done.stdout)["times"]
    assert {(t["plan"], t["nodes"], t["vocabulary"]) for t in times} == {
        (plan, nodes, size) for plan in ("greedy", "top_p") for nodes in (1, 3) for size in (300, 1000)
    }
    assert all(t["median"] > 0 and t["definition"] > 0 for t in times)
    assert "1,000 tokens" in done.stderr and "by definition" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plan", "topp"), "Did you mean 'top_p'"),
        (("--nodes", "0"), "such as 1,9,33"),
        (("--vocabulary", "9"), "from 300 on"),
    ],
)
def test_mistakes_end_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
