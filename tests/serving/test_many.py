"""Many prompts: in order or as they end, one by one, and again from where a run was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.errors import ContextLengthError, SettingsError
from decoders.serving.lines import OutputLines, input_lines, mark, parsed

EAGER = {"compile": False}


def many(model: PreTrainedModel, prompts: Any, **options: Any) -> list[decoders.Completion]:
    return list(
        decoders.generate_many(model, prompts, **{"rows": 3, "pad_token_id": 0, "decoders_config": EAGER} | options)
    )


def test_completions_come_in_order_and_are_those_of_calls_of_their_own(
    llama: PreTrainedModel, write_alone: Any, text_of: Any
) -> None:
    prompts = [{"prompt": text_of(n, 3 + n), "max_new_tokens": 2 + (7 * n) % 23} for n in range(20)]
    done = many(llama, prompts, strategy="prompt_lookup")
    assert [c.index for c in done] == list(range(20))
    assert [c.tokens for c in done] == [
        write_alone(llama, text_of(n, 3 + n), max_new_tokens=2 + (7 * n) % 23) for n in range(20)
    ]


def test_completions_come_as_they_end_where_order_does_not_matter(llama: PreTrainedModel, text_of: Any) -> None:
    prompts = [{"prompt": text_of(n, 5), "max_new_tokens": 60 if n == 0 else 2} for n in range(9)]
    order = [c.index for c in many(llama, prompts, ordered=False)]
    assert sorted(order) == list(range(9)) and order[-1] == 0


def test_prompts_are_taken_as_there_is_room_for_them(llama: PreTrainedModel, text_of: Any) -> None:
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


def test_errors_are_raised_or_kept(llama: PreTrainedModel, text_of: Any) -> None:
    prompts = [text_of(0, 4), text_of(1, 9000), text_of(2, 4)]
    with pytest.raises(ContextLengthError):
        many(llama, prompts, max_new_tokens=3)
    done = many(llama, prompts, max_new_tokens=3, errors="keep")
    assert [type(c.error) for c in done] == [type(None), ContextLengthError, type(None)]
    with pytest.raises(SettingsError, match="errors must be"):
        many(llama, prompts, errors="hide")


def test_text_prompts_give_text(llama: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    (done,) = many(llama, ["abc"], max_new_tokens=5)
    assert done.text == letters.decode(done.tokens, skip_special_tokens=True)


def test_a_line_that_was_cut_off_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OutputLines(path) as out:
        out.write({"index": 0, "input": mark("a"), "text": "α"})
        out.write({"index": 1, "input": mark("b"), "text": "β"})
    path.write_bytes(path.read_bytes()[:-5])
    with OutputLines(path) as out:
        assert out.check(0, "a") and not out.check(1, "b")
        with pytest.raises(SettingsError, match="another input"):
            out.check(0, "other")
        out.write({"index": 1, "input": mark("b"), "text": "β"})
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["α", "β"]
    (tmp_path / "notes.txt").write_text("mine\n")
    with pytest.raises(SettingsError, match="no completion"):
        OutputLines(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_lines_are_prompts_messages_or_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n\n"b"\n{"text": "c", "max_new_tokens": 3}\n{"nothing": 1}\n[\n')
    lines = list(input_lines(path))
    assert [parsed(path, *line) for line in lines[:3]] == [
        {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "max_new_tokens": 3},
    ]  # fmt: skip
    for line in lines[3:]:
        with pytest.raises(SettingsError, match=f"prompt {line[0] + 1}"):
            parsed(path, *line)
    assert parsed(tmp_path / "in.txt", 0, "any text") == {"prompt": "any text"}
    with pytest.raises(SettingsError, match="cannot be read"):
        list(input_lines(tmp_path / "missing.jsonl"))
