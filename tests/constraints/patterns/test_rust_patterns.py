"""Patterns of Pydantic, which are Rust's, mean in a schema what they mean to Pydantic."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import SchemaError, SchemaValidator, core_schema

from decoders.constraints.constructors import json_schema
from decoders.constraints.patterns import automata, ecma
from decoders.constraints.patterns.rust import in_ecma
from decoders.errors import GrammarError

from ..schemas.spelling import spell

CHARACTERS = st.sampled_from([*"abcz09_-&~[]^:. \n", "é", "😀"])
TEXTS = st.lists(CHARACTERS, max_size=4).map("".join)
ITEMS = st.sampled_from([
    *"abz09_-&~^:", "a-c", "0-9", r"\d", r"\w", r"\s", r"\-", r"\]", r"\x61", r"\x{1F600}", r"\u0061",
    "[:alpha:]", "[:^digit:]", "[:punct:]", "[:foo:]", "&&", "--", "~~", "é", "]", r"\n",
])  # fmt: skip
CLASSES = st.recursive(
    st.lists(ITEMS, min_size=1, max_size=5).map(lambda items: f"[{''.join(items)}]"),
    lambda inner: st.lists(ITEMS | inner, min_size=1, max_size=5).map(lambda items: f"[{''.join(items)}]"),
    max_leaves=3,
)
ATOMS = CLASSES | st.sampled_from(
    [".", "a", "(?:ab)", "(?P<n>a|b)", r"\A", r"\z", r"\a", r"\.", "^", "$", "|", r"\pN", r"\<"]
)
PATTERNS = st.lists(st.tuples(ATOMS, st.sampled_from(["", "", "", "*", "+?", "{,2}", "{1}", "**"])), min_size=1, max_size=4).map(
    lambda parts: "".join(atom + count for atom, count in parts)
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(PATTERNS, st.lists(TEXTS, min_size=6, max_size=12))
def test_pattern_matches_what_pydantic_matches(pattern: str, texts: list[str]) -> None:
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError:
        assume(False)
    try:
        conditions = ecma.strings(in_ecma(pattern))
    except GrammarError:
        assume(False)
    for text in texts:
        found = all(automata.matches(tree, text) is good for tree, good in conditions)
        valid = validator.isinstance_python(text)
        # Rust has more digits, letters and blanks than ECMA-262, so what is outside of them is less; a dot is more.
        ascii_only = text.isascii() and "\n" not in text
        assert found == valid if ascii_only else not found or valid or "[" in pattern, (text, in_ecma(pattern))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[[:alpha:]]{2}$", "^[A-Za-z]{2}$"), ("^[a-c--b]$", "^[ac]$"), ("^[[a]b]$", "^[ab]$"), ("[]a]", r"[\]a]"),
        ("[a-z&&[aeiou]--e]", "[aiou]"), ("^a{,3}$", "^a{0,3}$"), ("a**", "(?:a*)*"), (r"[\x{1F600}a]", r"[a\u{1F600}]"),
    ],
)  # fmt: skip
def test_pattern_that_reads_differently_is_written_as_ecma_has_it(pattern: str, expected: str) -> None:
    assert in_ecma(pattern) == expected


@pytest.mark.parametrize("pattern", ["^[a-z]+$", r"\bq", "(?i)a", r"^\d{3}\.[^a-c]$", r"\p{Lu}", "a|b+?"])
def test_pattern_that_reads_alike_or_not_at_all_stays(pattern: str) -> None:
    assert in_ecma(pattern) == pattern


def test_pattern_that_ecma_cannot_say_is_refused() -> None:
    class Word(BaseModel):
        x: Annotated[str, Field(pattern=r"\<a")]

    with pytest.raises(GrammarError, match="a word boundary"):
        json_schema(Word)


def accepted(kind: Any, value: Any) -> bool:
    return spell(json_schema(kind), value) is not None


@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")
def test_models_are_read_in_the_dialect_of_their_engine() -> None:
    class Rust(BaseModel):
        x: Annotated[str, Field(pattern="^[[:alpha:]]$")]
        keys: dict[Annotated[str, Field(pattern="^[a&&b]$|^c$")], int]

    class Python(BaseModel):
        model_config = ConfigDict(regex_engine="python-re")
        x: Annotated[str, Field(pattern="^[ab&&]$")]

    class Schema(BaseModel):
        x: str = Field(json_schema_extra={"pattern": "^[^]$"})

    assert accepted(Rust, {"x": "b", "keys": {"c": 1}})
    assert not accepted(Rust, {"x": "b", "keys": {"a": 1}}) and not accepted(Rust, {"x": ":]", "keys": {}})
    assert accepted(Python, {"x": "&"}) and accepted(Schema, {"x": "^"})


@pytest.mark.parametrize("pattern", [r"^[a-z--\d]$", r"^\P{L}$", "^[[:^alpha:]]$", r"^[\w~~a]$"])
def test_text_under_what_may_be_wider_is_judged_by_the_type(pattern: str) -> None:
    class Model(BaseModel):
        x: Annotated[str, Field(pattern=pattern)]

    language = json_schema(Model).language()
    assert language.whole is not None
    with pytest.raises(GrammarError):
        language.whole(json.dumps({"x": "🙂🙂"}))
