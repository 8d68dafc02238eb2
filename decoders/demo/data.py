"""The demo models' data: the sources of the Python standard library, split into training and held-out files, and edit tasks from
them.

An edit task is a function, an instruction in a comment, and the edited function. A model this small does not learn to copy text from
plain code alone, so edit tasks teach it. Strategies that draft copied text, such as prompt lookup, then behave as on large models.

Licence of the data: PSF-2.0 (a few files have compatible notices of their own).
"""

from __future__ import annotations

import ast
import builtins
import fnmatch
import hashlib
import keyword
import os
import random
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PER_MILLE = 30

_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "_bundled"}

# Files that are left out: intentionally invalid Python, generated tables (they would teach digits instead of code), and files that
# differ between machines because of build paths (two machines would train on different texts).
_SKIPPED_FILES = (
    "lib2to3/tests/data/*", "test/test_lib2to3/data/*", "test/bad*", "test/tokenizedata/bad*",
    "test/encoded_modules/*", "encodings/cp*.py", "encodings/iso8859_*.py", "encodings/koi8_*.py",
    "encodings/mac_*.py", "encodings/ptcp154.py", "encodings/kz1048.py", "encodings/tis_620.py",
    "encodings/hp_roman8.py", "encodings/palmos.py", "pydoc_data/topics.py", "html/entities.py", "_sysconfigdata*",
    "config-*", "*/config-*", "sitecustomize.py", "usercustomize.py",
)  # fmt: skip

#: Edit tasks are made of functions that have a number of lines in LINES and at most MAX_CHARACTERS characters.
LINES = range(5, 41)
MAX_CHARACTERS = 3600
COPY_SHARE = 0.25
_NOT_RENAMED = set(keyword.kwlist) | set(keyword.softkwlist) | set(dir(builtins)) | {"self", "cls"}


@dataclass(frozen=True)
class Source:
    """One file. `path` is relative to the folder of the standard library, with slashes. `text` is the file's content."""

    path: str
    text: str


def stdlib_root() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(path: str) -> bool:
    """Whether the file with this relative path is held out.

    The answer depends only on the path, so that files that a later Python adds do not change the split of the other files.
    """
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def read_sources(root: Path | None = None) -> list[Source]:
    """The Python files under `root` (default: the standard library), sorted by path. Skips tables, other encodings and duplicates.

    Duplicates are dropped before the split, so that no held-out file is also a training file.
    """
    root = stdlib_root() if root is None else root
    seen: set[bytes] = set()
    sources = []
    for path in sorted(_python_files(root)):
        try:
            text = (root / path).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if not text.strip() or digest in seen or _is_table(text):
            continue
        seen.add(digest)
        sources.append(Source(path, text))
    return sources


def _python_files(root: Path) -> Iterator[str]:
    """Paths below `root`, with slashes. Skipped folders, such as site-packages, are not entered."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_DIRECTORIES]
        for name in files:
            path = Path(folder, name).relative_to(root).as_posix()
            if name.endswith(".py") and not any(fnmatch.fnmatchcase(path, pattern) for pattern in _SKIPPED_FILES):
                yield path


def split(sources: list[Source]) -> tuple[list[Source], list[Source]]:
    """The training files and the held-out files of `sources`."""
    train = [source for source in sources if not is_held_out(source.path)]
    held_out = [source for source in sources if is_held_out(source.path)]
    return train, held_out


def _is_table(text: str) -> bool:
    """Whether a file is large and consists mostly of digits, escapes and punctuation (codec tables, embedded binary data)."""
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return len(text) > 20_000 and letters < 0.62 * len(text)


@dataclass(frozen=True)
class Function:
    """A function: the path of its file, its dedented source, and its names that :func:`rename_task` can replace."""

    path: str
    source: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class EditTask:
    """An edit task. `prompt` ends with the newline after the instruction. `answer` is the edited function, and ends with a newline."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return self.prompt + self.answer


def functions(sources: Iterable[Source]) -> list[Function]:
    """All functions of 5 to 40 lines and at most :data:`MAX_CHARACTERS`, without duplicates. Skips files that cannot be parsed."""
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
    """The new names for rename tasks, sorted: names of 3 to 20 characters that occur in at least two of `functions`."""
    counts = Counter(name for function in functions for name in function.names)
    return sorted(name for name, count in counts.items() if count >= 2 and 3 <= len(name) <= 20)


def edit_task(function: Function, names: list[str], rng: random.Random) -> EditTask:
    """A task of renaming a name to one of `names`, or of copying: with probability :data:`COPY_SHARE`, or if no rename is possible."""
    if function.names and rng.random() >= COPY_SHARE:
        old = rng.choice(function.names)
        for _ in range(20):
            new = rng.choice(names)
            if not re.search(rf"\b{re.escape(new)}\b", function.source):
                return rename_task(function, old, new)
    return EditTask(f"# original\n{function.source}\n# copy\n", function.source)


def rename_task(function: Function, old: str, new: str) -> EditTask:
    """The task of renaming `old`, one of the function's names, to `new`. `new` must not occur in the function."""
    answer = re.sub(rf"\b{re.escape(old)}\b", new, function.source)
    return EditTask(f"# original\n{function.source}\n# rename {old} to {new}\n", answer)


def _function(path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function | None:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or node.lineno
    source = textwrap.dedent("\n".join(lines[first - 1 : last])).rstrip() + "\n"
    if last - first + 1 not in LINES or len(source) > MAX_CHARACTERS:
        return None
    try:
        ast.parse(source)  # dedenting can break a function with a multi-line string
    except (SyntaxError, ValueError):
        return None
    # A name can be renamed by replacing text if it occurs in no string, comment, attribute or keyword argument: that is, if the text
    # of the source contains the word as often as the syntax tree contains the name.
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
