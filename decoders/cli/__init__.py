"""The command line ``decoders``, with one file for each group of commands. Only commands that need torch import it."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import sys
import warnings
from typing import Annotated, Any

import typer

from ..errors import DecodersError
from . import catalogue
from .console import plain_console

#: Options that users of transformers may try, with advice on what to use instead.
INSTEAD = {
    "--num-beams": "No strategy does beam search; transformers' own generate, without strategy=, does",
    "--do-sample": "--temperature 1 samples; without it decoding is greedy",
    "--draft-model": "--assistant names the draft model; demo, advise and bench call it --draft",
    "--assistant": "--draft names the draft model here",
    "--draft": "--assistant names the draft model here",
    "--max-length": "--max-new-tokens sets the number of tokens",
}
#: Advice for users who give a command too many arguments, by command.
FURTHER = {
    "generate": "Put a prompt of several words in quotes",
    "strategies": "`decoders config STRATEGY` explains the settings of a strategy",
}
#: Click's ``UsageError``, the base of ``typer.BadParameter``. Typer does not export it.
UsageError: Any = typer.BadParameter.__mro__[1]


class Group(catalogue.ExtensibleGroup):
    """A group of commands. Expected errors print one red line. The exit code is 2 for a :class:`DecodersError`, 1 for an OSError."""

    def invoke(self, ctx: Any) -> Any:  # a context of click or, depending on the version, of typer's own copy of click
        try:
            result = super().invoke(ctx)
            typer.echo(nl=False)  # flushes, so that a failing write is reported
            return result
        except typer.BadParameter as error:
            _name_value(error)
            raise
        except UsageError as error:
            if (hint := INSTEAD.get(getattr(error, "option_name", ""))) is not None:
                error.message += f". {hint}"
                error.possibilities = ()
            elif (
                "extra argument" in error.message
                and (hint := FURTHER.get(getattr(error.ctx, "info_name", ""))) is not None
            ):
                error.message += f". {hint}"
            raise
        except DecodersError as error:
            if ctx.params.get("debug"):
                raise
            # On the command line, assistant_model= is called --assistant. In quotes, the name was typed by the user and is kept.
            _print_error(re.sub(r"(?<![\w'\"])assistant_model=?(?!\w)", "--assistant", str(error)))
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            _print_line(str(error) or "interrupted", "yellow")
            raise
        except OSError as error:
            if error.errno == errno.EPIPE or ctx.params.get("debug"):  # typer handles a closed pipe
                raise
            _forget_output()
            _print_error(f"{error} (--debug shows where)")
            raise typer.Exit(1) from error


def _name_value(error: typer.BadParameter) -> None:
    """Adds the wrong value to typer's error message, which names only the allowed values."""
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError):
        problem = error.__cause__.errors()[0]
        named = problem["type"] == "value_error"  # the error of a choice, whose message names the value already
        error.message = (
            error.message.removeprefix("Value error, ") if named else f"{error.message}, not {problem['input']!r}"
        )


def _print_error(message: str) -> None:
    _print_line(f"error: {message}", "red")


@functools.cache  # prints each message once; Python's own filter would print it once for each line of code that warns
def _print_warning(message: str) -> None:
    _print_line(f"warning: {message}", "yellow")


def _print_line(message: str, style: str) -> None:
    from rich.text import Text

    plain_console(stderr=True).print(Text(" ".join(message.split()), style=style), soft_wrap=True)


def _forget_output() -> None:
    """Discards the buffered output if standard output cannot be written, so that the process can end."""
    try:
        typer.echo(nl=False)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=Group,
    name="decoders",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Faster decoding for Hugging Face causal language models.",
)
catalogue.command_line = app


def _version(show: bool) -> None:
    if show:
        from ..common.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of all commands. :class:`Group` reads ``--debug``."""


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal's encoding lacks are escaped. By default they would raise an error.
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *place: _print_warning(str(message))
    app(prog_name="decoders")
    sys.exit(0)


def _register() -> None:
    from . import bench, bench_load, demo, doctor, generate, listing, new_plugin, prepare, serve, train, train_drafters

    groups = {
        app: (
            demo.demo, generate.generate, prepare.warmup, prepare.calibrate, prepare.advise, listing.strategies,
            listing.verifiers, listing.grammar_backends, listing.plugins, listing.grammars, listing.config, serve.serve,
            new_plugin.new_plugin, doctor.doctor,
        ),
        train.app: (train_drafters.medusa, train_drafters.eagle3, train_drafters.dflash, train_drafters.draft),
        bench.app: (bench_load.load,),
    }  # fmt: skip
    for group, commands in groups.items():
        for command in commands:
            group.command()(command)
    app.add_typer(bench.app, name="bench")
    app.add_typer(train.app, name="train")


_register()
