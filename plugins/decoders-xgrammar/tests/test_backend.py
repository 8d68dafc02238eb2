"""Runs the kit for grammar backends on xgrammar. The checks that fail with xgrammar 0.2.8 are listed, and must still fail."""

from __future__ import annotations

import itertools
import re

import pytest
from decoders_xgrammar import XGrammar

import decoders
import decoders.registry
from decoders.constraints import Language
from decoders.errors import GrammarError
from decoders.testing.grammars import CHECKS, check_grammar
from decoders.testing.languages import Reference, byte_vocabulary, references

#: The checks that fail, with their language and the reason.
DEVIATIONS = {
    ("long characters", "check_forced"): "forced bytes within a character are not reported",
    ("any character but one", "check_masks"): "bytes of halves of surrogate pairs are let through",
    ("any text", "check_masks"): "bytes of halves of surrogate pairs are let through",
}
REGULAR = [reference for reference in references() if reference.language.regex is not None]


@pytest.mark.parametrize("reference", REGULAR, ids=lambda each: f"{each.language.name}-{len(each.vocabulary)}")
def test_passes_the_kit_but_for_the_deviations(reference: Reference) -> None:
    language = Language(reference.language.name, regex=reference.language.regex)
    if language.name == "control characters":
        with pytest.raises(GrammarError, match="null characters"):
            XGrammar().compile(language, reference.vocabulary)
        return
    grammar = XGrammar().compile(language, reference.vocabulary)
    for check in CHECKS:
        if (language.name, check.__name__) not in DEVIATIONS:
            check_grammar(grammar, reference, checks=[check])


def test_the_deviations_are_still_there() -> None:
    deviating = set()
    for reference in REGULAR:
        for name, check in DEVIATIONS:
            if name == reference.language.name:
                grammar = XGrammar().compile(Language(name, regex=reference.language.regex), reference.vocabulary)
                try:
                    check_grammar(grammar, reference, checks=[one for one in CHECKS if one.__name__ == check])
                except AssertionError:
                    deviating.add((name, check))
    assert deviating == set(DEVIATIONS)


def test_what_it_does_not_read_is_refused() -> None:
    vocabulary = byte_vocabulary()
    for spec, policy in (
        (decoders.grammar('start: "a"'), "full"),
        (decoders.regex("a"), "canonical"),
        *(
            (decoders.regex(pattern), "full")
            for pattern in (r"\p{Greek}", r"[\P{L}]", r"\w", r"a\W", r"[^\d]", r"\S", r"\\\s", r"[\^a]")
        ),
    ):
        with pytest.raises(GrammarError):
            XGrammar().compile(spec.language(), vocabulary, policy)
    for regex in ("[a-z&&[^aeiou]]", "[[:alpha:]]", "[a-z--b]", "[a~~b]"):
        with pytest.raises(GrammarError, match="otherwise than Rust"):
            XGrammar().compile(Language("classes", regex=regex), vocabulary)


@pytest.mark.parametrize(
    "pattern",
    ["a.", r"[.]a|\.b", r"[\].]\\.", r"\\w", r"[^\n]b", r"[\\d]{2}", r"\x0aa", r"[\x61\x0ab]b", r"\\x?[\x64]?"],
)
def test_a_pattern_means_what_it_means_in_python(pattern: str) -> None:
    vocabulary = byte_vocabulary()
    grammar = XGrammar().compile(Language("pattern", regex=pattern), vocabulary)
    for text in map("".join, itertools.product("ab.\n\\wd]", repeat=2)):
        matcher = grammar.start()
        tokens = vocabulary.longest_tokens(text.encode())
        accepted = matcher.advance(tokens) == len(tokens) and matcher.accepting
        assert accepted == (re.fullmatch(pattern, text) is not None), text


def test_calls_take_it_by_name() -> None:
    assert decoders.registry.registry().grammar_backend("xgrammar") is XGrammar
