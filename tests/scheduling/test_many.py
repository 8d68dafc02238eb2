"""Many prompts: in order or as they end, one by one, and again from where a run was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.errors import ContextLengthError, InputError, SettingsError
from decoders.scheduling.lines import input_lines, parsed

from .conftest import text_of, write_alone

EAGER = {"compile": False}


def many(model: PreTrainedModel, prompts: Any, **options: Any) -> list[decoders.Completion]:
    return list(
        decoders.generate_many(model, prompts, **{"rows": 3, "pad_token_id": 0, "decoders_config": EAGER} | options)
    )


def test_completions_come_in_order_and_are_those_of_calls_of_their_own(llama: PreTrainedModel) -> None:
    prompts = [{"prompt": text_of(n, 3 + n), "max_new_tokens": 2 + (7 * n) % 23} for n in range(20)]
    done = many(llama, prompts, strategy="prompt_lookup")
    assert [c.index for c in done] == list(range(20))
    assert [c.tokens for c in done] == [
        write_alone(llama, text_of(n, 3 + n), max_new_tokens=2 + (7 * n) % 23) for n in range(20)
    ]


def test_completions_come_as_they_end_where_order_does_not_matter(llama: PreTrainedModel) -> None:
    prompts = [{"prompt": text_of(n, 5), "max_new_tokens": 60 if n == 0 else 2} for n in range(9)]
    order = [c.index for c in many(llama, prompts, ordered=False)]
    assert sorted(order) == list(range(9)) and order[-1] == 0


def test_prompts_are_taken_as_there_is_room_for_them(llama: PreTrainedModel) -> None:
    taken = []

    def prompts() -> Iterator[list[int]]:
        for n in range(500):
            taken.append(n)
            yield text_of(n, 3)

    completions = decoders.generate_many(
        llama, prompts(), rows=2, max_new_tokens=2, pad_token_id=0, decoders_config=EAGER
    )
    assert [next(completions).index for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(taken) < 50
    completions.close()  # type: ignore[attr-defined]


def test_errors_are_raised_or_kept(llama: PreTrainedModel) -> None:
    prompts = [text_of(0, 4), text_of(1, 9000), text_of(2, 4)]
    with pytest.raises(ContextLengthError):
        many(llama, prompts, max_new_tokens=3)
    done = many(llama, prompts, max_new_tokens=3, errors="keep")
    assert [type(c.error) for c in done] == [type(None), ContextLengthError, type(None)]
    with pytest.raises(SettingsError, match="errors must be"):
        many(llama, prompts, errors="hide")
    with pytest.raises(SettingsError, match="rows must be a whole number"):
        many(llama, prompts, rows=None)
    with pytest.raises(InputError, match="needs the key 'prompt', and has .*'text'"):
        many(llama, [{"text": "abc"}], max_new_tokens=3)


@pytest.mark.parametrize("prompts", ["abc", b"abc", {"prompt": "abc"}])
def test_a_single_prompt_is_no_list_of_them(llama: PreTrainedModel, prompts: Any) -> None:
    with pytest.raises(InputError, match=r"not a (str|bytes|dict): put a single prompt into a list"):
        decoders.generate_many(llama, prompts)


@pytest.mark.parametrize("errors", ["raise", "keep"])
@pytest.mark.parametrize("ordered", [True, False])
def test_prompts_that_were_taken_are_completed_before_the_error_of_the_next(
    llama: PreTrainedModel, errors: str, ordered: bool
) -> None:
    def prompts() -> Iterator[list[int]]:
        yield from (text_of(n, 4) for n in range(2))
        raise LookupError("no more prompts")

    options: Any = {
        "errors": errors,
        "ordered": ordered,
        "max_new_tokens": 3,
        "pad_token_id": 0,
        "decoders_config": EAGER,
    }
    completions = decoders.generate_many(llama, prompts(), **options)
    done = [next(completions).index for _ in range(2)]
    with pytest.raises(LookupError, match="no more prompts"):
        next(completions)
    assert sorted(done) == [0, 1]


@pytest.mark.slow  # .ci/run runs it
def test_an_interpreter_that_ends_closes_what_was_half_read() -> None:
    code = """
