"""Patterns as automata and as expressions over JSON text; interegular and `re` are the oracles."""

from __future__ import annotations

import itertools
import json
import random
import re
import tracemalloc

import interegular
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interegular.fsm import FSM, Alphabet

from decoders.constraints.patterns import automata, characters, ecma, limits
from decoders.constraints.patterns.tree import slashed
from decoders.constraints.schemas import string_text
from decoders.errors import GrammarError

PATTERNS = [
    "^a|b$", "^[a-z]+(-[A-Z]{2})?$", "a.c", r"[^\s:]+:\d", "^$", "a{2,3}", "(^a)?b", "^(?:a|(b)*)c?$", "a+?b", r"^\S*\\?$",
    "(a|$)b?", "^[^b]{2}", '"', "", "^(a{2}|b){1,2}$", "[\\w-]:", "x{", "^a$|^b$",
]  # fmt: skip
strings = st.text(st.sampled_from('abcZ-_: 1"\\\n\té\u2028😀'), max_size=7)


@pytest.mark.parametrize("examples", [30, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_found_where_re_finds_it(pattern: str, examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(strings)(lambda text: compare_with_re(pattern, text)))()


def compare_with_re(pattern: str, text: str) -> None:
    found = bool(
        re.search(
            pattern.replace("$", r"\Z").replace("\\d", "[0-9]").replace(".", "[^\n\r\u2028\u2029]"), text, re.ASCII
        )
    )
    if r"\s" in pattern or r"\S" in pattern:
        found = bool(re.search(pattern.replace("$", r"\Z"), text))  # ECMA's white space is Unicode's
    conditions = ecma.strings(pattern)
    assert all(automata.matches(rx, text) is good for rx, good in conditions) is found
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    expression = string_text.expression(automata.automaton(conditions))
    tree = string_text.inside(conditions[0][0])
    assert expression is not None
    assert tree is not None
    assert bool(re.fullmatch(expression, written)) is found
    assert bool(re.fullmatch(tree, written)) is found


def over(machine: FSM, letters: str) -> FSM:
    """`machine` with nothing but `letters`, as interegular makes automata of its own patterns."""
    symbols = {
        letter: symbol
        for symbol, ranges in machine.alphabet.by_transition.items()
        for letter in letters
        if characters.contains(tuple(ranges), ord(letter))
    }
    moves = {state: {s: to for s, to in after.items() if s in symbols.values()} for state, after in machine.map.items()}
    return FSM(Alphabet(symbols), machine.states, machine.initial, machine.finals, moves)


@pytest.mark.parametrize(
    ("pattern", "low", "high"), [("[ab]*a", 0, 4), ("(ab|c)+", 3, 7), ("a?b{2,5}", 2, 3), ("(a|b)*abb", 4, 6)]
)
def test_pattern_and_length_as_interegular_has_it(pattern: str, low: int, high: int) -> None:
    ours = over(automata.automaton(ecma.strings(f"^({pattern})$"), low, high), "abc")
    lengths = interegular.parse_pattern(f"[abc]{{{low},{high}}}").to_fsm(ours.alphabet)
    oracle = interegular.parse_pattern(pattern).to_fsm(ours.alphabet) & lengths
    assert (ours ^ oracle).empty()
    assert len(ours.states) == len(oracle.reduce().states)


PIECE = st.sampled_from(["a", "b", "ab", "[ab]", "[^a]", "a?", "(?:a|bc)", "c{0,2}", "(?:ab|a){1,2}", "[b-d]+"])
PATTERN = st.recursive(
    st.lists(PIECE, min_size=1, max_size=3).map("".join),
    lambda inner: st.one_of(
        st.builds("(?:{}|{})".format, inner, inner), st.builds("(?:{})*".format, inner), st.builds("{}{}".format, inner, inner)
    ),
    max_leaves=4,
)  # fmt: skip
SHORT = ["".join(letters) for size in range(5) for letters in itertools.product("abx", repeat=size)]


@given(
    st.lists(st.tuples(PATTERN, st.booleans()), min_size=1, max_size=3),
    st.integers(0, 2),
    st.none() | st.integers(2, 4),
)
def test_every_short_string_meets_the_conditions_or_is_not_accepted(
    wanted: list[tuple[str, bool]], low: int, high: int | None
) -> None:
    conditions = [(ecma.strings(f"^(?:{pattern})$")[0][0], good) for pattern, good in wanted]
    machine = automata.automaton(conditions, low, high)
    over_letters = over(machine, "abx")
    for text in SHORT:
        good = all(bool(re.fullmatch(pattern, text)) is met for pattern, met in wanted)
        assert all(automata.matches(rx, text) is met for rx, met in conditions) is good
        assert over_letters.accepts(text) is (good and low <= len(text) <= (4 if high is None else high))
    assert len(machine.states) == len(machine.reduce().states)


def test_many_places_of_a_pattern_at_once_are_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = ecma.strings("^[xy]*.{0,40}$")
    assert automata.automaton(conditions).finals
    monkeypatch.setattr(limits, "MOVE_NODES", 4 * 40)
    with pytest.raises(GrammarError, match="MOVE_NODES"):
        automata.automaton(conditions)


def test_memory_of_a_match_is_bounded() -> None:
    ((rx, _),) = ecma.strings("(a|b)*a(a|b){300}$")  # each set of nodes is met once
    letters = random.Random(1)
    text = "".join(letters.choices("ab", k=2_000))
    tracemalloc.start()
    assert automata.matches(rx, text) is (text[-301] == "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 15 * 2**20


@given(text=strings)
def test_negation_is_the_complement(text: str) -> None:
    positive, negative = (automata.automaton([(rx, good)]) for rx, _ in ecma.strings("a[^b]") for good in (True, False))
    expressions = [string_text.expression(machine) for machine in (positive, negative)]
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    assert sum(bool(re.fullmatch(e, written)) for e in expressions if e is not None) == 1


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"\bword", r"escape \\b"), (r"(a)\1", r"escape \\1"), ("a(?=b)", "look-ahead"), ("^(?=a)b|c", r"look-ahead beside \|"),
        ("a*(^(?=b)b)", "look-ahead inside a group"), ("(?<=a)b", "look-behind"),
        ("(", "not closed"),
        ("a)", "too many"), ("[b-a]", "wrong order"), ("*a", "nothing to repeat"), ("a{3,2}", "wrong order"), ("[a", "not closed"),
        ("(^a)*", "anchor"), (r"\p{Script=Greek}", "property"), ("a**", "repetition"), ("\\", "backslash"), (r"\u12", "digits"),
    ],
)  # fmt: skip
def test_what_is_no_regular_language_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as caught:
        ecma.strings(pattern)
    assert caught.value.keyword == "pattern"


def test_properties_of_unicode() -> None:
    ((letters, good),) = ecma.strings(r"^\p{Letter}+$")
    assert good
    assert automata.matches(letters, "aéЖ字")
    assert not automata.matches(letters, "a1")


@given(
    st.lists(st.sampled_from(["a", "b?", r"\\", "/", r"\/", "\n", "\\\n", "[/]", r"[^\\/]"])),
    st.text("ab/\\\n", max_size=5),
)
def test_between_slashes_a_pattern_matches_what_it_did(parts: list[str], text: str) -> None:
    pattern = "".join(parts)
    written = slashed(pattern)
    assert re.fullmatch(r"/(\\.|[^/\\\n])+/", written)  # two slashes would begin a comment
    for each in (text, "".join(part for part in parts if len(part) == 1)):
        assert bool(re.fullmatch(written[1:-1], each)) == bool(re.fullmatch(pattern, each))
