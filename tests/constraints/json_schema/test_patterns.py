"""Patterns as automata and as expressions over JSON text; interegular and `re` are the oracles."""

from __future__ import annotations

import json
import re

import interegular
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.constraints.json_schema import automata, characters, ecma, json_text
from decoders.errors import GrammarError

PATTERNS = [
    "^a|b$", "^[a-z]+(-[A-Z]{2})?$", "a.c", r"[^\s:]+:\d", "^$", "a{2,3}", "(^a)?b", "^(?:a|(b)*)c?$", "a+?b", r"^\S*\\?$",
    "(a|$)b?", "^[^b]{2}", '"', "", "^(a{2}|b){1,2}$", "[\\w-]:", "x{", "^a$|^b$",
]  # fmt: skip
strings = st.text(st.sampled_from('abcZ-_: 1"\\\n\té\u2028😀'), max_size=7)


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=150, deadline=None)
@given(text=strings)
def test_found_where_re_finds_it(pattern: str, text: str) -> None:
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
    expression = json_text.expression(automata.automaton(conditions))
    tree = json_text.tree(conditions[0][0])
    assert expression is not None
    assert tree is not None
    assert bool(re.fullmatch(expression, written)) is found
    assert bool(re.fullmatch(tree, written)) is found


@pytest.mark.parametrize(
    ("pattern", "low", "high"), [("[ab]*a", 0, 4), ("(ab|c)+", 3, 7), ("a?b{2,5}", 2, 3), ("(a|b)*abb", 4, 6)]
)
def test_pattern_and_length_as_interegular_has_it(pattern: str, low: int, high: int) -> None:
    ours = automata.automaton(ecma.strings(f"^({pattern})$"), low, high)
    alphabet = interegular.fsm.Alphabet.from_groups(*({letter} for letter in "abc"))
    lengths = interegular.parse_pattern(f"[abc]{{{low},{high}}}").to_fsm(alphabet)
    oracle = interegular.parse_pattern(pattern).to_fsm(alphabet) & lengths
    state_of: dict[int, str] = {0: ""}
    todo = [0]
    while todo:  # one example leads to every state; oracle and automaton agree after it, and after every move
        state = todo.pop()
        assert oracle.accepts(state_of[state]) is (state in ours.ends)
        for symbol, to in enumerate(ours.moves[state]):
            letter = next((c for c in "abc" if characters.contains(ours.symbols[symbol], ord(c))), None)
            if to >= 0 and letter is not None and to not in state_of:
                state_of[to] = state_of[state] + letter
                todo.append(to)
    assert len(state_of) == len(ours.moves)
    count = sum(1 for _ in zip(range(100_000), oracle.strings(), strict=False))
    assert count == _count(ours, 0)


def _count(machine: automata.Automaton, state: int) -> int:
    """Strings over a, b and c from `state` on; the language is finite."""
    moves = enumerate(machine.moves[state])
    sizes = (
        sum(characters.contains(machine.symbols[s], ord(c)) for c in "abc") * _count(machine, to)
        for s, to in moves
        if to >= 0
    )
    return int(state in machine.ends) + sum(sizes)


@settings(max_examples=100, deadline=None)
@given(text=strings)
def test_negation_is_the_complement(text: str) -> None:
    positive, negative = (automata.automaton([(rx, good)]) for rx, _ in ecma.strings("a[^b]") for good in (True, False))
    expressions = [json_text.expression(machine) for machine in (positive, negative)]
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    assert sum(bool(re.fullmatch(e, written)) for e in expressions if e is not None) == 1


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"\bword", r"escape \\b"), (r"(a)\1", r"escape \\1"), ("a(?=b)", "look-ahead"), ("(?<=a)b", "look-behind"),
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
