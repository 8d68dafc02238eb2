"""The field's benchmarks are read as they are published, and all their turns are asked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from decoders.errors import SettingsError, UnknownNameError
from decoders.prompts.reading import bare
from decoders.prompts.suites import PLACEHOLDER, SUITES, Question, conversations, read_suite

TWO = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Shorten it."]}
ONE = {"question_id": 7, "category": "math_reasoning", "turns": ["What is 2 + 3?\u2028Think."], "reference": ["5"]}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
        return path
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


#: By suite: a file as it is published, rows of it, and the questions that they are.
PUBLISHED: list[tuple[str, str, list[dict[str, Any]], list[Question]]] = [
    ("spec-bench", "question.jsonl", [TWO, ONE], [
        Question("writing-81", "writing", ("Write a post.", "Shorten it.")),
        Question("math_reasoning-7", "math_reasoning", ("What is 2 + 3?\u2028Think.",)),
    ]),
    ("speed-bench", "qualitative/test-00000-of-00001.parquet",
     [{"question_id": "ab", "category": "rag", "sub_category": "x", "turns": ["a", "b", "c"], "multiturn": True}],
     [Question("rag-ab", "rag", ("a", "b", "c"))]),
    ("speed-bench", "speed.jsonl",
     [{"question_id": 0, "category": "qa", "messages": [{"role": "user", "content": "a"}]}], [Question("qa-0", "qa", ("a",))]),
    ("mt-bench", "question.jsonl", [TWO], [Question("writing-81", "writing", ("Write a post.", "Shorten it."))]),
    ("mt-bench", "data/train-00000-of-00001.parquet", [{"prompt": ["a", "b"], "category": "stem", "prompt_id": 3}],
     [Question("stem-1", "stem", ("a", "b"))]),
    ("gsm8k", "test.jsonl", [{"question": "How many?", "answer": "#### 3"}], [Question("gsm8k-1", "gsm8k", ("How many?",))]),
    ("gsm8k", "main/test-00000-of-00001.parquet", [{"question": "How many?", "answer": "#### 3"}],
     [Question("gsm8k-1", "gsm8k", ("How many?",))]),
    ("humaneval", "HumanEval.jsonl.gz", [{"task_id": "HumanEval/0", "prompt": "def f():", "test": ""}],
     [Question("humaneval-1", "humaneval", ("def f():",))]),
    ("humaneval", "openai_humaneval/test-00000-of-00001.parquet", [{"task_id": "HumanEval/0", "prompt": "def f():"}],
     [Question("humaneval-1", "humaneval", ("def f():",))]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "rows", "questions"), PUBLISHED)
def test_published_files_are_read_by_name_or_from_their_folder(
    tmp_path: Path, name: str, file: str, rows: list[dict[str, Any]], questions: list[Question]
) -> None:
    path = write(tmp_path / file, *rows)
    (tmp_path / "README.md").write_text("not this")
    assert read_suite(name, path) == read_suite(name, tmp_path) == questions


def test_a_sample_is_drawn_of_every_category_and_is_the_same_in_every_run(tmp_path: Path) -> None:
    rows = [{"question_id": n, "category": "ab"[n % 2], "turns": [f"q{n}"]} for n in range(40)]
    path = write(tmp_path / "question.jsonl", *rows)
    first, again, other = (read_suite("spec-bench", path, 3, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert [q.kind for q in first].count("a") == [q.kind for q in first].count("b") == 3
    assert first == [q for q in read_suite("spec-bench", path) if q in first], "in the order of the file"


def test_what_is_no_file_of_a_suite_is_told_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'spec-bench'"):
        read_suite("specbench", tmp_path)
    write(tmp_path / "one" / "test.parquet", TWO)
    write(tmp_path / "two" / "test.parquet", TWO)
    masked = {**TWO, "turns": [PLACEHOLDER + " USING SPECDEC_BENCH"]}
    for name, data, said in [
        ("spec-bench", None, "needs --data: give question.jsonl from data/spec_bench of github.com/"),
        ("gsm8k", tmp_path / "nowhere.jsonl", "no such file or folder; give test.jsonl from github.com/openai"),
        ("spec-bench", tmp_path / "one", "there is no question.jsonl in this folder"),
        ("speed-bench", tmp_path, "give one of them: one/test.parquet, two/test.parquet"),
        ("gsm8k", write(tmp_path / "a.jsonl", TWO), "line 1 has no text in question; give test.jsonl from"),
        ("humaneval", tmp_path / "one" / "test.parquet", "line 1 has no text in prompt"),
        ("speed-bench", write(tmp_path / "b.jsonl", TWO, masked), "1 of 2 questions are placeholders"),
        ("spec-bench", write(tmp_path / "c.jsonl"), "there is no question in this file"),
    ]:
        with pytest.raises(SettingsError) as error:
            read_suite(name, data)
        assert said in str(error.value)
    (tmp_path / "d.jsonl.gz").write_bytes(b"\x1f\x8b no gzip")
    with pytest.raises(SettingsError, match="is not a file of humaneval"):
        read_suite("humaneval", tmp_path / "d.jsonl.gz")


def test_answers_stand_before_the_turns_that_follow_them() -> None:
    asked: list[Any] = []

    def answer(content: Any) -> str:
        asked.append(content)
        return f"answer {len(asked)}"

    questions = [Question("a-1", "a", ("one", "two", "three")), Question("b-1", "b", ("four",))]
    texts = conversations(SUITES["spec-bench"], questions, answer, template=True)
    assert [name for name, _, _ in texts] == ["a-1", "a-1, turn 2", "a-1, turn 3", "b-1"]
    assert [[m["content"] for m in content] for _, _, content in texts] == [  # type: ignore[index]
        ["one"], ["one", "answer 1", "two"], ["one", "answer 1", "two", "answer 2", "three"], ["four"]
    ]  # fmt: skip
    assert asked == [texts[0][2], texts[1][2]], "what is answered is not changed afterwards"
    assert bare(texts[1][2]) == "one\n\nanswer 1\n\ntwo\n\n"
    (code,) = conversations(SUITES["humaneval"], [Question("c", "c", ("def f():",))], answer, template=False)
    assert code[2] == "def f():", "the code itself goes on where there is no template"
