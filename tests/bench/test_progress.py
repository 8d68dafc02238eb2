"""What a bench is doing can be read from the start, on a terminal and in a log."""

from __future__ import annotations

import sys
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


def test_waiting_goes_to_the_log_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting(plain_console(stderr=True), "loading my[model]") as status:
        status.update("converting my[model]")
    assert capsys.readouterr().err.splitlines() == ["loading my[model]", "converting my[model]"]


def test_nothing_is_mixed_into_results(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting(plain_console(), "loading"):
        pass
    assert capsys.readouterr().out == ""
