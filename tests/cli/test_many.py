"""``decoders generate --input … --output …``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoders.cli import app
from decoders.errors import DecodersError


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["generate", "demo", "--no-compile", "-n", "6", *arguments])
    if isinstance(result.exception, DecodersError):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_file_of_prompts_is_completed_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"def f{n}(a):", "id": f"p{n}", "max_new_tokens": 3 + n} for n in range(5)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, printed = run("--input", str(prompts), "--output", str(out), "--rows", "2", "--json")
    assert code == 0
    assert json.loads(printed)["completed"] == 5
    whole = out.read_bytes()
    assert [json.loads(line)["id"] for line in whole.splitlines()] == ["p0", "p1", "p2", "p3", "p4"]
    out.write_bytes(whole[: len(whole) // 2])  # killed in the middle of a line
    code, printed = run("--input", str(prompts), "--output", str(out), "--rows", "2", "--json")
    assert code == 0
    assert json.loads(printed)["earlier"] == 2
    again = [json.loads(line) for line in out.read_text().splitlines()]
    # How many steps it took depends on the clock, what was written does not.
    assert [(i["id"], i["text"]) for i in again] == [(i["id"], i["text"]) for i in map(json.loads, whole.splitlines())]


def test_prompts_that_fail_are_written_with_their_error(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b", "max_new_tokens": 100000}\n')
    code, _ = run("--input", str(prompts), "--output", str(out))
    assert code == 1
    items = [json.loads(line) for line in out.read_text().splitlines()]
    assert "text" in items[0]
    assert "ContextLengthError" in items[1]["error"]


@pytest.mark.parametrize(
    "arguments", [["--input", __file__], ["--output", "x"], ["--input", __file__, "--output", "x", "a prompt"]]
)
def test_half_of_the_files_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["generate", "demo", *arguments])
    assert result.exit_code != 0
