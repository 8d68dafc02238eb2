"""The choice among the built-in backends."""

from __future__ import annotations

import pytest

from decoders.constraints.auto import Auto, least_states
from decoders.constraints.base import Backend, CompiledGrammar, Language, Policy
from decoders.constraints.llguidance import LLGuidance
from decoders.constraints.table import Table
from decoders.constraints.table.determinise import determinise, minimise
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError
from decoders.testing.languages import REGEXES

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), None], [256])


class Small(Backend):
    """Reads nothing but short regular expressions."""

    name = "small"

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        if language.regex is None:
            raise GrammarError(f"{language.name}: it has no regular expression")
        if len(language.regex) > 5:
            raise GrammarError(f"{language.name}: more than 5 states", "maxLength", "$.a")
        grammar = LLGuidance().compile(language, vocabulary, policy)
        grammar.backend = "small"
        return grammar


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Auto, "choices", (Small, LLGuidance))


@pytest.mark.parametrize(
    ("language", "backend"),
    [
        (Language("short", regex="a*"), "small"),
        (Language("both", regex="a*", lark='start: "a"*'), "small"),
        (Language("long", regex="abcabc"), "llguidance"),
        (Language("recursive", lark='start: "(" start ")" |'), "llguidance"),
    ],
)
@pytest.mark.usefixtures("_small")
def test_the_first_backend_that_can_is_taken(language: Language, backend: str) -> None:
    grammar = Auto().compile(language, BYTES, "canonical")
    assert (grammar.backend, grammar.policy) == (backend, "canonical")


@pytest.mark.usefixtures("_small")
def test_an_error_names_the_reasons_of_all_and_keeps_the_keyword() -> None:
    with pytest.raises(GrammarError) as caught:
        Auto().compile(Language("mine", regex="abc(?=d)"), BYTES)
    text = str(caught.value)
    assert text.startswith("mine: no backend can compile it. small: more than 5 states; llguidance: llguidance cannot")
    assert "look-around" in text
    assert (caught.value.keyword, caught.value.path) == ("maxLength", "$.a")


@pytest.mark.parametrize(
    ("language", "backend"),
    [
        (Language("small", regex="[a-z]{1,9}"), "table"),
        (Language("too many states", regex="[ab]*a[ab]{14}"), "llguidance"),
        (Language("recursive", lark='start: "(" start ")" |'), "llguidance"),
    ],
)
def test_tables_are_taken_as_long_as_they_are_small(language: Language, backend: str) -> None:
    assert Auto().compile(language, BYTES).backend == backend


@pytest.mark.parametrize(
    "regex",
    [
        r'"(?:[^\x00-\x1F"\\]|\\["\\bfnrt]){0,500}"',
        "[ab]{5000}",
        "((a{100}){100}){100}",
        r'\[(?:"[^"]{0,60}",){1,20}\]',
    ],
)
def test_a_table_that_will_be_too_large_is_not_begun(regex: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(self: Table, *_: object) -> CompiledGrammar:
        raise AssertionError("asked for a table")

    monkeypatch.setattr(Table, "compile", compile)
    assert Auto().compile(Language("long", regex=regex), BYTES).backend == "llguidance"


def test_a_large_table_is_tried_where_llguidance_refuses() -> None:
    some = Vocabulary([b"a", b"b", None], [2])
    assert Auto().compile(Language("ambiguous", regex="(a{5000})?a*"), some).backend == "table"
    with pytest.raises(GrammarError, match=r"^mine: no backend can compile it\. llguidance: no token.*; table: .*4096"):
        Auto().compile(Language("mine", regex="[ab]{5000}"), some)


@pytest.mark.parametrize(
    "regex",
    [
        *REGEXES.values(),
        r"\w{5}",
        r"[^\d]{9}",
        ".{12}x",
        "[あ-ん]{2,30}",
        "(?:ab|cd|[ef]){20}",
        "(?:a{10}|b){10,}",
        "[^あ]{10}",
    ],
)
def test_an_estimate_is_below_the_states_of_the_table(regex: str) -> None:
    states = len(minimise(determinise(regex)).next)
    assert least_states(regex) <= states


def test_what_counts_nothing_or_is_no_expression_has_no_estimate() -> None:
    assert [least_states(regex) for regex in ("[a-z]+(x|y)*", "a(", "(a{10})(?=b)", "a{9}")] == [0, 0, 0, 0]
    least_states("(" * 5000 + "a" + "){10}" * 5000)


def test_a_vocabulary_that_lacks_bytes_is_no_matter_for_tables() -> None:
    some = Vocabulary([b"a", b"b", None], [2])
    assert Auto().compile(Language("mine", regex="a+(b|c)"), some).backend == "table"
    with pytest.raises(GrammarError, match=r"^mine: no token.*byte 0x09"):
        Auto().compile(Language("mine", lark='start: "a"'), some)
