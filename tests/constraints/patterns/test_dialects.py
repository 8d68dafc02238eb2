"""One tree for all dialects: what is read, written and read again is the same, and means what `re` says."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders.constraints.patterns import automata, ecma
from decoders.constraints.patterns.dialect import Dialect
from decoders.constraints.patterns.ecma import ECMA
from decoders.constraints.patterns.python import PYTHON, whole_text
from decoders.constraints.patterns.reader import read
from decoders.constraints.patterns.rust import RUST, check_part
from decoders.constraints.patterns.tree import (
    EMPTY,
    Anchor,
    Cat,
    Chars,
    Class,
    Look,
    Or,
    Pattern,
    Repeat,
    copies,
    nullable,
    write,
)
from decoders.errors import GrammarError

DIALECTS = {"ecma": ECMA, "python": PYTHON, "rust": RUST}
SHORT_TEXTS = ["".join(letters) for size in range(4) for letters in itertools.product("ab-\n", repeat=size)]

#: Read alike by Python's ``re`` and all dialects.
ATOMS = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", "[a-c-]", r"\n", r"\-", r"\.", r"[^\n\-]", r"\x61", r"[+-\-]", r"\u0062", "é"]
)
MARKS = st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "??", "{1,2}?"])
SHARED = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map("|".join)
        | inner.map("({})".format)
        | st.tuples(inner.map("(?:{})".format), MARKS).map("".join)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@given(pattern=SHARED)
def test_what_is_written_is_read_as_the_same_tree(dialect: Dialect, pattern: str) -> None:
    tree = read(pattern, dialect)
    text = write(tree)
    assert write(read(text, dialect)) == text
    if dialect is not RUST:  # it keeps classes as they are written
        assert merged(read(text, dialect)) == merged(tree)


def merged(tree: Pattern) -> Pattern:
    """`tree` without what groups leave in it: sequences in sequences, alternatives in alternatives, repetitions once."""
    match tree:
        case Cat(parts):
            inner = [merged(part) for part in parts]
            flat = [piece for part in inner for piece in (part.parts if isinstance(part, Cat) else [part])]
            return flat[0] if len(flat) == 1 else Cat(tuple(flat))
        case Or(parts):
            inner = [merged(part) for part in parts]
            return Or(tuple(piece for part in inner for piece in (part.parts if isinstance(part, Or) else [part])))
        case Repeat(part, low, high):
            return merged(part) if low == high == 1 else Repeat(merged(part), low, high)
        case _:
            return tree


@given(pattern=SHARED)
def test_the_tree_and_what_is_written_mean_what_re_says(pattern: str) -> None:
    tree = read(pattern, PYTHON)
    expected, written = re.compile(pattern), re.compile(write(tree))
    for text in SHORT_TEXTS:
        matches = bool(expected.fullmatch(text))
        assert bool(written.fullmatch(text)) is matches, text
        assert automata.matches(tree, text) is matches, text
        assert automata.matches(ecma.strings(f"^(?:{pattern})$")[0][0], text) is matches, text


@given(pattern=SHARED)
def test_whole_texts_can_stand_in_a_longer_expression(pattern: str) -> None:
    check_part(whole_text(pattern))


@pytest.mark.parametrize("pattern", ["^a|b$", "^(a|$)b?", "^(?=ab)(?!abc)[a-z]*$", "(^a$|b)c?"])
def test_anchors_and_look_ahead_are_nodes_and_are_written_again(pattern: str) -> None:
    tree = read(pattern, ECMA)
    assert re.sub(r"\(\?:", "(", write(tree)) == pattern
    assert {type(node) for node in nodes(tree)} & {Anchor, Look}
    with pytest.raises(TypeError, match="has to be regular"):
        automata.automaton([(tree, True)])


def nodes(tree: Pattern) -> list[Pattern]:
    match tree:
        case Cat(parts) | Or(parts):
            return [tree, *(node for part in parts for node in nodes(part))]
        case Repeat(part, _, _) | Look(part, _):
            return [tree, *nodes(part)]
        case _:
            return [tree]


def test_dialects_differ_where_their_tables_say_so() -> None:
    assert read("[]a]", PYTHON) == Chars(((0x5D, 0x5D), (0x61, 0x61)))
    assert read("[]", ECMA) == Chars(())
    assert read("a{,2}", PYTHON) == Repeat(Chars(((0x61, 0x61),)), 0, 2)
    assert isinstance(read("a{,2}", ECMA), Cat)
    assert read(r"[\b]", PYTHON) == read(r"[\b]", ECMA) == Chars(((8, 8),))
    assert read(r"\p{Lu}", PYTHON) == Class(r"\p{Lu}")
    assert isinstance(read(r"\p{Lu}", ECMA), Chars)
    assert read("[a&&[^b]]", RUST) == Class("[a&&[^b]]")
    assert read(r"\ud83d\ude00", ECMA) == Chars(((0x1F600, 0x1F600),))
    assert read(r"\ca", ECMA) == Chars(((1, 1),))


def test_a_part_knows_its_place_and_equals_the_same_part_elsewhere() -> None:
    first, anchor, second = read("a$a", ECMA).parts
    assert (first.place, anchor.place, second.place) == (0, 1, 2)
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize("pattern", ["(?i)k", "a(?i)b|c", "((?i:a)|b)*", "(?s-u:.)", r"\x{41}\p{Greek}*", "(?P<n>a)"])
def test_what_only_rust_reads_is_kept_as_it_is_written(pattern: str) -> None:
    text = write(read(pattern, RUST))
    assert write(read(text, RUST)) == text
    for part in ("(?i)", "(?i:", "(?s-u:", r"\p{Greek}"):
        assert (part in text) is (part in pattern)


def test_groups_may_be_nested_deeper_than_python_recurses() -> None:
    deep = "(a" * 20_000 + "|b)*" * 20_000
    assert whole_text(deep).count("(?:") >= 19_999
    with pytest.raises(GrammarError, match="NESTING"):
        ecma.strings(deep[:1000])


def test_empty_parts_are_the_empty_string() -> None:
    for pattern in ("", "()", "(?:)", "a{0}"):
        assert nullable(read(pattern, PYTHON))
    assert read("", ECMA) == EMPTY
    assert copies(read("(ab){3}|c", ECMA)) == 7
