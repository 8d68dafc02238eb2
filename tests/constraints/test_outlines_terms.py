"""Terms of outlines as ``grammar=``."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from decoders.constraints.coerce import as_spec
from decoders.constraints.specs import Choice, Spec
from decoders.errors import GrammarError

from .test_coerce import accepts, assert_tells_apart

outlines = pytest.importorskip("outlines", reason="its releases exclude Python 3.14")
dsl, named = outlines.types.dsl, outlines.types

TERMS: list[tuple[Any, list[str], list[str]]] = [
    (named.email, ["ada@example.org"], ["ada", "ada@"]),
    (named.hex_color, ["#fff", "#a1b2c3"], ["#ffff", "fff"]),
    (named.Regex("^a+$"), ["aaa"], ["", "ab"]),
    (named.either("a", "b.c"), ["a", "b.c"], ["bxc", "ab"]),
    ("Answer: " + named.integer, ["Answer: 42"], ["Answer: ", "42"]),
    ("on " + named.date, ["on 2024-02-29"], ["on 2023-02-29"]),
    (named.digit.between(2, 3), ["12", "123"], ["1", "1234"]),
    (dsl.one_or_more("ab").optional(), ["", "ab", "abab"], ["a"]),
    (dsl.Choice(["a", 1, "b"]), ["a", "1", "b"], ["a1"]),
    (dsl.Choice(["a", named.integer]), ["a", "12"], ["b"]),
    ("x" + dsl.Choice(["a", "b"]), ["xa", "xb"], ["x"]),
    (dsl.JsonSchema({"type": "integer", "minimum": 3, "maximum": 5}), ["3", "5"], ["2", "6"]),
    ("n = " + dsl.JsonSchema({"type": "integer", "minimum": 3, "maximum": 5}), ["n = 4"], ["n = 2", "4"]),
    (dsl.CFG('start: "a" start "b" | "c"'), ["c", "aacbb"], ["ab", "acbb"]),
    (outlines.cfg('?start: "a"'), ["a"], ["b"]),
]


@pytest.mark.parametrize(("value", "good", "bad"), TERMS)
def test_terms_of_outlines_are_read_as_outlines_means_them(value: Any, good: list[str], bad: list[str]) -> None:
    assert_tells_apart(as_spec(value), good, bad)


@pytest.mark.parametrize("term", [dsl.Choice(["a.b", "1", "a.b"]), named.either("a.b", "1")])
def test_alternatives_that_are_texts_are_a_choice(term: Any) -> None:
    assert as_spec(term) == Choice(("a.b", "1"))  # a choice may be longer than a pattern


def test_terms_are_called_by_what_they_are() -> None:
    spec = as_spec(named.email)
    assert isinstance(spec, Spec) and spec.language().name.startswith("outlines Regex")


def test_a_template_of_outlines_is_not_a_grammar() -> None:
    with pytest.raises(GrammarError, match="What can be given"):
        as_spec(outlines.Template.from_string("a"))


def test_terms_of_outlines_that_are_no_automata_are_refused() -> None:
    with pytest.raises(GrammarError, match="look-around"):
        as_spec(named.isbn)
    with pytest.raises(GrammarError, match="not a regular expression"):
        as_spec("x" + dsl.CFG('start: "a"'))
    with pytest.raises(GrammarError, match="whitespace="):
        as_spec(dsl.JsonSchema({"type": "integer"}, whitespace_pattern=r"\s*"))


def test_a_term_as_a_field_must_match_the_whole_text() -> None:
    """outlines writes it as a pattern without anchors, which in a schema may match a part."""

    class Item(BaseModel):
        code: named.Regex("[0-9]{2}")  # type: ignore[valid-type]
        more: list[named.Regex("[a-c]")] = []  # type: ignore[valid-type]
        free: Annotated[str, Field(pattern="7")] = "7"

    spec = as_spec(Item)
    assert accepts(spec, '{"code": "12", "more": ["a"], "free": "x7x"}')
    assert not accepts(spec, '{"code": "123"}')
    assert not accepts(spec, '{"code": "12", "more": ["ab"]}')
