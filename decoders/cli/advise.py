"""``decoders advise``: which strategy to use for a model and prompts, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import waiting
from .models import Dtype

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.advice import Advice


def advise(
    model: Annotated[
        str, typer.Argument(help="Folder, hub name, GGUF file or shape of a causal language model, or demo.")
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts like yours: a file (text, or JSON lines with text or messages), or kinds as decoders bench has."
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model to try as well.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="That it may take, loading apart.")] = 90.0,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Measure compiled steps, too.")] = True,
    dtype: Dtype = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; default: CUDA if there is one.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is standard output.")
    ] = None,
) -> None:
    """Say which strategy to use for a model, with which settings, how fast it is, and what else would help, in about two minutes.

    Strategies take turns on a few prompts, so give yours: speed depends on them. decoders bench measures more, and for longer.
    """
    from .benches import consoles, write_json

    progress_console, console = consoles(json_file)
    with waiting(progress_console, f"loading {model}") as status:
        import decoders

        from ..bench.shapes import SHAPES
        from ..prompts.reading import read_prompts
        from .bench_run import Subjects
        from .benches import duration

        contents = None if prompts is None else [content for _, _, content in read_prompts(prompts, None)]
        number_format = "float32" if dtype == "auto" and model in SHAPES else dtype
        target, tokenizer, assistant = Subjects().load(model, draft, number_format, device)

        def told(what: str, left: float) -> None:
            status.update(f"{what} · at most {duration(left)} left" if left else what)

        advice = decoders.advise(
            target,
            contents,
            tokenizer=tokenizer,
            assistant_model=assistant,
            seconds=seconds,
            compile=compile,
            progress=told,
        )
    print_advice(advice, console)
    if json_file is not None:
        write_json(advice.as_dict(), json_file)


def print_advice(advice: Advice, console: Console) -> None:
    """What to use, the code that does, what else would help, and the figures behind it."""
    from rich.text import Text

    from ..bench.tables import fitting, summary_table
    from ..bench.verdict import pooled

    tiers = {
        "uncompiled": [r for r in advice.records if r.compiled_share != 1],
        "compiled": [r for r in advice.records if r.compiled_share == 1],
    }
    together = {name: next(iter(pooled(records).values())) for name, records in tiers.items() if records}
    for table in fitting(summary_table(together), console.width):
        console.print(table)
    console.print(Text(advice.verdict.text, style="bold"))
    if advice.code:
        console.print(f"    {advice.code}", style="green", soft_wrap=True)
    for line in advice.lines:
        console.print(line)
    texts = f"{advice.prompts} prompt{'s' if advice.prompts > 1 else ''}, {advice.new_tokens} new tokens each"
    console.print(f"{texts}; {advice.seconds:.0f} s. decoders bench measures more.", style="dim")
