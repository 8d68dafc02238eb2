"""The edit task: a function, an instruction in a comment, the function again with the edit made.

A model this small does not learn to copy from plain code. These texts teach it to, which is what makes
copy-heavy decoding (prompt lookup, speculative drafts) behave on the demo models as it does on large ones.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .corpus import Source

LINES = range(5, 41)
MAX_CHARACTERS = 3600
COPY_SHARE = 0.25
_NOT_RENAMED = set(keyword.kwlist) | set(keyword.softkwlist) | set(dir(builtins)) | {"self", "cls"}


@dataclass(frozen=True)
class Function:
    """A function's dedented source and the names in it that can be renamed without changing anything else."""

    path: str
    source: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class EditTask:
    """`prompt` ends after the instruction's newline; `answer` is the edited function, ending in a newline."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return self.prompt + self.answer


def functions(sources: Iterable[Source]) -> list[Function]:
    """Every function of 5 to 40 lines, each distinct text once. Files that do not parse are passed over."""
    by_source: dict[str, Function] = {}
    for source in sources:
        try:
            tree = ast.parse(source.text)
        except (SyntaxError, ValueError):
            continue
        # Not splitlines(): it also breaks at form feeds, which ast does not count as lines.
        lines = source.text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = _function(source.path, lines, node)
                if function is not None:
                    by_source.setdefault(function.source, function)
    return list(by_source.values())


def new_names(functions: Iterable[Function]) -> list[str]:
    """Identifiers to rename to: those that occur in at least two of the functions, sorted."""
    counts = Counter(name for function in functions for name in function.names)
    return sorted(name for name, count in counts.items() if count >= 2 and 3 <= len(name) <= 20)


def edit_task(function: Function, names: list[str], rng: random.Random) -> EditTask:
    """A copy task (:data:`COPY_SHARE` of the time, or where nothing can be renamed), else a rename to one of `names`."""
    if function.names and rng.random() >= COPY_SHARE:
        old = rng.choice(function.names)
        for _ in range(20):
            new = rng.choice(names)
            if not re.search(rf"\b{re.escape(new)}\b", function.source):
                return rename_task(function, old, new)
    return copy_task(function)


def copy_task(function: Function) -> EditTask:
    """The function again, unchanged."""
    return EditTask(f"# original\n{function.source}\n# copy\n", function.source)


def rename_task(function: Function, old: str, new: str) -> EditTask:
    """The rename of `old` to `new`; `old` must be one of the function's names and `new` must not occur in it."""
    answer = re.sub(rf"\b{re.escape(old)}\b", new, function.source)
    return EditTask(f"# original\n{function.source}\n# rename {old} to {new}\n", answer)


def _function(path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function | None:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or node.lineno
    source = textwrap.dedent("\n".join(lines[first - 1 : last])).rstrip() + "\n"
    if last - first + 1 not in LINES or len(source) > MAX_CHARACTERS:
        return None
    try:
        ast.parse(source)  # dedenting can break a function that holds a multi-line string
    except (SyntaxError, ValueError):
        return None
    # A name qualifies when every occurrence of its letters is an occurrence of the name: then it stands in no string,
    # comment, attribute or keyword argument, and a textual replacement is a correct rename.
    words = Counter(re.findall(r"\w+", source))
    names = Counter(_names(node))
    usable = (n for n, count in names.items() if count >= 2 and words[n] == count and len(n) > 1)
    return Function(path, source, tuple(sorted(name for name in usable if name not in _NOT_RENAMED)))


def _names(function: ast.AST) -> Iterable[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
