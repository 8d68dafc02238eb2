"""Everything imported is declared, everything declared is imported. What decoding may import is a contract in pyproject.toml."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from .without_extras import canonical

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "decoders"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What each part of the package may import beyond the default dependencies, by the extra that brings it.
EXTRAS = {
    "bench": {"psutil", "matplotlib"},
    "prompts": {"pyarrow", "jinja2"},
    "report": {"matplotlib"},
    "testing": {"pytest"},
    "checkpoints.py": {"gguf", "accelerate"},
    "server": {"fastapi", "starlette", "uvicorn", "h11", "prometheus_client", "jinja2", "PIL"},
    "cli": {"fastapi", "uvicorn", "prometheus_client"},
    "engine": {"triton"},  # torch for CUDA brings it
}
#: Parts that nothing imports but who asks for their extra first: the command that they are for, layers on a device that runs kernels.
ASKED_FOR = ("server", "engine/model/kernels")


DEFAULT = {canonical(requirement) for requirement in PROJECT["dependencies"]}
IN_EXTRAS = {canonical(r) for extra in PROJECT["optional-dependencies"].values() for r in extra}


def imports(tree: ast.AST, inside_function: bool = False) -> Iterator[tuple[str, bool]]:
    """(imported package, whether only inside a function); of the lines under TYPE_CHECKING none."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], inside_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], inside_function
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "find_spec":
            yield from ((arg.value, True) for arg in node.args if isinstance(arg, ast.Constant))
        inner = inside_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from imports(node, inner)


@functools.cache
def third_party() -> list[tuple[Path, str, bool]]:
    """(file, package, whether only inside a function) of all imports that are neither ours nor Python's."""
    return [
        (file.relative_to(PACKAGE), package, inside)
        for file in sorted(PACKAGE.rglob("*.py"))
        for package, inside in imports(ast.parse(file.read_text(encoding="utf-8")))
        if package not in sys.stdlib_module_names and package != "decoders"
    ]


installed = functools.cache(packages_distributions)
#: Distributions whose name cannot be told from the package's, for where they are not installed.
NAMES = {"llama_cpp": ["llama-cpp-python"]}


def distributions(package: str) -> set[str]:
    return {canonical(name) for name in installed().get(package, NAMES.get(package, [package]))}


def test_every_import_is_declared() -> None:
    missing = []
    for file, package, inside in third_party():
        if distributions(package) & DEFAULT:
            continue
        optional = package in EXTRAS.get(file.parts[0], ()) and distributions(package) & IN_EXTRAS
        # A package of an extra must not be needed to import ours.
        if not (optional and (inside or any(map(file.is_relative_to, ASKED_FOR)))):
            missing.append(f"{file}: {package}")
    assert not sorted(set(missing))


def test_every_default_dependency_is_imported() -> None:
    used = {name for _, package, _ in third_party() for name in distributions(package)}
    assert not DEFAULT - used


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import decoders\n"
        "names = {name for name in set(sys.modules) - before if name.split('.')[0] not in sys.stdlib_module_names}\n"
        "print(*sorted(names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, ["decoders"]), done.stderr
