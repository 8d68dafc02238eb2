"""Commands that extend other commands have the same options; every command is found and has help."""

from __future__ import annotations

from typing import Any

import pytest
from decoders_lab.commands import COMMANDS
from typer.main import get_command

from decoders.cli import app
from decoders.cli.catalogue import OF_LAB


def options(name: str) -> dict[str, Any]:
    command = get_command(app)
    for word in name.split():
        command = command.get_command(None, word)
    return {option: parameter.default for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize(
    ("ours", "extended", "added", "left_out"),
    [
        ("bench beside", "bench", {"--engine", "-e", "--scale"}, {"--shape"}),
        ("bench load-beside", "bench load", {"--vllm", "--scale"}, set()),
    ],
)
def test_an_extended_command_takes_what_the_other_takes(
    ours: str, extended: str, added: set[str], left_out: set[str]
) -> None:
    own, theirs = options(ours), options(extended)
    assert set(own) - set(theirs) == added and set(theirs) - set(own) == left_out
    assert all(own[name] == theirs[name] for name in set(own) & set(theirs))


def test_every_command_is_found() -> None:
    for name in COMMANDS:
        assert options(name), name
    assert set(COMMANDS) == set(OF_LAB), "what hf-decoders says of commands that are missing"
