"""``decoders warmup``: compile ahead of time, so that the first real call of another process finds it done."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ..errors import SettingsError


def warmup(
    model: Annotated[str, typer.Argument(help='Path or hub name of a causal language model, or "demo".')],
    strategies: Annotated[
        list[str] | None, typer.Option("--strategy", "-s", help="Strategy to warm up; may be repeated.")
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(help='Draft model for strategies that need one ("demo": ours).')
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compile a model's core into torch.compile's cache on disk, and say how long it took."""
    from rich.console import Console

    from . import models

    wanted = strategies or ["autoregressive", "prompt_lookup"]
    needs = {name: models.needs_assistant(name) for name in wanted}
    console = Console(stderr=True, quiet=as_json)
    with console.status(f"loading {model}"):
        import decoders

        loaded, tokenizer = models.load(model, dtype)
        draft = models.load_assistant(assistant, model, dtype, any(needs.values()))
        decoders.enable(loaded, tokenizer=tokenizer)
    if draft is None and any(needs.values()):
        raise SettingsError(f"{next(n for n, need in needs.items() if need)} needs a draft model: --assistant")
    # Something repetitive, so that drafts are proposed and accepted in blocks of every size.
    inputs = tokenizer("one two three four one two three four one two", return_tensors="pt").to(loaded.device)
    rows = []
    for name in wanted:
        extra: dict[str, Any] = {"assistant_model": draft} if needs[name] else {}
        started = time.perf_counter()
        with console.status(f"compiling for {name}"):
            output: Any = loaded.generate(  # type: ignore[operator]
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                strategy=name,
                do_sample=False,
                max_new_tokens=16,
                return_dict_in_generate=True,
                **extra,
            )
        seconds = time.perf_counter() - started
        rows.append(
            {
                "strategy": name,
                "seconds": seconds,
                "compile_seconds": output.report.timings.compile,
                "compilations": output.report.compilations,
            }
        )
        if not as_json:
            graphs = output.report.compilations
            typer.echo(f"{name}: {seconds:.1f} s, {graphs} graph{'' if graphs == 1 else 's'} compiled")
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=2))
