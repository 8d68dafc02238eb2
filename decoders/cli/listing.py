"""``decoders strategies``, ``verifiers``, ``grammar-backends``, ``grammars`` and ``plugins``: what there is and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import plain_console

if TYPE_CHECKING:
    from ..plugins import Entry
    from ..strategy import Strategy

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
STYLES = {"loaded": "green", "blocked": "dim", "failed": "red", "conflict": "yellow"}


def strategies(as_json: Json = False) -> None:
    """List the decoding strategies and their settings."""
    from ..plugins import registry

    _list(
        [describe(entry) for entry in registry().strategies().values()], as_json,
        strategy=lambda item: item["name"],
        exact=lambda item: _yes(item["exact"]),
        needs=lambda item: "\n".join(what for what in ("assistant", "grammar") if item[f"needs_{what}"]),
        what_it_does=lambda item: item["summary"],
        settings=lambda item: "\n".join(f"{s['name']} = {s['default']!r}" for s in item["settings"]),
    )  # fmt: skip


def describe(entry: Entry[Strategy]) -> dict[str, Any]:
    """A registered strategy as JSON-safe data."""
    settings = [
        {
            "name": name,
            "default": None if field.is_required() else field.get_default(call_default_factory=True),
            "required": field.is_required(),
            "description": field.description or "",
        }
        for name, field in entry.cls.settings_class.model_fields.items()
    ]
    return _facts(entry, "summary", "exact", "needs_assistant", "needs_grammar") | {"settings": settings}


def verifiers(as_json: Json = False) -> None:
    """List the verifiers: rules that decide how much of a draft is kept."""
    from ..plugins import registry

    entries = registry().verifiers().values()
    _list(
        [_facts(entry, "summary", "exact", "trees", "coupled") for entry in entries], as_json,
        verifier=lambda item: item["name"],
        exact=lambda item: _yes(item["exact"]),
        trees=lambda item: _yes(item["trees"]),
        what_it_does=lambda item: item["summary"],
        provider=_provider,
    )  # fmt: skip


def grammar_backends(as_json: Json = False) -> None:
    """List the grammar backends: what turns a grammar into masks over the next token."""
    from ..plugins import registry

    _list(
        [_facts(entry, "summary") for entry in registry().grammar_backends().values()], as_json,
        backend=lambda item: item["name"], what_it_does=lambda item: item["summary"], provider=_provider,
    )  # fmt: skip


def _facts(entry: Entry[Any], *attributes: str) -> dict[str, Any]:
    """What a registered class says of itself, and where it comes from."""
    own = {attribute: getattr(entry.cls, attribute) for attribute in attributes}
    return {"name": entry.name} | own | {"provider": entry.provider, "version": entry.version}


def _list(items: list[dict[str, Any]], as_json: bool, **columns: Callable[[dict[str, Any]], str]) -> None:
    """Prints `items` as JSON, or as a table with a column for each of `columns`."""
    if as_json:
        typer.echo(json.dumps(items, indent=2, default=str))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*(name.replace("_", " ") for name in columns), pad_edge=False, show_lines=True)
    for item in items:
        first, *others = (column(item) for column in columns.values())
        table.add_row(Text(first, style="bold"), *map(Text, others))
    plain_console().print(table)


def _provider(item: dict[str, Any]) -> str:
    return f"{item['provider']} {item['version']}".strip()


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def grammars(
    name: Annotated[str | None, typer.Argument(help="Print the text of this one instead.")] = None,
    as_json: Json = False,
) -> None:
    """List the ready grammars that ``generate(grammar=…)`` takes by name, or print one."""
    from ..constraints import library
    from ..plugins import registry, resolve_grammar
    from ..registry.kinds import canonical

    others = {n: entry for n, entry in registry().grammars().items() if n not in library.plain_names()}
    if name is not None:
        if canonical(name) in others:
            grammar = resolve_grammar(name)
            typer.echo(json.dumps({"name": canonical(name), "text": str(grammar)}) if as_json else str(grammar))
            return
        ready = library.find(name)
        typer.echo(json.dumps(asdict(ready), indent=2, ensure_ascii=False) if as_json else ready.text)
        return
    library_grammars = [library.find(file) for file in library.names()]
    if as_json:
        listed = [{key: value for key, value in asdict(ready).items() if key != "text"} for ready in library_grammars]
        listed += [{"name": n, "provider": entry.provider, "version": entry.version} for n, entry in others.items()]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("grammar", "kind", "what it accepts", pad_edge=False)
    for ready in library_grammars:
        table.add_row(Text(ready.name, style="bold"), ready.kind, Text(ready.description))
    for plugin_grammar, entry in others.items():
        table.add_row(Text(plugin_grammar, style="bold"), "", f"of {entry.provider} {entry.version}".strip())
    plain_console().print(table)


def plugins(
    as_json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any plugin failed or clashes.")] = False,
) -> None:
    """List the plugins found, with the reason where one is not used."""
    from ..plugins import registry
    from ..registry.kinds import BUILTIN
    from .extensions import unusable_commands

    unusable = unusable_commands()
    infos = [
        replace(info, status="failed", error=unusable[info.key]) if info.key in unusable else info
        for info in registry().plugins()
    ]
    if as_json:
        typer.echo(json.dumps([asdict(info) for info in infos], indent=2))
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table("plugin", "provider", "status", "strategies", "verifiers", "grammars", "other", pad_edge=False)
        for info in infos:
            table.add_row(
                info.name,
                f"{info.provider} {info.version}".strip(),
                Text(info.status, style=STYLES[info.status]),
                Text(", ".join(info.strategies)),
                Text(", ".join(info.verifiers)),
                # The library's own are what `decoders grammars` is for.
                Text(", ".join(info.grammars) if len(info.grammars) <= 8 else f"{len(info.grammars)} grammars"),
                Text(
                    ", ".join(
                        [
                            *(f"backend {n}" for n in info.grammar_backends),
                            *(f"observer {n}" for n in info.observers),
                            *(f"command {n}" for n in info.commands if info.name != BUILTIN),
                        ]
                    )
                ),
            )
        console = plain_console()
        console.print(table)
        for info in infos:  # below the table, where a narrow window leaves the remedy readable
            if info.error:
                console.print(Text(f"{info.name}: {info.error}", style=STYLES[info.status]))
    if strict and any(info.status in ("failed", "conflict") for info in infos):
        raise typer.Exit(1)
