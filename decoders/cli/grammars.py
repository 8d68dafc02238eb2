"""``decoders grammars``: the library of ready grammars."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from .console import plain_console
from .listing import Json


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
