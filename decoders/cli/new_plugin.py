"""``decoders new-plugin``: creates a project for a new strategy. It is a copy of plugins/decoders-example with other names."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from ..errors import PluginError
from .catalogue import catalogue
from .console import plain_console


def new_plugin(
    name: Annotated[
        str, typer.Argument(help="Name of the strategy, such as my_idea: lower-case letters, digits and _.")
    ],
    folder: Annotated[Path, typer.Option(help="Folder in which the project folder is created.")] = Path("."),
) -> None:
    """Create a plugin project: a strategy in plain Python, its tests with the conformance kit, and its entry point."""
    strategy = name.replace("-", "_")
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", strategy):
        raise PluginError(
            f"{name!r} is not a name of a strategy: use small letters and digits with _ between them, such as my_idea"
        )
    taken = {item["name"]: item["provider"] for item in catalogue("strategies")}
    if strategy in taken:
        raise PluginError(f"{taken[strategy]} already has a strategy {strategy!r}: choose another name")
    project = folder / f"decoders-{strategy.replace('_', '-')}"
    if project.exists():
        raise PluginError(f"{project} already exists: nothing was written")
    for path, text in renamed(strategy).items():
        file = project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    module = f"decoders_{strategy}"
    plain_console().print(
        f"{project}: the strategy is in src/{module}/__init__.py. Next:\n"
        f"  cd {project} && pip install -e '.[test]' && python -m pytest\n"
        f'  decoders generate demo "def add(a, b):" --strategy {strategy} --report',
        soft_wrap=True,
    )


def renamed(strategy: str) -> dict[str, str]:
    """The texts of a new project's files, by path. The example's names are replaced by names for `strategy`."""
    files = template()
    name = "".join(part.title() for part in strategy.split("_"))
    # The class name must not be a keyword of Python (as False is), nor shadow another name in the module.
    if iskeyword(name) or any(re.search(rf"\b{name}\b", text) for text in files.values()):
        name += "Strategy"
    words = {
        "decoders-example": f"decoders-{strategy.replace('_', '-')}", "decoders_example": f"decoders_{strategy}",
        "Bigram": name, "bigram": strategy,
    }  # fmt: skip
    pattern = re.compile("|".join(words))

    def put(text: str) -> str:
        return pattern.sub(lambda match: words[match[0]], text)

    return {put(path): put(text) for path, text in files.items()}


def template() -> dict[str, str]:
    """The texts of the example project's files, by path."""
    installed = resources.files("decoders").joinpath("_example")
    # In a checkout or an editable install, the example is in the repository's folder `plugins`.
    return _files(installed if installed.is_dir() else Path(__file__).parents[2] / "plugins" / "decoders-example")


def _files(folder: Traversable, path: str = "") -> dict[str, str]:
    files: dict[str, str] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            files |= (
                _files(entry, f"{path}{entry.name}/") if not entry.name.endswith((".egg-info", "_cache", "__")) else {}
            )
        elif entry.name.endswith((".py", ".toml", ".md")):
            files[path + entry.name] = entry.read_text(encoding="utf-8")
    return files
