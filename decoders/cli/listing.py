"""``decoders strategies``, ``verifiers``, ``grammar-backends``, ``grammars`` and ``plugins``: what there is and where it comes from."""

from __future__ import annotations

import json
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

    listed = [describe(entry) for entry in registry().strategies().values()]
    if as_json:
        typer.echo(json.dumps(listed, indent=2, default=str))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("strategy", "exact", "needs", "what it does", "settings", pad_edge=False, show_lines=True)
    for item in listed:
        table.add_row(
            Text(item["name"], style="bold"),
            "yes" if item["exact"] else "no",
            "\n".join(what for what in ("assistant", "grammar") if item[f"needs_{what}"]),
            Text(item["summary"]),
            Text("\n".join(f"{s['name']} = {s['default']!r}" for s in item["settings"])),
        )
    plain_console().print(table)


def describe(entry: Entry[Strategy]) -> dict[str, Any]:
    """A registered strategy as JSON-safe data."""
    return {
        "name": entry.name,
        "summary": entry.cls.summary,
        "exact": entry.cls.exact,
        "needs_assistant": entry.cls.needs_assistant,
        "needs_grammar": entry.cls.needs_grammar,
        "provider": entry.provider,
        "version": entry.version,
        "settings": [
            {
                "name": name,
                "default": None if field.is_required() else field.get_default(call_default_factory=True),
                "required": field.is_required(),
                "description": field.description or "",
            }
            for name, field in entry.cls.settings_class.model_fields.items()
        ],
    }


def verifiers(as_json: Json = False) -> None:
    """List the verifiers: rules that decide how much of a draft is kept."""
    from ..plugins import registry

    entries = registry().verifiers().values()
    if as_json:
        attributes = ("summary", "exact", "trees", "coupled")
        listed = [
            {"name": entry.name}
            | {attribute: getattr(entry.cls, attribute) for attribute in attributes}
            | {"provider": entry.provider, "version": entry.version}
            for entry in entries
        ]
        typer.echo(json.dumps(listed, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("verifier", "exact", "trees", "what it does", "provider", pad_edge=False, show_lines=True)
    for entry in entries:
        table.add_row(
            Text(entry.name, style="bold"),
            "yes" if entry.cls.exact else "no",
            "yes" if entry.cls.trees else "no",
            Text(entry.cls.summary),
            f"{entry.provider} {entry.version}".strip(),
        )
    plain_console().print(table)


def grammar_backends(as_json: Json = False) -> None:
    """List the grammar backends: what turns a grammar into masks over the next token."""
    from ..plugins import registry

    entries = registry().grammar_backends().values()
    if as_json:
        listed = [
            {"name": e.name, "summary": e.cls.summary, "provider": e.provider, "version": e.version} for e in entries
        ]
        typer.echo(json.dumps(listed, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "what it does", "provider", pad_edge=False, show_lines=True)
    for entry in entries:
        provider = f"{entry.provider} {entry.version}".strip()
        table.add_row(Text(entry.name, style="bold"), Text(entry.cls.summary), provider)
    plain_console().print(table)


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
