"""What commands print, at 80 and at 120 columns, kept in the folder ``snapshots``. To write what they print now there:

DECODERS_SNAPSHOTS=write python -m pytest tests/cli/test_snapshots.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decoders.cli import app

from . import made_up

FOLDER = Path(__file__).with_name("snapshots")

#: By name: the arguments of a command, or what prints its tables, of made-up figures, where measuring them would take time.
CASES: dict[str, Sequence[str] | Callable[[Console], None]] = {
    "strategies": ["strategies"],
    "plugins": ["plugins"],
    "config": ["config", "prompt-lookup"],
    "verifiers": ["verifiers"],
    "grammar-backends": ["grammar-backends"],
    "grammars": ["grammars"],
    "bench": made_up.print_bench,
    "bench-groups": partial(made_up.print_bench, batches=(1, 4)),
    "bench-details": partial(made_up.print_bench, details=True),
    "bench-suite": made_up.print_suite,
    "bench-load": made_up.print_load,
    "demo": made_up.print_demo,
    "advise": made_up.print_advice,
    "calibrate": made_up.print_calibration,
    "generate-report": made_up.print_report,
    "warmup": made_up.print_warmup,
    "train": made_up.print_training,
    "doctor": made_up.print_findings,
    "help": ["--help"],
}

NUMBERS = re.compile(r"\d[\d.,]*\d|\d")


def printed(case: Sequence[str] | Callable[[Console], None], width: int) -> str:
    """What `case` prints on so many columns, without spaces at the ends of lines."""
    if callable(case):
        console = Console(width=width, markup=False)
        with console.capture() as capture:
            case(console)
        text = capture.get()
    else:
        done = CliRunner().invoke(app, list(case), env={"COLUMNS": str(width)})
        assert done.exit_code == 0, done.output
        text = done.stdout
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", CASES)
def test_a_command_prints_what_it_printed_and_cuts_nothing(name: str, width: int) -> None:
    text, path = printed(CASES[name], width), FOLDER / f"{name}.{width}.txt"
    if os.environ.get("DECODERS_SNAPSHOTS") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert not re.search(r"\w…", text), "a cell is cut"
    assert set(NUMBERS.findall(printed(CASES[name], 400))) <= set(NUMBERS.findall(text)), "a figure is cut"
    assert [line for line in text.splitlines() if len(line) > width] == []