import decoders
from decoders.testing import tiny_model
prompts = ([n % 50] for n in range(1000))
half = decoders.generate_many(tiny_model("llama"), prompts, max_new_tokens=9, pad_token_id=0, decoders_config={"compile": False})
next(half)
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 3 and "Traceback" not in ended.stderr, ended.stderr


def test_text_prompts_give_text(llama: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    (done,) = many(llama, ["abc"], max_new_tokens=5)
    assert done.text == letters.decode(done.tokens, skip_special_tokens=True)


def test_an_exception_among_the_prompts_is_the_error_of_its_place(llama: PreTrainedModel) -> None:
    prompts = [text_of(0, 4), ValueError("no prompt"), text_of(2, 4)]
    done = many(llama, prompts, max_new_tokens=3, errors="keep")
    assert [type(c.error) for c in done] == [type(None), ValueError, type(None)]
    with pytest.raises(ValueError, match="no prompt"):
        many(llama, prompts, max_new_tokens=3)


def test_lines_are_prompts_messages_or_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"prompt": "a"}\n\n"b"\n{"text": "c", "max_new_tokens": 3}\n{"nothing": 1}\n[\n{"prompt": NaN}\n"\\ud800"\n'
        + "[" * 99999
    )
    lines = list(input_lines(path))
    assert [parsed(line) for line in lines[:3]] == [
        {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "max_new_tokens": 3},
    ]  # fmt: skip
    for line, words in zip(
        lines[3:],
        ["write", "not valid JSON", "not valid JSON: NaN", "the prompt holds half", "nested too deeply"],
        strict=True,
    ):
        with pytest.raises(SettingsError, match=f"line {line.number + 2}: {words}"):
            parsed(line)
    with pytest.raises(SettingsError, match="cannot be read"):
        list(input_lines(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize("keys", [("prompt", "messages"), ("text", "messages"), ("prompt", "text")])
def test_a_line_has_one_prompt(tmp_path: Path, keys: tuple[str, str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(dict.fromkeys(keys, "a")))
    (line,) = input_lines(path)
    with pytest.raises(SettingsError, match=f"line 1: {keys[0]} and {keys[1]} are given, .* give one of them"):
        parsed(line)


@pytest.mark.parametrize("name", ["in.JSONL", "in.Json", "in.ndjson", "in.TXT"])
def test_the_end_of_the_name_in_any_case_tells_what_lines_are(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('"a"')
    (line,) = input_lines(path)
    assert parsed(line)["prompt"] == ('"a"' if name == "in.TXT" else "a")


@pytest.mark.parametrize("name", ["in", "in.json1", "in.csv"])
def test_a_name_that_does_not_tell_what_lines_are_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('"a"')
    with pytest.raises(SettingsError, match=r"ends in \.jsonl or \.ndjson or \.json .* or in \.txt"):
        list(input_lines(tmp_path / name))


def test_plain_lines_keep_their_blanks_and_lose_their_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("\N{BOM}    return x \r\n \n\tα\n\xff\nlast".encode().replace(b"\xc3\xbf", b"\xff"))
    lines = list(input_lines(path))
    assert [parsed(line)["prompt"] for line in [*lines[:2], lines[3]]] == ["    return x ", "\tα", "last"]
    with pytest.raises(SettingsError, match="line 4: not UTF-8"):
        parsed(lines[2])
    assert len({line.mark for line in lines}) == 4
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf {"prompt": "a"} \r\n')
    assert [parsed(line) for line in input_lines(path)] == [{"prompt": "a"}]


@pytest.mark.parametrize("content", [b"def f(a):\n", b"[\n  {}\n]", b"[1, 2]\n", b"\xff\xfea\0", b"5\n"])
def test_a_first_line_that_is_no_prompt_shows_that_the_file_is_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="line 1: "):
        list(input_lines(path))
