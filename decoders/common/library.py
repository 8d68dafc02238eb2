"""Reads grammars from files: from the library, which this package includes (``grammars/`` in the repository), and from a user's files.

A ``.json`` file holds a JSON schema, a ``.regex`` file a regular expression, a ``.lark`` file a context-free grammar in Lark's syntax.

from decoders.constraints import library
library.read("json.lark")
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from ..errors import GrammarError, UnknownNameError

Kind = Literal["lark", "regex", "json_schema"]
#: Maps the suffix of a file to the format of its content.
KINDS: dict[str, Kind] = {".lark": "lark", ".regex": "regex", ".json": "json_schema"}
_COMMENTS = {"lark": "//", "regex": "#"}


@dataclass(frozen=True)
class Ready:
    """A grammar of the library.

    Attributes:
        name: the file's name without its suffix, for ``generate(grammar=…)``.
        file: the file's name.
        kind: ``lark``, ``regex`` or ``json_schema``.
        description: the accepted texts, in one line: the file's first comment, or the schema's description.
        text: the grammar; for a ``.regex`` file the pattern, with its lines joined and without comments.
    """

    name: str
    file: str
    kind: Kind
    description: str
    text: str


def names() -> list[str]:
    """The file names of all grammars of the library, sorted."""
    return sorted(entry.name for entry in _folder().iterdir() if entry.name.endswith(tuple(KINDS)))


def plain_names() -> list[str]:
    """The names of the library's grammars without suffix, sorted. Names that several files share (differing in suffix) are left out."""
    stems = [_stem(file) for file in names()]
    return sorted(stem for stem in set(stems) if stems.count(stem) == 1)


def find(name: str) -> Ready:
    """The library's grammar with the name `name`, with or without suffix; ``-`` stands for ``_``.

    Raises:
        UnknownNameError: no grammar has this name, or several have.
    """
    every = names()
    wanted = name.replace("-", "_")
    matching = [file for file in every if wanted in (file, _stem(file))]
    if len(matching) != 1:
        raise UnknownNameError("grammar", name, matching or (every if "." in name else map(_stem, every)))
    content = _folder().joinpath(matching[0]).read_text(encoding="utf-8").rstrip("\n")
    kind = KINDS[matching[0].removeprefix(_stem(matching[0]))]
    text = joined(content) if kind == "regex" else content
    return Ready(_stem(matching[0]), matching[0], kind, _description(content, kind), text)


def read(name: str) -> str:
    """The text of the grammar `name` (:attr:`Ready.text`); raises the errors of :func:`find`."""
    return find(name).text


def joined(content: str) -> str:
    """The pattern in `content`, the text of a ``.regex`` file: the lines joined, without comments (lines that begin with ``#``)."""
    return "".join(line for line in content.split("\n") if not line.startswith("#"))


def _description(content: str, kind: Kind) -> str:
    """The schema's description, or the comment in the first line; an empty string if there is none."""
    if kind == "json_schema":
        return str(json.loads(content).get("description", ""))
    first = content.split("\n", 1)[0]
    mark = _COMMENTS[kind]
    return first.removeprefix(mark).strip() if first.startswith(mark) else ""


def _stem(file: str) -> str:
    return file.rsplit(".", 1)[0]


def _folder() -> Traversable:
    installed = resources.files("decoders").joinpath("_grammars")
    # A checkout and an editable install have the grammars in the project's folder.
    return installed if installed.is_dir() else Path(__file__).parents[2] / "grammars"


#: A text that ends with one of these suffixes is taken for a file's name, because no specification of a grammar ends with one.
SUFFIXES = (".lark", ".gbnf", ".json", ".regex")


def check_file(name: str) -> None:
    """Raises GrammarError if `name` looks like a file's name, but is the name of neither a file nor a library grammar."""
    if Path(name).is_file() or name.replace("-", "_") in names():
        return
    if name.endswith(SUFFIXES) or os.sep in name:
        folder = Path(name).parent
        others = {file.stem: file for file in sorted(folder.glob("*")) if file.suffix in SUFFIXES}
        near = difflib.get_close_matches(Path(name).stem, others, n=1)  # without suffixes, which make all names alike
        hint = f" Did you mean {str(others[near[0]])!r}?" if near else ""
        raise GrammarError(
            f"there is no file {name!r}, and no grammar of this name in the library (`decoders grammars` lists them).{hint}",
            "path",
        )


def file_content(file: Path) -> str:
    """The text of `file`, without a byte order mark. Raises GrammarError if it cannot be read."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise GrammarError(f"{file} cannot be read: it is not a regular file", "path")
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"{file} cannot be read: {error}", "path") from error


def file_schema(file: Path) -> Any:
    """The JSON value in `file`. Raises GrammarError if it cannot be read, or is not JSON."""
    content = file_content(file)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{file} is not JSON: {error}", "path") from error


def file_named(text: str) -> Path | None:
    """The file that `text` names: an existing file, or a name with one of :data:`SUFFIXES`. None if `text` is a grammar itself."""
    if "\n" in text:
        return None
    if text.endswith(SUFFIXES):
        return Path(text)
    try:
        return Path(text) if Path(text).is_file() else None
    except (OSError, ValueError):  # too long for a file name, or contains a null
        return None
