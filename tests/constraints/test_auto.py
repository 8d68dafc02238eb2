"""The choice among the built-in backends."""

from __future__ import annotations

import pytest

from decoders.constraints.auto import Auto
from decoders.constraints.base import Backend, CompiledGrammar, Language, Policy
from decoders.constraints.llguidance import LLGuidance
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError

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


def test_a_vocabulary_that_lacks_bytes_is_no_matter_for_tables() -> None:
    some = Vocabulary([b"a", b"b", None], [2])
    assert Auto().compile(Language("mine", regex="a+(b|c)"), some).backend == "table"
    with pytest.raises(GrammarError, match=r"^mine: no token.*byte 0x00"):
        Auto().compile(Language("mine", lark='start: "a"'), some)
