"""Commands that list strategies, verifiers, grammars and plugins, and the settings in force with their origins."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..common import library
from ..errors import UnknownNameError, amount, canonical
from .catalogue import catalogue
from .console import plain_console
from .models import Json

STYLES = {"loaded": "green", "blocked": "dim", "failed": "red", "conflict": "yellow"}


def strategies(as_json: Json = False) -> None:
    """List the decoding strategies and their settings."""
    _list(
        catalogue("strategies"), as_json,
        strategy=lambda item: item["name"],
        exact=lambda item: _yes(item["exact"]),
        needs=lambda item: "\n".join(_needs(item)),
        what_it_does=lambda item: item["summary"],
        settings=lambda item: "\n".join(f"{s['name']} = {shown_value(s['default'], s['description'])}" for s in item["settings"]),
    )  # fmt: skip
    if not as_json:
        plain_console().print("decoders config STRATEGY explains the settings", style="dim")


def shown_value(value: Any, description: str) -> str:
    """The value of a setting as text. None is followed by its meaning, which is taken from the setting's description."""
    meaning = description.partition("None: ")[2].split(". ")[0].rstrip(".")
    return f"None ({meaning})" if value is None and meaning else repr(value)


def _needs(item: dict[str, Any]) -> list[str]:
    flags = {"assistant": item["needs_assistant"], "grammar": item["needs_grammar"], item["needs"]: item["needs"]}
    return [what for what, needed in flags.items() if needed]


def verifiers(as_json: Json = False) -> None:
    """List the verifiers: the rules that decide which draft tokens are accepted."""
    _list(
        catalogue("verifiers"), as_json,
        verifier=lambda item: item["name"],
        exact=lambda item: _yes(item["exact"]),
        trees=lambda item: _yes(item["trees"]),
        what_it_does=lambda item: item["summary"],
        provider=_provider,
    )  # fmt: skip


def grammar_backends(as_json: Json = False) -> None:
    """List the grammar backends, which compile grammars to masks over the vocabulary."""
    _list(
        catalogue("grammar_backends"), as_json,
        backend=lambda item: item["name"], what_it_does=lambda item: item["summary"], provider=_provider,
    )  # fmt: skip


def _list(items: list[dict[str, Any]], as_json: bool, **columns: Callable[[dict[str, Any]], str]) -> None:
    """Prints `items` as JSON, or as a table. columns: heading → function that returns the text of an item in this column."""
    if as_json:
        typer.echo(json.dumps(items, indent=2, default=str))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    rows = [[column(item) for column in columns.values()] for item in items]
    for number, name in enumerate(columns):
        words = " ".join(row[number] for row in rows).split()
        table.add_column(name.replace("_", " "), min_width=max(map(len, words), default=0))  # words are kept whole
    for first, *others in rows:
        table.add_row(Text(first, style="bold"), *map(Text, others))
    plain_console().print(table)


def _provider(item: dict[str, Any]) -> str:
    return f"{item['provider']} {item['version']}".strip()


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def grammars(
    name: Annotated[str | None, typer.Argument(help="Print the text of this grammar instead of the list.")] = None,
    as_json: Json = False,
) -> None:
    """List the grammars of the library, which --grammar and ``generate(grammar=…)`` take by name, or print one."""
    others = {item["name"]: item for item in catalogue("grammars")}
    if name is not None:
        plugin_grammar = canonical(name)
        if plugin_grammar in others:
            from ..registry import resolve_grammar

            text = str(resolve_grammar(plugin_grammar))
            typer.echo(json.dumps({"name": plugin_grammar, "text": text}) if as_json else text)
            return
        ready = library.find(name)
        typer.echo(json.dumps(asdict(ready), indent=2, ensure_ascii=False) if as_json else ready.text)
        return
    ready_grammars = [asdict(library.find(file)) for file in library.names()]
    listed = [{key: value for key, value in ready.items() if key != "text"} for ready in ready_grammars]
    _list(
        [*listed, *others.values()], as_json,
        grammar=lambda item: item["name"],
        kind=lambda item: item.get("kind", ""),
        what_it_accepts=lambda item: item.get("description") or f"of {_provider(item)}",
    )  # fmt: skip


def plugins(
    as_json: Json = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with 1 if a plugin fails to load, or two plugins claim the same name."),
    ] = False,
) -> None:
    """List the installed plugins, with the reason if a plugin is not used."""
    infos = catalogue("plugins")
    if as_json:
        typer.echo(json.dumps(infos, indent=2))
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table("plugin", "status", "what it provides", show_lines=True)
        for info in infos:
            table.add_row(
                Text(f"{info['name']}\n{_provider(info)}"),
                Text(info["status"], style=STYLES[info["status"]]),
                Text("\n".join(_provided(info))),
            )
        console = plain_console()
        console.print(table)
        for info in infos:  # errors are printed below the table, so that they are readable in a narrow window
            if info["error"]:
                console.print(Text(f"{info['name']}: {info['error']}", style=STYLES[info["status"]]))
    if strict and any(info["status"] in ("failed", "conflict") for info in infos):
        raise typer.Exit(1)


def _provided(info: dict[str, Any]) -> Iterator[str]:
    """Yields what a plugin provides: a line of names for each kind of object. Of more than eight grammars, only the number is shown."""
    for kind in ("strategies", "verifiers", "grammar_backends", "grammars", "grammar_types", "observers", "commands"):
        names = info[kind]
        if not names:
            continue
        count = kind == "grammars" and len(names) > 8
        yield amount(len(names), "grammar") if count else f"{kind.replace('_', ' ')}: {', '.join(names)}"


def config(
    strategy: Annotated[str | None, typer.Argument(help="Explain all settings of this strategy instead.")] = None,
    as_json: Json = False,
) -> None:
    """Print the settings of calls that are made in this folder, each with its value and origin."""
    from ..settings import RuntimeSettings, settings_file, variable_of

    strategies = catalogue("strategies")
    names = [*(item["name"] for item in strategies), "merged"]  # the settings of a+b
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
        own = next((item["settings"] for item in strategies if item["name"] == name), None)
        if own is not None and name not in changed:  # loading the strategy would import torch
            sections[name] = [
                {"setting": s["name"], "value": s["default"], "from": "default", "meaning": s["description"]}
                for s in own
            ]
            continue
        from ..registry import registry
        from ..registry.builtin import MERGED

        cls = MERGED if own is None else registry().strategy(name)
        settings = _in_force(cls.settings_class, name, names)
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
        if strategy is not None:
            table.add_column("meaning")
        for item in settings:
            style = "dim" if item["from"] == "default" else ""
            value, meaning = item["value"], item["meaning"]
            cells = (
                (shown_value(value, meaning), item["from"])
                if strategy is None
                else (repr(value), item["from"], meaning)
            )
            table.add_row(item["setting"], *map(Text, cells), style=style)
        console.print(table)


def _in_force(cls: Any, section: str | None, sections: list[str]) -> list[dict[str, Any]]:
    """The settings of a section, each with its value, origin and meaning. section: a strategy's name; None for the loop's settings."""
    from ..settings import load_settings, origins

    values = load_settings(cls, section, {}, {}, sections=sections).model_dump(mode="json")
    places = origins(cls, section, sections=sections)
    return [
        {
            "setting": name,
            "value": value,
            "from": places[name].removeprefix("from ").removeprefix("in "),
            "meaning": cls.model_fields[name].description or "",
        }
        for name, value in values.items()
    ]
