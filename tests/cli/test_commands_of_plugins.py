"""Commands that plugins add: found in their group, told where they clash or cannot be used, and never in the way of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

import decoders
from decoders.cli import app, catalogue
from decoders.errors import PluginError, SettingsError
from decoders.registry import registry, reset_registry


def weigh(model: Annotated[str, typer.Argument(help="A model.")] = "demo") -> None:
    """Say how much a model weighs."""
    if model == "nothing":
        raise SettingsError("nothing weighs nothing")
    typer.echo(f"{model}: heavy")


def unreadable(value: int | str) -> None:
    """Has a parameter that Typer does not know."""


class Plugin:
    def __init__(self, commands: Any) -> None:
        self.commands = commands

    @decoders.hookimpl
    def decoders_commands(self) -> Any:
        return self.commands


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    reset_registry()
    yield
    reset_registry()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_an_unknown_command_loads_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "catalogue", lambda kind: [{"name": "weigh"}])
    monkeypatch.setattr(catalogue, "_commands_of_plugins", None)
    done = run("wei")
    assert done.exit_code == 2 and "Did you mean 'weigh'?" in done.stderr, done.output


def test_a_command_is_found_at_the_top_and_in_a_group() -> None:
    info = registry().register(Plugin({"weigh": weigh, "bench weigh-all": weigh}), "scales")
    assert info.commands == ("weigh", "bench weigh-all") and info.status == "loaded"
    assert run("weigh", "mine").output == "mine: heavy\n"
    assert run("bench", "weigh-all").output == "demo: heavy\n"
    assert "Say how much a model weighs" in run("--help").output
    shown = run("bench", "--help").output
    assert "weigh-all" in shown and "A model" in run("bench", "weigh-all", "--help").output
    assert run("train", "weigh").exit_code == run("bench", "weigh").exit_code == 2
    assert ["weigh", "bench weigh-all"] in [
        plugin["commands"] for plugin in json.loads(run("plugins", "--json").output)
    ]


def test_its_expected_errors_end_in_one_line() -> None:
    registry().register(Plugin({"weigh": weigh}), "scales")
    done = run("weigh", "nothing")
    assert done.exit_code == 2 and "error: nothing weighs nothing" in done.stderr


@pytest.mark.parametrize(
    ("name", "owner"), [("bench load", "load"), ("serve", "serve"), ("train", "train"), ("serve weigh", "serve")]
)
def test_a_command_of_this_package_keeps_its_name(name: str, owner: str) -> None:
    registry().register(Plugin({name: weigh, "weigh": weigh}), "scales")
    listed = {info["name"]: info for info in json.loads(run("plugins", "--json").stdout)}
    assert listed["scales"]["error"] == (
        f"command {name!r} cannot be used: {owner!r} is a command of this package, which keeps its name"
    )
    assert "weighs" not in run(*name.split(), "--help").output and run("weigh").output == "demo: heavy\n"


def test_a_plugin_has_groups_of_its_own_and_a_command_is_no_group() -> None:
    registry().register(Plugin({"scales weigh": weigh, "scales tare": weigh}), "scales")
    assert run("scales", "weigh", "mine").output == "mine: heavy\n"
    assert "scales" in run("--help").output
    shown = run("scales", "--help").output
    assert "weigh" in shown and "tare" in shown and "Say how much a model weighs" in shown
    registry().register(Plugin({"scales": weigh}), "balance")
    listed = {info["name"]: info for info in json.loads(run("plugins", "--json").stdout)}
    assert "'scales' is a command, not a group" in listed["scales"]["error"]


def test_a_name_that_two_plugins_claim_belongs_to_neither() -> None:
    registry().register(Plugin({"weigh": weigh}), "scales")
    info = registry().register(Plugin({"weigh": weigh}), "balance")
    assert info.error is not None and "'scales'" in info.error and "'balance'" in info.error
    assert run("weigh").exit_code == 2


def test_a_function_that_cannot_be_read_leaves_the_others_usable() -> None:
    registry().register(Plugin({"weigh": weigh, "odd": unreadable}), "scales")
    assert run("weigh").output == "demo: heavy\n"
    assert run("--help").exit_code == 0
    done = run("odd")
    assert done.exit_code == 2 and "command 'odd' cannot be used" in done.stderr
    listed = {info["name"]: info for info in json.loads(run("plugins", "--json").stdout)}
    assert listed["scales"]["status"] == "failed" and "'odd'" in listed["scales"]["error"]
    assert run("plugins", "--strict").exit_code == 1
    findings = json.loads(run("doctor", "--json").stdout)
    assert any(f["status"] == "problem" and "'odd'" in f["detail"] for f in findings)


@pytest.mark.parametrize("command", ["train demo", "bench device", "bench fresh --again", "bench load-beside my-model"])
def test_a_command_of_the_laboratory_says_where_it_is(command: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODERS_PLUGINS_BLOCK", "lab")
        done = run(*command.split())
    assert done.exit_code == 2
    message = " ".join(done.stderr.replace("\u2502", " ").split())
    assert f"'{' '.join(command.split()[:2])}' is a command of decoders-lab, a separate distribution" in message
    assert "Did you mean" not in message and "Possible" not in message


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ([weigh], "must return a dict of functions by name, not list"),
        ({"Weigh": weigh}, "name must be like 'weigh', or 'bench weigh'"),
        ({"bench weigh all": weigh}, "or 'bench weigh' in a group, not"),
        ({"weigh": "weigh"}, "must be a function, not 'weigh'"),
        ({"weigh": lambda: None}, "has no docstring"),
    ],
)
def test_what_is_no_command_is_refused(commands: Any, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        registry().register(Plugin(commands), "scales")
