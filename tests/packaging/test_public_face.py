"""Plugins import what the reference documents and nothing else, and built-in strategies what a plugin could."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import decoders
from decoders import errors

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
STRATEGIES = ROOT / "decoders" / "strategies"
#: The bases on which strategies stand, those of plugins too.
BASES = ("draft_model", "draft_tree", "feature_drafter", "followed_text", "text_drafter")


def documented() -> set[str]:
    """Every public name, as the reference has it: ``decoders.sampling.process``."""
    headings = {
        name
        for page in ("api.md", "testing.md")
        for name in re.findall(r"(?m)^### (decoders\.[\w.]+)$", (REFERENCE / page).read_text(encoding="utf-8"))
    }
    assert len(headings) > 80
    table = re.findall(r"(?m)^\| `(\w+)` \|", (REFERENCE / "errors.md").read_text(encoding="utf-8"))
    assert "DecodersError" in table
    return headings | {f"{errors.__name__}.{name}" for name in table}


def imports(path: Path, package: str) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of all that a file imports of ours; the name is empty where a module is imported whole."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, module, alias.name) for alias in node.names if _ours(module))


def _ours(module: str) -> bool:
    return module.split(".")[0] == "decoders"


def files_of_plugins() -> list[Path]:
    return sorted((ROOT / "plugins").glob("*/src/*/*.py"))


def test_every_plugin_is_looked_at() -> None:
    assert {path.parent.name for path in files_of_plugins()} == {
        "decoders_eagle",
        "decoders_example",
        "decoders_lab",
        "decoders_ray",
        "decoders_xgrammar",
    }


#: Measures single parts of this package, which are no public names, and comes with it.
OF_PARTS = "decoders_lab"


@pytest.mark.parametrize(
    "path",
    [path for path in files_of_plugins() if path.parent.name != OF_PARTS],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_plugins_import_documented_names_only(path: Path) -> None:
    public = documented()
    modules = {"decoders", *(name.rpartition(".")[0] for name in public)}
    undocumented = [
        f"{line}: {module} {name}"
        for line, module, name in imports(path, path.parent.name)
        if (f"{module}.{name}" if name else module) not in (public | modules if name else modules)
    ]
    assert undocumented == []


@pytest.mark.parametrize("path", files_of_plugins(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_plugins_touch_private_parts_of_their_own_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    foreign = [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert foreign == []


def undocumented(room: str) -> dict[str, set[str]]:
    """The names that a package of ours imports from the others and the reference does not have, with the files that do."""
    public = documented()
    modules = {name.rpartition(".")[0] for name in public}
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "decoders" / room).rglob("*.py")):
        for _, module, name in imports(path, ".".join(path.relative_to(ROOT).parent.parts)):
            full = f"{module}.{name}" if name else module
            if (
                f"{full}.".startswith(f"decoders.{room}.")
                or full in public | modules
                or is_exported(module, name, public)
            ):
                continue
            found.setdefault(full, set()).add(path.name)
    return found


def is_exported(module: str, name: str, public: set[str]) -> bool:
    """Whether ``decoders.NAME`` is documented and the same object: built-in rooms import it from where it is defined."""
    if f"decoders.{name}" not in public:
        return name == "__version__"
    return getattr(importlib.import_module(module), name) is getattr(decoders, name)


@pytest.mark.parametrize("room", ["strategies", "training"])
def test_methods_import_documented_names_and_their_own_network(room: str) -> None:
    """A plugin has its network in its own package; ours are in ``heads``: ``eagle3.py`` and ``eagle3_files.py`` for ``eagle3.py``."""
    foreign = {
        name: files
        for name, files in undocumented(room).items()
        if any(name.rpartition(".")[0].removesuffix("_files") != f"decoders.heads.{file[:-3]}" for file in files)
    }
    assert foreign == {}


@pytest.mark.parametrize("room", ["server", "bench"])
def test_a_room_that_could_be_a_plugin_imports_documented_names_only(room: str) -> None:
    assert undocumented(room) == {}


@pytest.mark.parametrize(
    "module",
    ["decoders.strategy", "decoders.sampling", "decoders.costs", *(f"decoders.strategies.{name}" for name in BASES)],
)
def test_strategies_import_what_a_module_lists(module: str) -> None:
    listed = importlib.import_module(module).__all__
    taken = {
        name
        for path in STRATEGIES.glob("*.py")
        for _, imported, name in imports(path, "decoders.strategies")
        if imported == module
    }
    assert taken <= set(listed)


def test_tests_of_distributions_pass_on_a_busy_machine() -> None:
    for project in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        warnings = tomllib.loads(project.read_text())["tool"]["pytest"]["ini_options"]["filterwarnings"]
        assert "ignore:decoders. other processes take" in warnings, project
