"""``decoders generate --input … --output …``."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoders.cli import app
from decoders.cli.many import Task
from decoders.scheduling.outputs import OutputLines


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["generate", "demo", "--no-compile", "-n", "6", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout + result.stderr


def test_a_file_of_prompts_is_completed_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"def f{n}(a):", "id": f"p{n}", "max_new_tokens": 3 + n} for n in range(5)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, printed = run("--input", str(prompts), "--output", str(out), "--rows", "2", "--json")
    assert code == 0
    assert json.loads(printed)["completed"] == 5 and json.loads(printed)["startup_seconds"] > 0
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


def test_what_failed_is_tried_again_and_counted_again(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    files = ["--input", str(prompts), "--output", str(out)]
    prompts.write_text('{"prompt": "a", "max_new_tokens": 100000}\n{"prompt": "b"}\nno JSON\n')
    assert run(*files)[0] == 1
    first = out.read_bytes()
    code, printed = run(*files)
    assert code == 1 and out.read_bytes() == first
    printed = " ".join(printed.split())
    assert "0 of 3 prompts completed, 1 were before, 2 had failed and were tried again, 2 failed" in printed
    prompts.write_text('{"prompt": "a", "max_new_tokens": 2}\n{"prompt": "b"}\n"c"\n')  # mended
    code, printed = run(*files, "--json")
    assert code == 0
    figures = json.loads(printed)
    assert [figures[name] for name in ("completed", "failed", "earlier", "retried")] == [2, 0, 1, 2]
    items = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(i["index"], "text" in i) for i in items] == [(0, True), (1, True), (2, True)]
    assert json.loads(first.splitlines()[1]) == items[1]


def test_every_line_that_is_no_prompt_has_an_error_of_its_own(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"prompt": "a", "id": "\\ud800"}', "no JSON", "[1, 2]", '{"nothing": 1}', '{"messages": "x", "id": 4}',
        '{"prompt": "a", "id": ' + "[" * 500 + "]" * 500 + "}", "[" * 5000, '{"prompt": "\\ud800"}', '"b"',
    ]  # fmt: skip
    prompts.write_text("\r\n\r\n".join(lines))
    code, _ = run("--input", str(prompts), "--output", str(out), "-s", "autoregressive", "--rows", "2")
    assert code == 1
    items = [json.loads(line) for line in out.read_text().splitlines()]
    assert [i["index"] for i in items] == list(range(len(lines)))
    assert items[0]["id"] == "\ud800" and items[4]["id"] == 4
    assert [i["index"] for i in items if "text" in i and i["index"] != 5] == [0, 8]
    assert "in.jsonl, line 3: not valid JSON" in items[1]["error"]


def test_sampling_values_of_a_line_take_the_place_of_the_commands(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {}, {"temperature": 5.0, "seed": 9}, {"top_p": 0.9}, {"temperature": 5.0, "do_sample": False},
        {"temperature": 0, "top_p": 0.5},
    ]  # fmt: skip
    prompts.write_text("".join(json.dumps({"prompt": "x = 1"} | line) + "\n" for line in lines))
    assert run("--input", str(prompts), "--output", str(out), "--seed", "2")[0] == 1
    items = [json.loads(line) for line in out.read_text().splitlines()]
    assert "temperature 0 is greedy: leave out" in items[4]["error"]
    texts = [each["text"] for each in items[:4]]
    assert texts[0] == texts[3] and len(set(texts)) == 3
    for text, options in zip(
        texts, [[], ["--temperature", "5", "--seed", "9"], ["--top-p", "0.9", "--seed", "4"]], strict=False
    ):
        assert json.loads(run("x = 1", "--json", *options)[1])["text"] == text
    prompts.write_text('{"prompt": "x = 1", "temperature": 0}\n')
    assert (
        run(
            "--input", str(prompts), "--output", str(tmp_path / "greedy.jsonl"), "--temperature", "2", "--top-p", "0.9"
        )[0]
        == 0
    )
    assert json.loads((tmp_path / "greedy.jsonl").read_text())["text"] == texts[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "1", "--seed", "3"], "temperature not given, now 1.0, seed not given, now 3"),
        (["--chat"], "chat not given, now True"),
        (["--dtype", "bfloat16"], "dtype auto, now bfloat16"),
        (["-n", "7"], "max_new_tokens 6, now 7"),
        (["--grammar", "json"], "grammar not given, now json"),
    ],
)
def test_a_run_goes_on_with_the_options_of_its_beginning_only(tmp_path: Path, options: list[str], said: str) -> None:
    prompts, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    prompts.write_text("a\nb\n")
    mark = hashlib.sha256(b"a").hexdigest()[:12]
    first = {
        "index": 0,
        "input": mark,
        "options": {"model": "demo", "dtype": "auto", "max_new_tokens": 6},
        "text": "x",
    }
    out.write_text(json.dumps(first) + "\n")
    begun = out.read_bytes()
    code, printed = run("--input", str(prompts), "--output", str(out), *options)
    assert code == 2 and f"({said})" in " ".join(printed.split()) and out.read_bytes() == begun


def test_settings_that_change_the_text_count_as_options_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    files = ["--input", str(prompts), "--output", str(out)]
    prompts.write_text("a\n")
    assert run(*files)[0] == 0
    monkeypatch.setenv("DECODERS_REUSE", "0")
    assert run(*files, "--rows", "3", "-s", "autoregressive", "--as-they-end", "--temperature", "0")[0] == 0
    monkeypatch.setenv("DECODERS_KV_CACHE", "int8")
    code, printed = run(*files)
    assert code == 2 and "kv_cache not given, now int8" in " ".join(printed.split())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_of_prompts_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    pipe, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    code, printed = run("--input", str(pipe), "--output", str(out))
    assert code == 2 and "is not a regular file: prompts are read twice" in printed and not out.exists()


def test_a_file_of_prompts_that_changes_meanwhile_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    prompts.write_text("a\nb\n")
    monkeypatch.setattr(Task, "lines", lambda task: iter([]))
    code, printed = run("--input", str(prompts), "--output", str(out))
    assert code == 2 and "0 of 2 prompts without completion are now completed" in " ".join(printed.split())


@pytest.mark.parametrize("link", [False, True])
def test_prompts_are_not_written_over(tmp_path: Path, link: bool) -> None:
    prompts = tmp_path / "in.txt"
    prompts.write_text("a prompt")
    output = tmp_path / "link.jsonl" if link else prompts
    if link:
        output.symlink_to(prompts)
    code, printed = run("--input", str(prompts), "--output", str(output))
    assert code == 2 and "one file" in printed and prompts.read_text() == "a prompt"


def test_a_disk_that_is_full_ends_the_run_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    prompts.write_text("a\nb\nc\n")
    write = OutputLines.write

    def fails(self: OutputLines, item: dict[str, Any]) -> None:
        if item["index"] == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(OutputLines, "write", fails)
        code, printed = run("--input", str(prompts), "--output", str(out))
    assert code == 1 and "No space left on device" in printed and "It contains 1 completion of this run" in printed
    assert run("--input", str(prompts), "--output", str(out))[0] == 0
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    "arguments", [["--input", __file__], ["--output", "x"], ["--input", __file__, "--output", "x", "a prompt"]]
)
def test_half_of_the_files_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["generate", "demo", *arguments])
    assert result.exit_code != 0
