"""The library of ready grammars: ``grammars/`` of the project, shipped with the package.

from decoders import library
library.read("json.lark")
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from .errors import UnknownNameError

SUFFIXES = (".lark", ".regex", ".json")


def names() -> list[str]:
    """File names of all grammars, sorted."""
    return sorted(entry.name for entry in _folder().iterdir() if entry.name.endswith(SUFFIXES))


def read(name: str) -> str:
    """Text of the grammar `name`; its suffix may be left out where the rest is unique.

    Raises:
        UnknownNameError: there is none of that name, or several.
    """
    every = names()
    found = [entry for entry in every if name in (entry, entry.rsplit(".", 1)[0])]
    if len(found) != 1:
        raise UnknownNameError("grammar", name, found or every)
    # A newline at the end belongs to the file, not to a pattern.
    return _folder().joinpath(found[0]).read_text(encoding="utf-8").rstrip("\n")


def _folder() -> Traversable:
    installed = resources.files(__package__).joinpath("_grammars")
    # A checkout keeps them at its top, and so does an editable install.
    return installed if installed.is_dir() else Path(__file__).parents[1] / "grammars"
