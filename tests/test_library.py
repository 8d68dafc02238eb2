"""The ready grammars accept what they should and nothing else."""

from __future__ import annotations

import json
import re

import llguidance
import pytest

from decoders import library
from decoders.errors import UnknownNameError

GOOD = {
    "iso_date": ["2024-02-29", "2000-02-29", "1999-12-31", "2023-04-30", "0001-01-01"],
    "uuid": ["f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "0190163d-8694-739b-aea5-966c26f8ad91"],
    "semver": ["0.0.0", "1.2.3", "1.0.0-alpha.1", "1.0.0-0A.is.legal", "1.0.0+build.5", "2.0.0-rc.1+exp.sha-5114f85"],
    "json": [
        '{"a": [1, 2.5e-3, -0], "b": {"c": null}}',
        "[]",
        "{}",
        '"\\u00e9\\n"',
        "true",
        json.dumps({"a": [1, {"b": "é\x7f"}], "c": []}, indent=2),
        json.dumps({"a": [1, {"b": ""}], "c": []}, separators=(",", ":")),
    ],
}
BAD = {
    "iso_date": [
        "1900-02-29",
        "2023-02-29",
        "2023-04-31",
        "2023-13-01",
        "2023-00-10",
        "2023-1-1",
        "2023-01-01T",
        "٢٠٢٣-01-01",
    ],
    "uuid": [
        "F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6",
        "f81d4fae7dec11d0a76500a0c91e6bf6",
        "f81d4fae-7dec-91d0-a765-00a0c91e6bf6",
        "f81d4fae-7dec-11d0-c765-00a0c91e6bf6",
    ],
    "semver": ["1", "1.2", "01.2.3", "1.2.3-", "1.2.3-01", "1.2.3+", "v1.2.3", "1.2.3-a..b"],
    "json": [
        "",
        "{",
        "[1,]",
        "{'a': 1}",
        "01",
        "+1",
        "1.",
        '{"a" 1}',
        '"\n"',
        '"\\x"',
        "nul",
        '{"a": 1,}',
        "[1 2]",
        "[1,      2]",
    ],
}
CASES = [(name, text, good) for table, good in ((GOOD, True), (BAD, False)) for name in table for text in table[name]]


def accepted_by_llguidance(grammar: str, text: str) -> bool:
    """Whether `text` is a complete sentence of `grammar`, byte by byte."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and (not tokens or matcher.consume_tokens(tokens))
        and matcher.is_accepting()
    )


@pytest.mark.parametrize(("name", "text", "good"), CASES)
def test_grammar_accepts_exactly_its_language(name: str, text: str, good: bool) -> None:
    grammar = library.read(name)
    if f"{name}.regex" in library.names():
        assert bool(re.fullmatch(grammar, text)) is good
        grammar = llguidance.grammar_from("regex", grammar)
    else:
        grammar = llguidance.grammar_from("lark", grammar)
    assert accepted_by_llguidance(grammar, text) is good


def test_every_grammar_is_tested() -> None:
    stems = {name.rsplit(".", 1)[0] for name in library.names()}
    assert stems == set(GOOD) == set(BAD)


def test_day_exists_in_every_accepted_date() -> None:
    """Every day of a whole Gregorian cycle, against the standard library's calendar."""
    from datetime import date, timedelta

    pattern = re.compile(library.read("iso_date"))
    days = {(date(1999, 12, 1) + timedelta(n)).isoformat() for n in range(146_097 // 20)}
    assert all(pattern.fullmatch(day) for day in days)
    for year in (1600, 1700, 1999, 2000, 2004, 2100):
        for month in range(1, 13):
            for day in (28, 29, 30, 31):
                text = f"{year}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(text)
                except ValueError:
                    assert not pattern.fullmatch(text), text
                else:
                    assert pattern.fullmatch(text), text


def test_suffix_is_optional_and_unknown_names_suggest() -> None:
    assert library.read("uuid") == library.read("uuid.regex")
    assert "\n" not in library.read("uuid")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'json\.lark'"):
        library.read("jsn.lark")
