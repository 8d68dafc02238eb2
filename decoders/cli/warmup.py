"""``decoders warmup``: compile ahead of time, so that the first real call of another process finds it done."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import SettingsError
from .console import plain_console, waiting


def warmup(
    model: Annotated[str, typer.Argument(help='Path or hub name of a causal language model, or "demo".')],
    strategies: Annotated[
        list[str] | None, typer.Option("--strategy", "-s", help="Strategy to warm up; may be repeated.")
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(help='Draft model for strategies that need one ("demo": ours).')
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a batch to warm up for; may be repeated.")] = None,
    sampling: Annotated[bool, typer.Option("--sampling", help="Warm up drawing tokens, too.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Pack a model's weights and compile it into torch.compile's cache on disk, and say how long that took."""
    from . import models

    names = strategies or ["autoregressive", "prompt_lookup"]
    needs = {name: models.needs_assistant(name) for name in names}
    console = plain_console(stderr=True, quiet=as_json)
    with waiting(console, f"loading {model}"):
        import decoders

        loaded, tokenizer = models.load(model, dtype)
        draft = models.load_assistant(assistant, model, dtype, any(needs.values()))
    if draft is None and any(needs.values()):
        raise SettingsError(f"{next(n for n, need in needs.items() if need)} needs a draft model: --assistant")
    with waiting(console, "packing and compiling"):
        done = decoders.warmup(
            loaded, strategies=names, rows=rows or [1], assistant_model=draft, sampling=sampling, tokenizer=tokenizer
        )
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(done), indent=2))
        return
    typer.echo(f"packed in {done.pack_seconds:.1f} s")
    for part in done.parts:
        graphs = f"{part.compilations} graph{'' if part.compilations == 1 else 's'} compiled"
        of = f"{part.strategy}, {part.rows} row{'' if part.rows == 1 else 's'}{', sampled' if part.sampling else ''}"
        typer.echo(f"{of}: {part.seconds:.1f} s, {graphs}")
