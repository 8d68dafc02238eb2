"""``decoders config``: the settings in force, and where each of them comes from."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from .catalogue import catalogue
from .console import plain_console


def config(
    strategy: Annotated[str | None, typer.Argument(help="Show all settings of this strategy instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Print the settings that calls here take where they set nothing themselves: each with its value, and where that comes from."""
    from ..errors import UnknownNameError, canonical
    from ..settings import RuntimeSettings, settings_file, variable_of

    strategies = catalogue("strategies")
    names = [item["name"] for item in strategies]
    path, content = settings_file()
    changed = [
        name for name in names
        if name in content or any(variable.startswith(variable_of(name, "")) for variable in os.environ)
    ]  # fmt: skip
    sections: dict[str, list[dict[str, Any]]] = {}
    if strategy is None:
        sections["loop"] = _in_force(RuntimeSettings, None, names)
        shown = changed
    else:
        shown = [name for name in names if name == canonical(strategy)]
        if not shown:
            raise UnknownNameError("strategy", strategy, names)
    for name in shown:
        if name not in changed:  # known without the strategy itself, which imports torch
            own = next(item["settings"] for item in strategies if item["name"] == name)
            sections[name] = [{"setting": s["name"], "value": s["default"], "from": "default"} for s in own]
            continue
        from ..plugins import registry

        settings = _in_force(registry().strategy(name).settings_class, name, names)
        sections[name] = [item for item in settings if strategy is not None or item["from"] != "default"]
    if as_json:
        typer.echo(json.dumps({"file": str(path) if path else None} | sections, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    console = plain_console()
    looked = "none (DECODERS_CONFIG, ./decoders.toml and [tool.decoders] in ./pyproject.toml are looked for)"
    console.print(Text(f"file: {path or looked}"))
    for section, settings in sections.items():
        if not settings:
            continue
        table = Table(
            "setting",
            "value",
            "from",
            box=None,
            pad_edge=False,
            title=section,
            title_justify="left",
            title_style="bold",
        )
        for item in settings:
            style = "dim" if item["from"] == "default" else ""
            table.add_row(item["setting"], Text(repr(item["value"])), item["from"], style=style)
        console.print(table)


def _in_force(cls: Any, section: str | None, sections: list[str]) -> list[dict[str, Any]]:
    """The settings of a section by name."""
    from ..settings import load_settings, origins

    values = load_settings(cls, section, {}, {}, sections=sections).model_dump(mode="json")
    places = origins(cls, section, sections=sections)
    return [
        {"setting": name, "value": value, "from": places[name].removeprefix("from ").removeprefix("in ")}
        for name, value in values.items()
    ]
