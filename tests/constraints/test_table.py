"""The table backend: automata, masks and files on small languages, and against Python's own ``re``."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, reject, settings
from hypothesis import strategies as st

from decoders.constraints.base import Language, mask_words, unpack
from decoders.constraints.table import Table, TableGrammar
from decoders.constraints.table.backend import STATES
from decoders.constraints.table.determinise import ByteAutomaton, columns, determinise, minimise
from decoders.constraints.table.lexicon import Lexicon, Trie
from decoders.constraints.table.masks import MaskRows, Row, masks
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError
from decoders.testing.grammars import check_grammar
from decoders.testing.languages import Reference, ToyRegex, byte_vocabulary, merged_vocabulary

BYTES = byte_vocabulary()
MERGED = merged_vocabulary()


def automaton(regex: str) -> ByteAutomaton:
    return minimise(determinise(regex))


def accepts(machine: ByteAutomaton, text: bytes) -> bool:
    state = machine.start
    for byte in text:
        state = machine.next[state, byte]
    return bool(machine.accepting[state])


def compile(regex: str, vocabulary: Vocabulary = MERGED, policy="full") -> TableGrammar:
    return Table().compile(Language("it", regex=regex), vocabulary, policy)


def allowed(grammar: TableGrammar, state: int) -> set[int]:
    tables = grammar.tables()
    return set(unpack(tables.masks[tables.mask_of[state]], len(grammar.vocabulary)).nonzero().flatten().tolist())


# Automata


@pytest.mark.parametrize(
    "regex, texts, others",
    [
        ("1|12", ["1", "12"], ["", "2", "121"]),
        (r"1(\.[0-9]+)?", ["1", "1.5", "1.25"], ["1.", ".5"]),
        ("a|a\x03b", ["a", "a\x03b"], ["a\x03", "\x03"]),
        ("a\x03|\x03*", ["a\x03", "", "\x03", "\x03\x03"], ["a"]),
        ("(.|\n)*", ["", "\x03", "\x00", "é\n日😀", "\x7f"], []),
        ('[^"]*', ["", "\x03\n", "é", "😀\x00"], ['"', 'a"']),
        ("\x00\x00?", ["\x00", "\x00\x00"], ["", "\x00\x00\x00"]),
        ("é|è", ["é", "è"], ["e", "ê"]),
        ("(?i)k", ["k", "K", "\u212a"], ["x"]),
        ("[]a]|[^]b]c", ["]", "a", "ac"], ["]c", "b"]),
    ],
)
def test_whole_text_must_match(regex, texts, others):
    machine = automaton(regex)
    assert [text for text in texts if not accepts(machine, text.encode())] == []
    assert [text for text in others if accepts(machine, text.encode())] == []


def test_broken_utf8_is_in_no_language():
    machine = automaton("(.|\n)*")
    for broken in (b"\xc3", b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff"):
        assert not accepts(machine, broken)


def test_last_code_point_cannot_follow_where_the_text_may_end():
    assert accepts(automaton("<.>"), "<\U0010ffff>".encode())  # not the end: read like any other
    assert not accepts(automaton(".*"), "\U0010ffff".encode())
    assert accepts(automaton(".*"), "\U0010fffe\U0003ffff".encode())


def moore(machine: ByteAutomaton) -> int:
    """Classes of states that texts tell apart, by rounds of refinement over all states; the dead one among them."""
    label = machine.accepting.astype(np.int64)
    while True:
        rows = np.concatenate([label[:, None], label[machine.next]], axis=1)
        finer = np.unique(rows, axis=0, return_inverse=True)[1]
        if finer.max() == label.max():
            return int(finer.max()) + 1
        label = finer


PIECE = st.sampled_from(["a", "b", "ab", "[ab]", "[^a]", "é", "a?", "(a|bc)", "c{0,3}", "(ab|a){1,2}", "[b-d]+"])
REGEX = st.recursive(
    st.lists(PIECE, min_size=1, max_size=3).map("".join),
    lambda inner: st.one_of(
        st.builds("({}|{})".format, inner, inner),
        st.builds("({})*".format, inner),
        st.builds("({}){{1,3}}".format, inner),
        st.builds("{}{}".format, inner, inner),
    ),
    max_leaves=5,
)
QUICK = settings(suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(REGEX, st.lists(st.text("abcdeé\x03", max_size=6), min_size=5, max_size=30))
def test_automaton_accepts_what_pythons_re_matches_and_is_minimal(regex, texts):
    try:
        machine = automaton(regex)
    except GrammarError as error:  # counted repetitions of what may be of several lengths multiply
        assert "states; the limit" in str(error)
        reject()
    for text in texts:
        assert accepts(machine, text.encode()) == bool(re.fullmatch(regex, text)), (regex, text)
    assert moore(machine) == len(machine.next)


def test_states_that_mean_the_same_become_one():
    assert len(automaton("(abc|abd)*(x|y)*").next) == 5
    assert len(automaton('("[^"]{0,20}",)*').next) == moore(automaton('("[^"]{0,20}",)*'))


def test_states_that_never_end_are_dead():
    dead_loop = np.zeros((5, 256), np.int32)
    dead_loop[1, ord("a")], dead_loop[1, ord("b")] = 2, 3
    dead_loop[3, ord("x")], dead_loop[4, ord("x")] = 4, 3  # round and round
    machine = minimise(ByteAutomaton(dead_loop, np.array([False, False, True, False, False]), 1))
    assert len(machine.next) == 3
    assert not accepts(machine, b"bxx")
    assert accepts(machine, b"a")


# Limits


@pytest.mark.parametrize(
    "regex, reason",
    [
        ("a(", "a group is never closed, \\( at 1"),
        ("a)(b", "no group is open, \\) at 1"),
        ("a)|(?:b", "no group is open"),
        ("b[a[^c]", "a class is never closed, \\[ at 1"),
        ("a|*", "nothing to repeat, \\* at 2"),
        ("a(?=b)", "look-around"),
        (r"(a)\1", "back-references"),
        ("^a$", "anchors"),
        (r"a\b", "word boundaries"),
        ("(?x)a", "option x"),
        ("\ud800", "lone surrogate"),
        ("(^a|b)", "anchors"),
        (r"(?-u:\ba)", "word boundaries"),
        ("[^\\s\\S]", "matches nothing"),
        ("a[^\\s\\S]|b", "matches nothing"),
        (r"[^\D[\p{L}\d]]", "matches nothing"),
        ("a" * 200_001, "200000 characters.*llguidance"),
        ("(a|b)*a(a|b){14}", "16384 states.*llguidance"),
        ("[ab]{5000}", "4096.*llguidance"),
    ],
)
def test_what_is_not_read_is_named(regex, reason):
    with pytest.raises(GrammarError, match=reason):
        compile(regex)


def test_language_without_regex_names_the_backend_that_reads_it():
    with pytest.raises(GrammarError, match='nested: .*backend="llguidance"'):
        Table().compile(Language("nested", lark="start: start"), BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("regex", ["(a|b)*a(a|b){25}", "((a{100}){100}){100}", "((a{1000}){1000}){1000}"])
def test_exponential_regex_is_bounded_in_time(regex):
    begin = time.process_time()  # other processes add nothing to it
    with pytest.raises(GrammarError, match="llguidance"):
        compile(regex)
    assert time.process_time() - begin < 10


def test_bounded_text_with_escaped_quotes_is_linear():
    # Unanchored, this has exponentially many states: a quote behind a backslash could begin another match.
    machine = automaton(r'"([^"\\]|\\["\\/bfnrt]){0,400}"')
    assert len(machine.next) < STATES


# Masks


def walked(grammar: TableGrammar, state: int) -> set[int]:
    """Tokens that lead to a state from which a text can be ended, byte by byte."""
    tables = grammar.tables()
    after, kind = tables.next.numpy(), tables.classes.numpy()
    found = set(grammar.vocabulary.stops) if grammar.accepting[state] else set()
    for token, text in enumerate(grammar.vocabulary.tokens):
        at = state if text else 0
        for byte in text or b"":
            at = after[at, kind[byte]]
        if at:
            found.add(token)
    return found


STRING = r'"([^"\\\x00-\x1f\x7f-\x9f]|\\["\\nbt])'
REGEXES = [
    STRING + '*"', STRING + '{0,3}"', STRING + '{2,9}", ' + STRING + '{0,2}"', '[^"]{0,5}"', "(.|\n)*",
    r"[a-y ]{1,9}\.", r"\{ ?" + STRING + "*\" ?: ?(12|true) ?\\}",
    "(aa|a[^a])*", "(é|日本){2,4}", r"[^x]{3}(x|.{0,4})", "(ab*)*", "x", "",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_mask_of_every_state_is_what_walking_each_token_says(regex):
    grammar = compile(regex)
    for state in range(1, grammar.stopped):
        assert allowed(grammar, state) == walked(grammar, state), state


@QUICK
@example(
    r"[^x]{3}(x|.{0,4})", [], [b"\x80  \x00"]
)  # ends a character, and goes on with more of them than tokens begin with
@example("(aa|a[^a])*", [], [])  # room for as many plain characters as tokens have, and behind it a state without
@given(
    st.one_of(REGEX, st.sampled_from(REGEXES)),
    st.lists(st.text('abcdé"\\ x\n\x03日', min_size=1, max_size=8).map(str.encode), max_size=60),
    st.lists(st.binary(min_size=1, max_size=4), max_size=20),
)
def test_masks_hold_for_any_vocabulary_that_has_the_bytes(regex, texts, broken):
    tokens = [bytes([byte]) for byte in range(256)] + texts + broken
    grammar = compile(regex, Vocabulary([None, *tokens, None], stops=[0]))
    for state in range(1, grammar.stopped):
        assert allowed(grammar, state) == walked(grammar, state), state


@pytest.mark.parametrize(
    "regex, texts",
    [
        ("2abcde|3abcdf", ["abcde", "abcdf"]),
        ("2abcdef|3abcdeg", ["abcdef", "abcdeg", "abcde"]),
        ("2abcdefghijkl|3abcdefghijkm", ["abcdefghijkl", "abcdefghijkm"]),
        ("2abcdef?|3abcdef?g", ["abcdef", "abcde", "abcdefg"]),  # the text may end in one of them
        (
            '2"[^"]*"c|3"[^"]*"d',
            ['"ab"c', '"ab"d', '"ab'],
        ),  # strings, told apart by what no token has behind characters alone
        ('2"[^"]{0,4}"|3"[^"]{0,5}"', ['"abcde', 'abcde"', '"abcd"', '2"abcde"']),
        (r'("([^"\\]|\\"){2}", ?){4}', ['", "', '"\\"', 'a", "b', '\\"\\"', '"日', "日本", '", "日本"']),
    ],
)
def test_states_that_only_long_tokens_tell_apart_have_masks_of_their_own(regex, texts):
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts]
    grammar = compile(regex, Vocabulary([None, *tokens], stops=[0]))
    for state in range(1, grammar.stopped):
        assert allowed(grammar, state) == walked(grammar, state), state


def test_states_that_no_token_tells_apart_are_walked_once(monkeypatch):
    walks = []
    walk = Trie.walk
    monkeypatch.setattr(Trie, "walk", lambda trie, *args: walks.append(len(args[2])) or walk(trie, *args))
    grammar = compile(r"\{" + ", ".join(f'"key": {STRING}*", "other": (0|-?[1-9][0-9]*)' for _ in range(40)) + r"\}")
    assert grammar.stopped > 1000
    assert sum(walks) < 200


@QUICK
@given(REGEX, st.sets(st.text("abcdé", min_size=1, max_size=3), min_size=1, max_size=12))
def test_no_dead_end_with_a_vocabulary_that_lacks_bytes(regex, texts):
    vocabulary = Vocabulary([None, *(text.encode() for text in sorted(texts))], stops=[0])
    try:
        grammar = compile(regex, vocabulary)
    except GrammarError as error:
        assert "lacks tokens" in str(error)
        return
    todo, seen = [grammar.tables().start], set()
    while todo:
        state = todo.pop()
        tokens = allowed(grammar, state)
        assert tokens, f"{regex}: a dead end"
        seen.add(state)
        todo += [after for token in tokens if (after := grammar.step(state, token)) not in seen]


def test_vocabulary_that_cannot_write_the_language_names_the_bytes():
    with pytest.raises(GrammarError, match="lacks tokens of the bytes b'xz'"):
        compile("xyz", Vocabulary([None, b"y", b"a"], stops=[0]))


def test_rows_are_shared_and_the_dead_state_has_ones():
    grammar = compile(STRING + '{0,300}"')
    tables = grammar.tables()
    assert len(tables.next) > 2500
    assert len(tables.masks) < 40
    assert (tables.masks[tables.mask_of[0]] == -1).all()
    assert len(tables.masks.unique(dim=0)) == len(tables.masks)


def test_tokens_with_the_last_bit_of_a_word_are_legal():
    tokens = [None] * 96
    tokens[31], tokens[63], tokens[95] = b"a", b"a", b"b"
    grammar = compile("ab", Vocabulary(tokens, stops=[0]))
    assert allowed(grammar, grammar.tables().start) == {31, 63}


# Masks as they are kept


@QUICK
@given(st.lists(st.sets(st.integers(0, 32 * 50 - 1), max_size=400), min_size=1, max_size=9))
def test_masks_that_are_kept_are_those_that_were_given(sets):
    masks = np.zeros((len(sets), 50), np.uint32)
    for mask, tokens in zip(masks, sets, strict=True):
        for token in tokens:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
    given = torch.from_numpy(masks.view(np.int32))
    rows = MaskRows(50, map(Row.of, masks.view(np.int32)))
    out = torch.full((len(sets), 50), 0x5A5A5A5A, dtype=torch.int32)
    for number in range(len(sets)):
        rows.fill(number, out[number])
    assert torch.equal(out, given) and torch.equal(rows.all(), given)
    for row, tokens in zip(rows.each, sets, strict=True):
        assert {token for token in range(32 * 50) if row.allows(token)} == tokens


def test_memory_follows_the_tokens_that_masks_allow_not_the_vocabulary():
    tokens = [bytes([byte]) for byte in range(256)] + [b"%d" % number for number in range(10, 20_000)]
    grammar = compile(
        "|".join(f"place {number * 7919 % 100_003}" for number in range(300)), Vocabulary([None, *tokens], [0])
    )
    assert grammar.nbytes < grammar.tables().nbytes / 4


# Grammars and matchers


@settings(QUICK, max_examples=8)
@given(REGEX, st.integers(0, 1000), st.sampled_from(["full", "canonical"]))
def test_random_languages_keep_the_contract(regex, seed, policy):
    grammar = compile(regex, policy=policy)
    assume(len(grammar.tables().next) <= 40)  # the reference takes minutes for a language of many states
    check_grammar(grammar, Reference(grammar.language, ToyRegex(regex), MERGED), seed=seed)


def test_forgetting_steps_changes_nothing(monkeypatch):
    monkeypatch.setattr("decoders.constraints.table.backend.STEPS", 5)
    grammar = compile("(ab|a|c)*")
    check_grammar(grammar, Reference(grammar.language, ToyRegex("(ab|a|c)*"), MERGED))


def test_canonical_policy_has_one_token_where_bytes_are_forced():
    grammar = compile("constant|cat", policy="canonical")
    start = grammar.tables().start
    assert len(allowed(grammar, start)) > 1
    on = grammar.step(start, MERGED.tokens.index(b"con"))
    assert [MERGED.tokens[token] for token in allowed(grammar, on)] == [b"stant"]
    assert grammar.step(on, MERGED.tokens.index(b"s")) == 0
    assert compile("constant|cat").step(on, MERGED.tokens.index(b"s")) > 0


def test_lexicon_is_made_once_and_dies_with_its_vocabulary():
    vocabulary = byte_vocabulary()
    assert Lexicon.of(vocabulary) is Lexicon.of(vocabulary)
    after, kind = columns(automaton("a").next)
    assert masks(after, kind, automaton("a").accepting, Lexicon.of(vocabulary)).rows.width == mask_words(301)
