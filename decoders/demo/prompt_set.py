"""Prompts made from held-out files: `code` to go on with, `copy` to copy with a rename, `docstring` to write."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import corpus, edits
from .corpus import Source
from .tokenizer import ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COUNTS = {"code": 12, "copy": 8, "docstring": 4}
TOKENS = {"code": range(80, 251), "copy": range(100, 251), "docstring": range(80, 251)}


@dataclass(frozen=True)
class Prompt:
    """One prompt: `source` is the held-out file it comes from, relative to the standard library.

    `answer` is what a perfect model says to a copy prompt; empty for the other kinds.
    """

    id: str
    kind: str
    text: str
    source: str
    answer: str = ""


def make_prompts(tokenizer: PreTrainedTokenizerFast, sources: list[Source] | None = None) -> list[Prompt]:
    """The prompts of all kinds from the held-out files of `sources` (default: this Python's standard library).

    Deterministic; each kind takes at most one prompt from a file as long as there are files enough.
    """
    held_out = corpus.split(corpus.read_sources() if sources is None else sources)[1]
    # By hash, not by name: neighbours in a directory look alike.
    held_out.sort(key=lambda source: hashlib.sha256(source.path.encode()).digest()[8:])
    names = edits.new_names(edits.functions(held_out))
    makers: dict[str, Callable[[Source], Iterator[tuple[str, str, str]]]] = {
        "code": lambda source: ((text, text, "") for text in _inside_functions(source)),
        "copy": lambda source: _renames(source, names),
        "docstring": lambda source: ((text, text, "") for text in _before_docstrings(source)),
    }
    made = []
    for kind, make in makers.items():
        per_file = []
        for source in held_out:
            fitting = [item for item in make(source) if len(ids_of(tokenizer, item[0])) in TOKENS[kind]]
            random.Random(source.path).shuffle(fitting)
            per_file.append([(source.path, text, answer) for _, text, answer in fitting])
        rounds = max(map(len, per_file), default=0)
        in_turn = [items[turn] for turn in range(rounds) for items in per_file if turn < len(items)]
        for number, (path, text, answer) in enumerate(in_turn[: COUNTS[kind]], start=1):
            made.append(Prompt(f"{kind}-{number:02}", kind, text, path, answer))
    return made


def write_prompts(file: Path, prompts: list[Prompt]) -> None:
    """Write the prompts as the JSON that ships with the package."""
    data = {
        "licence": corpus.LICENCE,
        "notice": "Excerpts of the Python standard library, Copyright Python Software Foundation; all rights reserved.",
        "python": platform.python_version(),
        "prompts": [asdict(prompt) for prompt in prompts],
    }
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _definitions(source: Source) -> Iterator[tuple[list[str], ast.stmt, ast.FunctionDef]]:
    """(lines of the file, the top-level statement, a function in it) for every function."""
    lines = source.text.split("\n")
    for statement in ast.parse(source.text).body:
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef):
                yield lines, statement, node


def _inside_functions(source: Source) -> Iterator[str]:
    """Texts that start at a top-level statement and end, at the end of a line, in the middle of a function."""
    for lines, statement, function in _definitions(source):
        last = function.end_lineno or function.lineno
        for inner in function.body[:-1]:
            end = inner.end_lineno or inner.lineno
            if last - end >= 3 and end - function.lineno >= 2:
                yield "\n".join(lines[_first_line(statement) - 1 : end])


def _before_docstrings(source: Source) -> Iterator[str]:
    """Texts that start at a top-level statement and end with the opening quotes of a function's docstring."""
    for lines, statement, function in _definitions(source):
        first = function.body[0]
        opening = lines[first.lineno - 1]
        if ast.get_docstring(function) and opening.lstrip().startswith('"""') and len(function.body) > 1:
            before = lines[_first_line(statement) - 1 : first.lineno - 1]
            yield "\n".join([*before, opening[: opening.index('"""') + 3]])


def _renames(source: Source, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """(the function alone, the prompt, the answer) for every function in which something can be renamed."""
    for function in edits.functions([source]):
        task = edits.edit_task(function, names, random.Random(function.source), copy_share=0.0)
        if function.names:
            yield function.source, task.prompt, task.answer


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])
