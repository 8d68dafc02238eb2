"""A fresh process is measured from its start to a chat's second turn; a process that fails says what happened."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from decoders_lab import fresh
from decoders_lab.fresh import Job, measure
from decoders_lab.fresh_tables import fresh_tables
from rich.console import Console
from typer.testing import CliRunner

from decoders.bench.shapes import SHAPES
from decoders.cli import app

SMALL = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=128, max_position_embeddings=256, tie_word_embeddings=True)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    return "small"


def job(**values: Any) -> Job:
    common = dict(subject="small", strategy="autoregressive", config={"compile": False}, prompt_lengths=(8, 24, 999))
    return Job(**common | dict(new_tokens=6, repeats=1, history=40, question=5, patience=0) | values)


def test_a_job_measures_calls_memory_prefill_and_a_second_turn(small: str) -> None:
    steps: list[str] = []
    found = measure(job(), steps.append)
    assert "error" not in found, found
    assert [call["call"] for call in found["calls"]] == [
        "greedy", "greedy again", "sampled", "sampled again", "two rows"
    ]  # fmt: skip
    assert all(call["steps"] == 6 and call["compiled_share"] == 0 for call in found["calls"])
    assert all(0 < call["first_token"] < call["seconds"] for call in found["calls"])
    assert [mark["after"] for mark in found["memory"]][:2] == ["loading", "greedy call"]
    assert found["weights"] == 4 * found["parameters"]
    assert {(row["sampling"], row["method"]) for row in found["decoding"]} == {
        (s, w) for s in ("greedy", "sampled") for w in ("transformers", "autoregressive, uncompiled")
    }
    assert [row["prompt_tokens"] for row in found["prefill"]] == [8, 24], "longer ones do not fit the model"
    assert found["chat"]["history"] == 40
    assert found["chat"]["ratio"] > 0
    assert found["chat"]["reused"] == [40 + fresh.TURN - 1], "the question alone is read, and the last token before it"
    assert steps[0] == "load" and steps[-1] == "second turn after 40 tokens"


def test_transformers_process_makes_the_calls_only(small: str) -> None:
    found = measure(job(strategy=""))
    assert "error" not in found, found
    assert len(found["calls"]) == 5
    assert "decoding" not in found and "steps" not in found["calls"][0]


def test_what_fails_leaves_what_was_measured(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory\nlong story")

    monkeypatch.setattr(fresh._Fresh, "_prefill", broken)
    found = measure(job())
    assert found["error"] == "RuntimeError: out of memory"
    assert len(found["calls"]) == 5 and "chat" not in found


def test_tables_name_subject_dtype_way_and_length(small: str) -> None:
    runs = [
        {"subject": "small", "shape": True, "dtype": "float32", "method": way, **measure(job(strategy=strategy))}
        for way, strategy in (("transformers", ""), ("autoregressive", "autoregressive"))
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    for table in fresh_tables([*runs, {**runs[0], "method": "broken", "error": "RuntimeError: no"}]):
        console.print(table)
    text = console.export_text()
    for said in ("small · float32", "greedy again", "24 tokens", "two rows", "means nothing", "second turn of a chat",
                 "broken: RuntimeError: no", "of the weights"):  # fmt: skip
        assert said in text, said


def test_a_process_that_dies_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "MODULE", "no_such_module")
    assert "no_such_module" in fresh.in_new_process(job())["error"]


def test_a_process_reads_a_job_and_writes_figures_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def noisy(given: Job, progress: Any) -> dict[str, Any]:
        os.write(sys.stdout.fileno(), b"what a library prints\n")
        progress("load")
        return {"subject": given.subject, "lengths": given.prompt_lengths}

    monkeypatch.setattr(fresh, "measure", noisy)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(job()))))
    with (tmp_path / "out").open("w") as out, (tmp_path / "errors").open("w") as errors:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", errors)
        fresh.main()
        monkeypatch.undo()
    assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == [
        {"progress": "load"}, {"result": {"subject": "small", "lengths": [8, 24, 999]}}
    ]  # fmt: skip
    assert (tmp_path / "errors").read_text() == "what a library prints\n"


def test_what_a_process_says_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(
        """if __name__ == "__main__":
    import json, os, sys
    given = json.load(sys.stdin)
    for message in ({"progress": "load"}, {"result": {"job": given["subject"], "cache": os.environ["TORCHINDUCTOR_CACHE_DIR"]}}):
        print(json.dumps(message))
"""
    )
    monkeypatch.setattr(fresh, "MODULE", "says")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    said: list[str] = []
    found = fresh.in_new_process(job(), tmp_path / "cache", said.append)
    assert found == {"job": "small", "cache": str(tmp_path / "cache")} and said == ["load"]


@pytest.mark.parametrize(
    "anew", [pytest.param(True, marks=pytest.mark.slow), False], ids=["new process", "this process"]
)
def test_the_command_measures_in_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    from decoders.testing import tiny_model

    if not anew:  # a new process imports torch and transformers for ten seconds
        patched = lambda job, cache, progress: measure(job, progress) | {"imported": 1.0}  # noqa: E731
        monkeypatch.setattr(fresh, "in_new_process", patched)
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    done = CliRunner().invoke(
        app,
        ["bench", "fresh", "--model", str(tmp_path / "tiny"), "--set", "compile=false", "--prompt-length", "8", "-n", "4",
         "--repeats", "1", "--history", "0", "--patience", "0", "--threads", "1", "--no-baseline", "--json", "-"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (process,) = json.loads(done.stdout)["processes"]
    assert process["imported"] > 0 and len(process["calls"]) == 5
    assert process["config"] == {"compile": False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name what to measure"),
        (("--shape", "llama-110"), "Did you mean 'llama-110m'"),
        (("--shape", "llama-110m", "--dtype", "float31"), "Did you mean 'float32'"),
        (("--shape", "llama-110m", "--prompt-length", "0"), "tokens such as 64,2000"),
        (("--shape", "llama-110m", "--set", "compil=1"), "Did you mean 'compile'"),
        (("--shape", "llama-110m", "-s", "speculative"), "needs a draft model"),
    ],
)
def test_mistakes_end_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "fresh", *arguments])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
