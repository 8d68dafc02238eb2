"""What a bench is doing can be read from the start, on a terminal and in a log."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoders import bench
from decoders.bench import machine
from decoders.cli import app, bench_run, benches
from decoders.cli.benches import progress_bar
from decoders.cli.console import plain_console, waiting
from decoders.errors import SettingsError
from decoders.testing import tiny_model

SHORT = ("bench", "-s", "autoregressive", "--prompts", "all", "--limit", "1", "--no-compile", "-n", "2")


def test_every_stage_before_the_first_table_is_announced_as_it_begins(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    """A stage that is slow leaves its own line as the last one, whoever reads a log."""
    shown: dict[str, str] = {}

    def last_line(stage: str) -> None:
        stream: Any = sys.stderr
        stream.flush()
        shown[stage] = stream.buffer.getvalue().decode().splitlines()[-1]

    def load(*_: Any) -> Any:
        last_line("load")
        return tiny_model("llama"), tokenizer, None

    def copy_bandwidth(*_: Any) -> float:
        last_line("copy")
        return 1e9

    def warm_up(*_: Any, progress: Any, **__: Any) -> Any:
        progress("transformers · compile, warm up")
        last_line("warm up")
        raise SettingsError("enough")

    monkeypatch.setattr(bench_run.Subjects, "load", load)
    monkeypatch.setattr(machine, "copy_bandwidth", copy_bandwidth)
    monkeypatch.setattr(bench, "measure", warm_up)
    arguments = ("-s", "autoregressive", "--baseline", "transformers", "--prompt-length", "8", "--repeats", "1")
    done = CliRunner().invoke(app, ["bench", *arguments, "--dtype", "bfloat16"])
    assert done.exit_code == 2 and done.stderr.startswith("importing torch")
    assert shown == {
        "load": "loading demo in bfloat16", "copy": "measuring the memory's bandwidth",
        "warm up": "1/10 transformers · compile, warm up",
    }  # fmt: skip


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 1.0, 4.9, 5.0, 5.1])
    monkeypatch.setattr(benches.time, "monotonic", lambda: next(moments))
    with progress_bar(plain_console(stderr=True), 5) as advance:
        for name in "abcde":
            advance(name)
    assert capsys.readouterr().err.splitlines() == ["1/5 a", "4/5 d · 3 s left"]


def test_a_long_call_has_its_line_even_if_it_began_right_after_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "SECONDS_A_LINE", 0.05)
    with progress_bar(plain_console(stderr=True), 3) as advance:
        advance("a", 3.0)
        advance("b", 2.0)
        time.sleep(0.5)
        advance("c", 1.0)
    assert capsys.readouterr().err.splitlines() == ["1/3 a · 3 s left", "2/3 b · 2 s left", "3/3 c · 1 s left"]


def test_waiting_goes_to_the_log_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting(plain_console(stderr=True), "loading my[model]") as status:
        status.update("converting my[model]")
    assert capsys.readouterr().err.splitlines() == ["loading my[model]", "converting my[model]"]


def test_nothing_is_mixed_into_results(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting(plain_console(), "loading"):
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("tiny_demo")
def test_json_is_written_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in its second prompt, by something that no handler sees."""
    path, seen, calls = tmp_path / "out.json", list[dict[str, Any]](), 0
    real = bench_run.bench.summarise

    def stopped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        seen.append(json.loads(path.read_text()))
        if (calls := calls + 1) == 3:
            raise SystemExit(9)
        return real(*arguments, **options)

    monkeypatch.setattr(bench_run.bench, "summarise", stopped)
    arguments = [
        "bench",
        "-s",
        "autoregressive",
        "--prompts",
        "all",
        "--limit",
        "1",
        "--no-compile",
        "-n",
        "2",
        "--repeats",
        "1",
        "--json",
    ]
    assert CliRunner().invoke(app, [*arguments, str(path)]).exit_code == 9
    assert [len(each["records"]) for each in seen] == [0, 2, 4] and not any(each["complete"] for each in seen)
    left = json.loads(path.read_text())
    assert {record["method"] for record in left["records"]} == {"transformers", "autoregressive"}, (
        "nobody asked for others"
    )
    assert len({record["kind"] for record in left["records"]}) == 2 and left["machine"]["cpu"]


@pytest.mark.usefixtures("tiny_demo")
def test_seconds_bound_a_run_and_its_figures_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = [
        "bench",
        "-s",
        "autoregressive",
        "--prompts",
        "all",
        "--limit",
        "1",
        "--no-compile",
        "-n",
        "2",
        "--seconds",
        "0",
        "--json",
    ]
    done = CliRunner().invoke(app, [*arguments, str(path)])
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert result["complete"] and result["run"]["seconds"] == 0
    assert [len(record["samples"]) for record in result["records"]] == [1, 1], "a prompt is measured in any case"
