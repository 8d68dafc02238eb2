"""Grammars of plugins: named like those of the library, made on first use, conflicts told."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
import torch
from typer.testing import CliRunner

import decoders
from decoders.cli import app
from decoders.constraints import library
from decoders.constraints.specs import Spec
from decoders.errors import GrammarError, PluginError, UnknownNameError
from decoders.registry import grammar_or_file, registry, resolve_grammar


class Grammars:
    """A plugin with one grammar as it is and one that is made on first use."""

    def __init__(self, **grammars: Any) -> None:
        self.grammars = grammars

    @decoders.hookimpl
    def decoders_grammars(self) -> Any:
        return self.grammars


def test_a_plugins_grammar_is_taken_by_name(speller: Any) -> None:
    made = []

    def answer() -> object:
        made.append(1)
        return decoders.choice(["yes", "no"])

    info = registry().register(Grammars(answer=answer, count=decoders.regex("[0-9]{3}")), "mine")
    assert (info.status, info.grammars, made) == ("loaded", ("answer", "count"), [])
    assert registry().grammars()["count"].provider == "(this process)"
    ids = torch.tensor([[40, 41, 42], [50, 51, 52]])
    options = dict(max_new_tokens=8, eos_token_id=1, pad_token_id=0, decoders_config={"compile": False})
    out = speller.generate(
        ids, strategy="grammar", grammar=["answer", "count"], return_dict_in_generate=True, **options
    )
    spelt = vars(speller)["generate"].tokenizer
    answered, counted = (spelt.decode(row[3:], skip_special_tokens=True) for row in out.sequences)
    assert answered in ("yes", "no") and counted.isdigit() and len(counted) == 3
    assert [use.name for use in out.report.grammars] == ["answer", "count"] and made


def test_names_of_the_library_stay_its_own() -> None:
    info = registry().register(Grammars(json=decoders.regex("x"), mine=decoders.regex("y")), "greedy")
    assert info.status == "conflict" and "The built-in keeps the name" in str(info.error)
    assert resolve_grammar("json") == grammar_or_file("json.lark")
    assert set(library.plain_names()) | {"mine"} == set(registry().grammars())


def test_two_plugins_with_one_name_leave_it_to_nobody() -> None:
    for name in ("one", "two"):
        registry().register(Grammars(shared=decoders.regex(name)), name)
    with pytest.raises(PluginError, match="Grammar 'shared' is claimed by 'one'.* and 'two'"):
        resolve_grammar("shared")


def test_misspelt_names_are_told_the_nearest_of_all() -> None:
    registry().register(Grammars(invoice=decoders.regex("x")), "mine")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'invoice'\?"):
        resolve_grammar("invoce")


def test_types_are_grammars_and_not_called() -> None:
    registry().register(Grammars(verdict=Literal["yes", "no"], numbers=list[int], maybe=int | None), "mine")
    specs = [resolve_grammar(name) for name in ("verdict", "numbers", "maybe")]
    assert all(isinstance(spec, Spec) for spec in specs)
    assert [spec.label for spec in specs[:2]] == ["verdict", "numbers"]


def test_a_function_that_makes_nothing_is_told_by_name() -> None:
    registry().register(Grammars(nothing=lambda: None), "mine")
    with pytest.raises(GrammarError, match="'nothing'.*returned None"):
        resolve_grammar("nothing")


@pytest.mark.parametrize(
    ("grammars", "reason"),
    [({"Bad Name": decoders.regex("x")}, "snake_case"), ({"number": 3}, "grammar 'number' is int")],
)
def test_what_is_no_grammar_is_refused(grammars: dict[str, Any], reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        registry().register(Grammars(**grammars), "bad")


def test_the_command_lists_and_prints_them() -> None:
    registry().register(Grammars(digits=decoders.regex("[0-9]+")), "mine")
    listed = json.loads(CliRunner().invoke(app, ["grammars", "--json"]).stdout)
    assert next(each for each in listed if each["name"] == "digits")["provider"] == "(this process)"
    assert "[0-9]+" in CliRunner().invoke(app, ["grammars", "digits"]).stdout


def test_a_function_that_fails_names_its_grammar_and_its_line() -> None:
    def fails() -> object:
        raise KeyError("form")

    registry().register(Grammars(form=fails), "house")
    with pytest.raises(
        GrammarError, match=r"function for grammar 'form' failed: KeyError: 'form' \(.*test_grammars.py:\d+\)"
    ):
        resolve_grammar("form")
