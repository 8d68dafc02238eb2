"""The command line ``decoders``: one file per command. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import DecodersError
from .console import plain_console


class Group(TyperGroup):
    """Commands whose expected errors (:class:`DecodersError`) end in one red line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:  # a context of click, or of typer's own copy of it, depending on the version
        try:
            return super().invoke(ctx)
        except DecodersError as error:
            if ctx.params.get("debug"):
                raise
            from rich.text import Text

            line = Text("error: " + " ".join(str(error).split()), style="red")
            plain_console(stderr=True).print(line, soft_wrap=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Group,
    name="decoders",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Faster decoding for Hugging Face causal language models.",
)


def _version(show: bool) -> None:
    if show:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of all commands; ``--debug`` is read by :class:`Group`."""


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="decoders")
    sys.exit(0)


def _register() -> None:
    from . import (
        bench,
        bench_fresh,
        bench_grammar,
        bench_load,
        bench_precision,
        bench_sampling,
        bench_serve,
        calibrate,
        demo,
        doctor,
        generate,
        grammars,
        listing,
        serve,
        train,
        train_draft,
        train_eagle3,
        train_medusa,
        warmup,
    )

    app.command()(demo.demo)
    app.command()(generate.generate)
    app.command()(warmup.warmup)
    app.command()(calibrate.calibrate)
    app.command()(listing.strategies)
    app.command()(listing.verifiers)
    app.command()(listing.grammar_backends)
    app.command()(listing.plugins)
    app.command()(grammars.grammars)
    app.command()(serve.serve)
    app.command()(doctor.doctor)
    train.app.command()(train_medusa.medusa)
    train.app.command()(train_eagle3.eagle3)
    train.app.command()(train_draft.draft)
    bench.app.command()(bench_fresh.fresh)
    bench.app.command()(bench_grammar.grammar)
    bench.app.command()(bench_load.load)
    bench.app.command()(bench_precision.precision)
    bench.app.command()(bench_sampling.sampling)
    bench.app.command()(bench_serve.serve)
    app.add_typer(bench.app, name="bench")
    app.add_typer(train.app, name="train")


_register()
