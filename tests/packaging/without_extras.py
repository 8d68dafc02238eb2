"""Makes pytest run as where only the extra ``test`` is installed: what the other extras bring is not found.

    python -m pytest --collect-only -q -p tests.packaging.without_extras

A test that needs such a package has to skip itself; one that imports it at its top ends collection with an error.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def canonical(requirement: str) -> str:
    """The name of a requirement's distribution as PyPI compares it, without version and extras."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def needed(names: set[str]) -> set[str]:
    """The distributions `names` and all that they need on their own, as far as they are installed."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        try:
            pending += [canonical(line) for line in requires(name) or () if "extra ==" not in line]
        except PackageNotFoundError:
            continue
    return found


def declared(project: dict, extra: str) -> Iterator[str]:
    """Distributions of an extra, those of the extras that it names included."""
    for line in project["optional-dependencies"][extra]:
        if own := re.match(rf"{project['name']}\[(.*)\]", line):
            for name in own[1].split(","):
                yield from declared(project, name)
        else:
            yield canonical(line)


def hidden() -> set[str]:
    """Names of modules that only other extras than ``test`` bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = needed({canonical(line) for line in project["dependencies"]} | set(declared(project, "test")))
    others = {name for extra in project["optional-dependencies"] for name in declared(project, extra)} - there
    brought = {module for module, names in packages_distributions().items() if others & set(map(canonical, names))}
    return brought - sys.stdlib_module_names


class Visible:
    """A finder that passes over hidden modules."""

    def __init__(self, finder: Any, modules: set[str]) -> None:
        self.finder, self.modules = finder, modules

    def __getattr__(self, name: str) -> Any:  # distributions are found as before
        return getattr(self.finder, name)

    def find_spec(self, name: str, *arguments: Any) -> ModuleSpec | None:
        return None if name.partition(".")[0] in self.modules else self.finder.find_spec(name, *arguments)


def pytest_configure() -> None:
    modules = hidden()
    sys.meta_path[:] = [Visible(finder, modules) for finder in sys.meta_path if hasattr(finder, "find_spec")]
