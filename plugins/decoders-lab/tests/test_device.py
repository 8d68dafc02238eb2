"""``decoders bench device`` says what a device reaches, in one table."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders_lab import device as device_bench
from decoders_lab.commands.device import device_table
from decoders_lab.device import DeviceBench, Exactness, Figure, exactness, plain_decoding
from transformers import PreTrainedModel
from typer.testing import CliRunner

from decoders.bench.shapes import random_workloads
from decoders.cli import app
from decoders.cli.console import plain_console

SMALL = ("--device", "cpu", "--no-compile", "--nodes", "4", "-n", "16", "--repeats", "1")


@pytest.fixture
def few_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the strategies to plain decoding and four others: exact, needing a draft model, needing a grammar, lacking heads."""
    ours = device_bench.strategy_methods
    names = ["autoregressive", "prompt_lookup", "speculative", "grammar", "mtp"]
    monkeypatch.setattr(device_bench, "strategy_methods", lambda model, n, *a, **k: ours(model, n or names, *a, **k))


@pytest.mark.usefixtures("tiny_demo", "few_strategies")
def test_one_table_says_what_the_device_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["bench", "device", *SMALL, "--prompt-length", "8,600", "--json", "-"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert set(result) == {"machine", "run", "figures", "strategies"}
    assert result["machine"]["device"] == "cpu" and result["machine"]["copy_bandwidth"] > 0
    figures = {figure["name"]: figure for figure in result["figures"]}
    assert list(figures) == [
        "copy", "weights, 0.00 GB at copy speed", "first call, prompt of 8", "first token, prompt of 8",
        "first token, prompt of 600", "plain decoding, a token", "4 nodes, a step", "sampled, a token",
    ]  # fmt: skip
    assert set(figures["copy"]) == {"name", "value", "unit", "ratio", "to", "reason"}
    late = figures.pop("first token, prompt of 600")
    assert late["value"] is None and "512" in late["reason"]  # the model has 512 positions
    assert all(figure["value"] and figure["value"] > 0 for figure in figures.values()), done.stderr
    assert figures["4 nodes, a step"]["to"] == "one node" and figures["4 nodes, a step"]["ratio"] > 0
    strategies = {entry["strategy"]: entry for entry in result["strategies"]}
    assert strategies["prompt_lookup"] == {"strategy": "prompt_lookup", "identical": True, "reason": ""}
    assert strategies["speculative"]["identical"] is True
    assert strategies["grammar"]["identical"] is None and "needs a grammar" in strategies["grammar"]["reason"]
    shown = done.stderr.splitlines()
    assert "first token, prompt of 8: " in done.stderr  # shown as soon as it was measured
    shown = shown[next(number for number, line in enumerate(shown) if "demo · float32" in line) :]
    assert max(map(len, shown)) <= 80
    assert any("exact" in line and "2 of 2" in line for line in shown)
    assert any("mtp: " in line for line in shown)


def test_a_figure_that_fails_does_not_take_the_others_with_it(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, calls = device_bench.decode, itertools.count()

    def fails(method: Any, *given: Any) -> Any:
        if method.name == "4 nodes" or not next(calls):
            raise torch.cuda.OutOfMemoryError("no room for anything")
        return ours(method, *given)

    monkeypatch.setattr(device_bench, "decode", fails)
    bench = DeviceBench(plain_decoding(model, False), [4, 8], [8], new_tokens=16, repeats=1)
    figures = {figure.name: figure for figure in bench.figures()}
    failed = [name for name, figure in figures.items() if figure.value is None]
    assert failed == ["first call, prompt of 8", "4 nodes, a step"] and len(figures) == 8
    assert figures["4 nodes, a step"].reason == "OutOfMemoryError: no room for anything"
    assert figures["8 nodes, a step"].ratio


@pytest.mark.usefixtures("tiny_demo", "few_strategies")
def test_a_run_that_is_ended_leaves_what_it_has_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run is ended by SIGTERM or Ctrl-C. A strategy that fails, for whatever reason, is one line of the table."""
    written, file = device_bench._tokens, tmp_path / "device.json"

    def tokens(method: Any, *given: Any) -> Any:
        if method.name == "prompt_lookup":
            raise RuntimeError("CUDA error: misaligned address")
        if method.name == "speculative":
            assert len(json.loads(file.read_text())["strategies"]) == 1
            raise KeyboardInterrupt
        return written(method, *given)

    monkeypatch.setattr(device_bench, "_tokens", tokens)
    done = CliRunner().invoke(app, ["bench", "device", *SMALL, "--prompt-length", "8", "--json", str(file)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert len(result["figures"]) == 7 and result["machine"]["copy_bandwidth"] > 0
    assert result["strategies"] == [
        {"strategy": "prompt_lookup", "identical": None, "reason": "RuntimeError: CUDA error: misaligned address"}
    ]
    assert "0 of 0" in done.output


def test_it_starts_where_the_project_is_on_the_path_and_nothing_is_installed() -> None:
    script = (
        "import runpy, sys; from importlib import metadata; metadata.entry_points = lambda **options: metadata.EntryPoints();"
        "sys.argv = ['decoders', 'bench', 'device', '--help']; runpy.run_module('decoders_lab', run_name='__main__')"
    )
    source = Path(device_bench.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "copy speed, plain decoding" in done.stdout, done.stderr[-2000:]


def test_sizes_that_come_late_are_left_out_and_plain_decoding_never_is(model: PreTrainedModel) -> None:
    bench = DeviceBench(plain_decoding(model, False), [1, 4], [8], new_tokens=16, repeats=1, seconds=0)
    figures = {figure.name: figure for figure in bench.figures()}
    assert figures["plain decoding, a token"].value
    assert figures["4 nodes, a step"].value is None and "not begun within 0 s" in figures["4 nodes, a step"].reason


def test_a_text_that_differs_is_found_and_named(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = device_bench.strategy_methods

    def wrong(model: PreTrainedModel, names: Any = None, *rest: Any, **more: Any) -> Any:
        if names is not None:
            return ours(model, names, *rest, **more)
        method = ours(model, ["prompt_lookup"], *rest, **more)[0]
        return [replace(method, arguments={**method.arguments, "repetition_penalty": 5.0})]

    monkeypatch.setattr(device_bench, "strategy_methods", wrong)
    text = random_workloads(128, [12], rows=2)[0]
    assert list(exactness(model, None, text, 16, lambda what: None)) == [
        Exactness("prompt_lookup", False, "greedy and sampled text differs")
    ]


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    figures = [
        Figure("copy", 4200.4, "GB/s"), Figure("weights, 16.06 GB at copy speed", 3.824, "ms"),
        Figure("first token, prompt of 2,048", None, "ms", reason="the model has positions for 2,048 tokens only"),
        Figure("plain decoding, a token", 4.81, "ms", 0.795, "copy speed"), Figure("128 nodes, a step", 6.0, "ms", 1.25, "one node"),
    ]  # fmt: skip
    strategies = [
        Exactness("lookahead", True),
        Exactness("medusa", False, "sampled text differs"),
        Exactness("mtp", None, "no heads"),
    ]
    plain_console().print(device_table(figures, strategies, "llama-8b · bfloat16 · NVIDIA H200"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line] == [
        "llama-8b · bfloat16 · NVIDIA H200",
        "  copy                              4,200 GB/s",
        "  weights, 16.06 GB at copy speed      3.82 ms",
        "  first token, prompt of 2,048               –   the model has positions for",
        "                                                 2,048 tokens only",
        "  plain decoding, a token              4.81 ms   80% of copy speed",
        "  128 nodes, a step                    6.00 ms   1.25 x one node",
        "  exact                                 1 of 2   greedy and sampled",
        "medusa: sampled text differs",
        "mtp: no heads",
    ]
