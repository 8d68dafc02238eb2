"""Objects of a plugin's own types as the value of ``grammar=``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import decoders
from decoders.errors import GrammarError, PluginError
from decoders.registry import registry, resolve_grammar


@dataclass(frozen=True)
class Form:
    """What the plugin's users write."""

    fields: tuple[str, ...]


class LongForm(Form):
    """Is a form, too."""


class Fields(type):
    """Of classes that users write and give as they are."""


class Plugin:
    def __init__(self, types: Any) -> None:
        self.types = types

    @decoders.hookimpl
    def decoders_grammar_types(self) -> Any:
        return self.types


def of_form(form: Form) -> Any:
    return decoders.choice(form.fields)


def test_generate_takes_an_object_of_the_plugins_type(speller: Any) -> None:
    info = registry().register(Plugin({Form: of_form}), "forms")
    assert (info.status, info.grammar_types) == ("loaded", (f"{__name__}.Form",))
    ids = torch.tensor([[40, 41, 42], [50, 51, 52]])
    options = dict(max_new_tokens=8, eos_token_id=1, pad_token_id=0, decoders_config={"compile": False})
    for given in (Form(("yes", "no")), [LongForm(("yes",)), Form(("no",))]):
        out = speller.generate(ids, strategy="grammar", grammar=given, **options)
        spelt = vars(speller)["generate"].tokenizer
        assert all(spelt.decode(row[3:], skip_special_tokens=True) in ("yes", "no") for row in out)


class Columns(str):
    """A text that is not the name of a grammar."""


def test_a_type_of_strings_is_the_plugins_too() -> None:
    registry().register(Plugin({Columns: lambda text: decoders.regex(",".join(["[a-z]"] * int(text[4:])))}), "columns")
    assert resolve_grammar(Columns("csv:3")) == decoders.regex("[a-z],[a-z],[a-z]")


def test_the_plugins_function_may_return_the_name_of_a_grammar() -> None:
    registry().register(Plugin({Form: lambda form: "semver"}), "forms")
    assert resolve_grammar(Form(())) == resolve_grammar("semver")


def test_a_type_may_be_named_and_that_of_a_class_is_its_metaclass() -> None:
    registry().register(Plugin({f"{__name__}.Fields": lambda cls: decoders.choice([cls.__name__])}), "records")
    assert resolve_grammar(Fields("Invoice", (), {})) == decoders.choice(["Invoice"])


def test_where_a_package_defines_its_type_makes_no_difference() -> None:
    moved = type("Form", (), {"__module__": "shop._forms"})
    registry().register(Plugin({"shop.Form": lambda form: decoders.choice(["yes"])}), "shop")
    assert resolve_grammar(moved()) == decoders.choice(["yes"])
    assert registry().register(Plugin({moved: of_form}), "other").grammar_types == ("shop.Form",)


def test_the_built_in_plugin_names_its_types_by_the_same_hook() -> None:
    types = registry().grammar_types()
    assert "pathlib.Path" in types  # which Python 3.13 defines in pathlib._local
    assert "outlines.types.dsl.Term" in types and types["re.Pattern"].provider == "hf-decoders"


def test_two_plugins_with_one_type_leave_it_to_nobody_and_built_in_types_stay_built_in() -> None:
    for name in ("one", "two"):
        info = registry().register(Plugin({Form: of_form, "re.Pattern": of_form}), name)
    assert f"Grammar type '{__name__}.Form' is claimed by 'one'" in str(info.error)
    assert "'re.Pattern' is claimed by 'builtin'" in str(info.error)
    with pytest.raises(PluginError, match="claimed by 'one'.* and 'two'"):
        resolve_grammar(Form(("yes",)))


def fails(form: Form) -> Any:
    raise KeyError("no such field")


@pytest.mark.parametrize(
    ("function", "reason"),
    [(fails, "function for Form objects.*KeyError: 'no such field'"), (lambda form: None, "returned None for")],
)
def test_a_function_that_fails_is_told_by_its_type(function: Any, reason: str) -> None:
    registry().register(Plugin({Form: function}), "forms")
    with pytest.raises(GrammarError, match=reason):
        resolve_grammar(Form(("yes",)))


@pytest.mark.parametrize(
    ("types", "reason"),
    [
        ([Form], "must return a dict"),
        ({3: of_form}, "a type or its full name"),
        ({Form: "x"}, "needs a function"),
        ({dict: of_form}, "cannot claim 'dict'"),
        ({"builtins.type": of_form}, "cannot claim 'type'"),
    ],
)
def test_what_is_no_type_or_function_is_refused(types: Any, reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        registry().register(Plugin(types), "bad")


def test_other_objects_are_refused_with_what_can_be_given() -> None:
    with pytest.raises(GrammarError, match="What can be given"):
        resolve_grammar(Form(("yes",)))
