"""Plugins import what the reference documents and nothing else, and built-in strategies what a plugin could."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoders import errors

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
STRATEGIES = ROOT / "decoders" / "strategies"
#: What every strategy may import.
FACE = (
    "decoders.strategy", "decoders.drafters", "decoders.sampling", "decoders.costs", "decoders.constraints",
    "decoders.tree", "decoders.settings", "decoders.errors", "decoders.strategies",
)  # fmt: skip
#: The method's network and its files, in a package of their own.
NETWORKS = dict.fromkeys(("medusa.py", "eagle3.py", "dflash.py"), "decoders.heads")


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


@pytest.mark.parametrize("path", sorted(STRATEGIES.glob("*.py")), ids=lambda path: path.name)
def test_strategies_import_the_public_face_only(path: Path) -> None:
    own = NETWORKS.get(path.name)
    refused = [
        f"{line}: {module}"
        for line, module, _ in imports(path, "decoders.strategies")
        if module not in FACE
        and not module.startswith("decoders.strategies.")
        and not (own is not None and module.startswith(f"{own}."))
    ]
    assert refused == []


@pytest.mark.parametrize("module", ["decoders.strategy", "decoders.sampling", "decoders.costs"])
def test_strategies_import_what_a_module_lists(module: str) -> None:
    listed = importlib.import_module(module).__all__
    taken = {
        name
        for path in STRATEGIES.glob("*.py")
        for _, imported, name in imports(path, "decoders.strategies")
        if imported == module
    }
    assert taken <= set(listed)
