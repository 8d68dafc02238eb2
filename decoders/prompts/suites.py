"""Public benchmarks, read from their published files: ``decoders bench --suite spec-bench --data question.jsonl``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingsError, UnknownNameError
from .reading import Content, Texts, read_rows

#: The placeholder in SPEED-Bench's file for texts that must be fetched from other data sets.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        source: where the benchmark's file is published.
        files: patterns for the path of the file in a folder; the first pattern with a match is used.
        turns: the fields that may hold the question, as a list of turns or as one text.
        completes: whether the question is a text to continue, for models without a chat template.
    """

    source: str
    files: tuple[str, ...]
    turns: tuple[str, ...] = ("turns",)
    completes: bool = False


SUITES: dict[str, Suite] = {
    "spec-bench": Suite("data/spec_bench of github.com/hemingkx/Spec-Bench", ("question.jsonl",)),
    "speed-bench": Suite(
        "huggingface.co/datasets/nvidia/SPEED-Bench, as examples/specdec_bench/prepare_data.py of github.com/NVIDIA/Model-Optimizer "
        "writes it",
        ("qualitative/*.parquet", "*.parquet", "*.jsonl"), ("turns", "messages"),
    ),
    "mt-bench": Suite(
        "fastchat/llm_judge/data/mt_bench of github.com/lm-sys/FastChat", ("question.jsonl", "*.parquet"), ("turns", "prompt")
    ),
    "gsm8k": Suite(
        "github.com/openai/grade-school-math, or huggingface.co/datasets/openai/gsm8k",
        ("test.jsonl", "main/test*.parquet", "test*.parquet"), ("question",),
    ),
    "humaneval": Suite(
        "github.com/openai/human-eval, or huggingface.co/datasets/openai/openai_humaneval",
        ("HumanEval.jsonl.gz", "HumanEval.jsonl", "test*.parquet"), ("prompt",), completes=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A question of a benchmark: its category `kind`, and the texts `turns` that the user writes one after the other."""

    name: str
    kind: str
    turns: tuple[str, ...]


def read_suite(name: str, data: Path | None, samples: int | None = None, seed: int = 0) -> list[Question]:
    """The questions of the suite `name`, in the order of the file `data`. With `seed`, draws `samples` of each category (None: all).

    Raises:
        UnknownNameError: no such suite. SettingsError: `data` is missing, or is not a file of this suite.
    """
    if name not in SUITES:
        raise UnknownNameError("suite", name, SUITES)
    suite = SUITES[name]
    expected = f"{suite.files[0].rpartition('/')[2]} from {suite.source}"
    if data is None:
        raise SettingsError(f"--suite {name} needs --data: give {expected}, or a folder that contains this file")
    path = _file(suite, data, expected)
    try:
        questions = [_question(suite, name, number, row) for number, row in enumerate(read_rows(path), 1)]
    except SettingsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"--data {path} is not a file of {name}: {error}; give {expected}") from error
    if missing := sum(PLACEHOLDER in turn for question in questions for turn in question.turns[:1]):
        raise SettingsError(
            f"--data {path}: {missing} of {len(questions)} questions are placeholders for texts that are published elsewhere: run "
            "examples/specdec_bench/prepare_data.py of github.com/NVIDIA/Model-Optimizer, which fetches these texts"
        )
    if not questions:
        raise SettingsError(f"--data {path}: there is no question in this file")
    chosen = set[int]()
    for kind in dict.fromkeys(question.kind for question in questions):
        numbers = [number for number, question in enumerate(questions) if question.kind == kind]
        count = len(numbers) if samples is None else min(samples, len(numbers))
        chosen |= set(random.Random(f"{seed} {kind}").sample(numbers, count))
    return [questions[number] for number in sorted(chosen)]


def _file(suite: Suite, data: Path, expected: str) -> Path:
    if not data.is_dir():
        if not data.is_file():
            raise SettingsError(f"--data {data}: there is no such file or folder; give {expected}")
        return data
    for pattern in suite.files:
        paths = sorted(data.glob(pattern)) or sorted(data.rglob(pattern))
        if len(paths) > 1:
            several = ", ".join(str(path.relative_to(data)) for path in paths)
            raise SettingsError(f"--data {data} has several files of the benchmark; give one of them: {several}")
        if paths:
            return paths[0]
    raise SettingsError(f"--data {data}: there is no {' or '.join(suite.files)} in this folder; give {expected}")


def _question(suite: Suite, name: str, number: int, row: dict[str, Any]) -> Question:
    asked = next((row[field] for field in suite.turns if row.get(field)), None)
    turns: list[Any] = [asked] if isinstance(asked, str) else list(asked or ())
    if turns and isinstance(turns[0], dict):
        turns = [message["content"] for message in turns if message["role"] == "user"]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"line {number} has no text in {' or '.join(suite.turns)}")
    kind = str(row.get("category") or name)
    own = row.get("question_id")
    return Question(f"{kind}-{number if own is None else own}", kind, tuple(turns))


def conversations(
    suite: Suite, questions: Sequence[Question], answer: Callable[[Content], str], template: bool
) -> Texts:
    """The prompts of all turns of `questions`. The prompt of a later turn contains the earlier turns and their answers.

    Args:
        answer: returns the answer to a prompt.
        template: whether prompts go through a chat template.
    """
    texts: Texts = []
    for question in questions:
        said: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns, 1):
            said.append({"role": "user", "content": text})
            content: Content = text if suite.completes and not template else list(said)
            texts.append((question.name + (f", turn {turn}" if turn > 1 else ""), question.kind, content))
            if turn < len(question.turns):
                said.append({"role": "assistant", "content": answer(content)})
    return texts
