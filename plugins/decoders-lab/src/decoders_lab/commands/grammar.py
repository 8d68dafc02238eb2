"""``decoders bench grammar``: the costs of grammars, by backend."""

from __future__ import annotations

from typing import Annotated

import typer

from decoders.cli.benches import JsonFile, conclude, consoles, pieces, progress_bar
from decoders.errors import SettingsError, UnknownNameError


def grammar(
    subjects: Annotated[
        list[str] | None,
        typer.Option("--grammar", "-g", help="Grammars to measure, comma-separated or repeated. Default: all."),
    ] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", "-b", help="Backends, comma-separated or repeated. Default: all but auto."),
    ] = None,
    vocabulary: Annotated[
        str, typer.Option(help="Tokens of the vocabularies, comma-separated; k is 1000.")
    ] = "4k,32k,128k",
    repeats: Annotated[int, typer.Option(min=1, help="Walks along each text, and turns at each tree.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure what grammars cost: to compile, until the first mask, per mask and per tree of draft tokens, in memory.

    The vocabularies are made up, with tokens mixed as in real ones. Names of grammars have no commas.
    """
    progress_console, console = consoles(json_file)
    sizes = vocabulary_sizes(vocabulary)

    from decoders.registry import registry, resolve_backend

    from .. import grammar as g
    from ..grammar import cost_tables
    from ..grammar_subjects import subjects as all_subjects
    from ..vocabularies import vocabulary as make_vocabulary

    known = {subject.name: subject for subject in all_subjects()}
    selected = []
    for name in pieces(subjects) or known:
        if name not in known:
            raise UnknownNameError("grammar", name, known)
        selected.append(known[name])
    names = pieces(backends) or [name for name in registry().grammar_backends() if name != "auto"]
    compilers = [resolve_backend(name) for name in names]
    costs: list[g.Cost] = []
    seconds: dict[tuple[str, int], float] = {}
    with progress_bar(progress_console, len(sizes) * len(selected) * len(compilers)) as advance:
        for size in sizes:
            tokens = make_vocabulary(size)
            for backend in compilers:
                seconds[backend.name, size] = g.prepare(backend, tokens)
            for subject in selected:
                costs += g.measure(subject, compilers, tokens, repeats, advance)
    for table in cost_tables(costs, seconds):
        console.print(table)
    prepared = [
        {"backend": name, "vocabulary": size, "seconds": prepare_seconds}
        for (name, size), prepare_seconds in seconds.items()
    ]
    run = {"repeats": repeats, "vocabularies": sizes, "backends": names, "nodes": g.NODES}
    conclude(console, json_file, run, prepared=prepared, costs=[c.as_dict() for c in costs])


def vocabulary_sizes(text: str) -> list[int]:
    """The numbers of tokens in a text: ``"4k,32000"`` gives ``[4000, 32000]``.

    Raises:
        SettingsError: `text` holds anything but numbers of at least 300, with or without a k.
    """
    sizes = []
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        number = part.removesuffix("k")
        if not number.isdecimal() or (size := int(number) * (1000 if part != number else 1)) < 300:
            raise SettingsError(f"--vocabulary takes numbers of tokens from 300 on, such as 4k,32000, not {part!r}")
        sizes.append(size)
    if not sizes:
        raise SettingsError("--vocabulary is empty: give numbers of tokens, such as 4k,32000")
    return list(dict.fromkeys(sizes))
