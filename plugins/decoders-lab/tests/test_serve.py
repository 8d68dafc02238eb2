"""``decoders bench serve`` asks for the same texts with and without a server."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from decoders.cli import app


@pytest.mark.usefixtures("tiny_demo")
def test_every_route_is_asked_both_ways() -> None:
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    options = ["demo", "--requests", "2", "-n", "2", "--prompt", "abc", "--dtype", "float32", "--json", "-"]
    done = CliRunner().invoke(app, ["bench", "serve", *options])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert [result["method"] for result in results] == ["completions", "completions, streamed"]
    assert all(result["scheduler"] > 0 and result["server"] > 0 for result in results)
