"""llguidance as a backend: what the conformance kit does not know to ask of it."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoders.constraints import library
from decoders.constraints.base import CompiledGrammar, Language, Matcher, mask_words, unpack
from decoders.constraints.llguidance import LLGuidance
from decoders.constraints.llguidance import source as sources
from decoders.constraints.llguidance import source as tokenizers
from decoders.constraints.llguidance.source import depth
from decoders.constraints.table import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError
from decoders.testing import check_backend, grammars
from decoders.testing.languages import Reference, references

STOP = 256
LONGER = [b"aa", b"ab", b"ba", b'{"', b'":', b'", "', b"true", b"null", b"}}", b"12", "é".encode(), b"aaaa", b"[["]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary([*(bytes([byte]) for byte in range(256)), None, *LONGER, None], [STOP])


def compiled(vocabulary: Vocabulary, **notation: Any) -> CompiledGrammar:
    return LLGuidance().compile(Language("mine", **notation), vocabulary)


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    tokens = [*text.encode(), STOP]
    return grammar.start().advance(tokens) == len(tokens)


def mask(matcher: Matcher) -> set[int]:
    out = torch.empty(mask_words(len(matcher.grammar.vocabulary)), dtype=torch.int32)
    matcher.fill_mask(out)
    return set(unpack(out, len(matcher.grammar.vocabulary)).nonzero().flatten().tolist())


def walk(matcher: Matcher, seed: int, steps: int) -> list[set[int]]:
    """Masks along a random walk that avoids the end."""
    chance, masks = random.Random(seed), []
    for _ in range(steps):
        masks.append(mask(matcher))
        text = sorted(masks[-1] - {STOP})
        if not text:
            break
        assert matcher.advance([chance.choice(text)]) == 1
    return masks


@pytest.mark.parametrize(
    ("regex", "inside", "outside"),
    [
        ("a*?b", ["b", "aab"], ["a", "aba"]),
        ("1|12", ["1", "12"], ["2", "122"]),
        (r"\d", ["1", "٣"], ["a", "12"]),
        (r"\w+", ["aé日_"], ["a b", ""]),
        (r"\s", [" ", "\u00a0"], ["a"]),
        (".", ["a", "😀", "\r"], ["\n", "ab"]),
        ("(?s:.)", ["\n"], [""]),
        (r"\x61\u{e9}", ["aé"], ["a"]),
        ("[[:alpha:]]", ["z"], ["é", "1"]),
        (r"\p{Lu}", ["É"], ["é"]),
        ("[a-z--b]", ["a"], ["b", "-"]),
        ("[a-c&&b]", ["b"], ["a", "&"]),
        ("(?P<name>a)|(?i:k)", ["a", "K"], ["A"]),
        ("a/b#\"'", ["a/b#\"'"], ["a/b"]),
        (r"a\/b", ["a/b"], [r"a\/b"]),
        ("[/]\n", ["/\n"], ["/"]),
        ("a||b", ["", "a", "b"], ["ab"]),
        ("", [""], ["a", "/"]),
    ],
)
def test_regular_expressions_mean_the_same_in_both_backends(
    vocabulary: Vocabulary, regex: str, inside: Sequence[str], outside: Sequence[str]
) -> None:
    language = Language("mine", regex=regex)
    for grammar in (LLGuidance().compile(language, vocabulary), Table().compile(language, vocabulary)):
        assert [text for text in inside if not accepts(grammar, text)] == []
        assert [text for text in outside if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("regex", "why"),
    [
        ("a(?=b)", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\ba", "lookarounds"),
        ("(a", "unclosed group"),
        ("a\\", "ends with a backslash"),
        ("[a&&b]", "has a dead end"),
    ],
)
def test_a_regular_expression_without_automaton_is_refused_with_the_reason(
    vocabulary: Vocabulary, regex: str, why: str
) -> None:
    with pytest.raises(GrammarError, match=f"(?s)^mine.*{why}") as caught:
        compiled(vocabulary, regex=regex)
    assert "no_forcing" not in str(caught.value)  # the option that we add


@pytest.mark.parametrize(
    ("lark", "keyword", "why"),
    [
        ('start: "a" b\nb: <think> "c"', "<think>", "line 2"),
        ("start: <[256]>", "<[256]>", "special tokens"),
        ('start: a "z"\na[max_tokens=3]: /[a-z]*/', "max_tokens", "bound the length"),
        ('start: a "z"\na[stop="q"]: /[a-z]*/', "stop", "suffix="),
        ('start: a\na[temperature=0.5]: "x"', "temperature", "generate"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "allow_invalid_utf8", "UTF-8"),
    ],
)
def test_what_a_lark_grammar_may_not_ask_for_is_named_with_its_line(
    vocabulary: Vocabulary, lark: str, keyword: str, why: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(why)) as caught:
        compiled(vocabulary, lark=lark)
    assert caught.value.keyword == keyword


def test_refused_words_are_plain_text_in_strings_patterns_and_comments(vocabulary: Vocabulary) -> None:
    lark = 'start: "<b>" /<[0-9]>stop=/ "temperature=" // <think> max_tokens=3\n# stop= <[3]>\n'
    assert accepts(compiled(vocabulary, lark=lark), "<b><7>stop=temperature=")


def test_errors_of_llguidance_come_with_its_own_message(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match='unknown name: "word"'):
        compiled(vocabulary, lark="start: word")
    with pytest.raises(GrammarError, match="no start rule"):
        compiled(vocabulary, lark='stat: "a"')
    with pytest.raises(GrammarError, match="neither"):
        LLGuidance().compile(Language("mine"), vocabulary)


@pytest.mark.parametrize(
    ("lark", "said"),
    [
        ('start: "a" b', "Define it (`b: …`), or write a text in quotes."),
        ('start: "a" b\nitem: "x"', "or write a text in quotes. Choose from: item, start."),
        ('start: itm\n?item: "x"', "Did you mean 'item'? Choose from: item, start."),
        ("%import common.NUMBER\nstart: NUMBR", "Did you mean 'NUMBER'? Choose from: NUMBER, start."),
        ("%import common.NUMBER -> COUNT\nstart: COUNTS", "Did you mean 'COUNT'?"),
        ('%ignore WS\nstart: "a"', "Define it (`%import common.WS`), or"),
    ],
)
def test_an_unknown_name_comes_with_those_that_may_be_meant(lark: str, said: str) -> None:
    with pytest.raises(GrammarError, match="unknown name") as caught:
        sources.refuse_invalid(Language("mine", lark=lark))
    assert said in str(caught.value) and "Choose from: start." not in str(caught.value)


def test_nothing_is_fetched_for_a_remote_reference(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="does not fetch"):
        compiled(vocabulary, lark='start: %json {"$ref": "http://example.invalid/x"}')


def test_a_grammar_that_would_be_loosened_is_refused_unless_the_whole_text_is_judged(vocabulary: Vocabulary) -> None:
    lark = 'start: %json {"type": "string", "not": {}, "x-guidance": {"lenient": true}}'
    with pytest.raises(GrammarError, match="would ignore a part of it.*not"):
        compiled(vocabulary, lark=lark)
    assert accepts(compiled(vocabulary, lark=lark, whole=SimpleNamespace()), '"x"')


def test_bytes_that_no_text_needs_may_have_no_tokens() -> None:
    """As in SmolLM2's vocabulary."""
    some = Vocabulary([None if byte in b"\x04\x16\xf1\xf2" else bytes([byte]) for byte in range(256)] + [None], [256])
    grammar = compiled(some, lark=library.read("json.lark"))
    assert accepts(grammar, '{"é": ["😀", 1]}') and not accepts(grammar, '"\U00050000"')
    for legal in walk(grammar.start(), 3, 40):
        assert legal and not legal & {0x04, 0x16, 0xF1, 0xF2}
    with pytest.raises(GrammarError, match="has a dead end|NoExtension"):
        compiled(some, regex="\U00050000")


def test_a_vocabulary_that_lacks_bytes_is_refused_since_texts_could_get_stuck() -> None:
    some = Vocabulary([bytes([byte]) for byte in range(256) if byte != 10] + [b"\n\n", None], [256])
    with pytest.raises(GrammarError, match='byte 0x0A.*backend="table"'):
        compiled(some, regex="a\nb")


def test_a_terminal_without_texts_is_an_error_where_it_is_met_and_not_the_end_of_the_text(
    vocabulary: Vocabulary,
) -> None:
    matcher = compiled(vocabulary, lark='start: "a" (X | "b" X | "c")\nX: /x/ & /y/').start()
    assert matcher.advance([*b"ab"]) == 2
    with pytest.raises(GrammarError, match="mine, after 'ab': the grammar has a dead end"):
        mask(matcher)
    matcher.rollback(1)
    assert {ord("b"), ord("c")} == mask(matcher)
    assert matcher.advance([*b"c", STOP]) == 2


def test_more_lexer_states_than_allowed_cost_time_but_change_no_mask(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    regex = "[ab]*a[ab]{12}c"  # 8,192 states
    expected = walk(compiled(vocabulary, regex=regex).start(), seed=1, steps=60)
    monkeypatch.setitem(sources.LIMITS, "max_lexer_states", 90)
    small = LLGuidance().compile(Language("mine", regex=regex), vocabulary)
    matcher = small.start()
    other = small.start()
    assert walk(matcher, seed=1, steps=60) == expected
    assert small._generation > 0  # type: ignore[attr-defined]
    assert mask(other) == expected[0]  # it was made with the first lexer
    assert expected[-1] == {STOP}
    matcher.rollback(10)
    assert mask(matcher) == expected[-11]


def test_a_limit_in_the_middle_of_a_text_is_an_error_and_not_the_end_of_the_text(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources.LIMITS, "max_items_in_row", 40)
    words = " | ".join(f'"w{number}"' for number in range(60))
    matcher = compiled(vocabulary, lark=f'start: "." ("a" word | "x" "y")\nword: {words}').start()
    assert matcher.advance([*b"."]) == 1
    with pytest.raises(GrammarError, match=r"mine, after '\.': llguidance gave up: .*max is 40"):
        matcher.advance([*b"a"])
    assert ord("x") in mask(matcher)
    assert matcher.advance([*b"xy", STOP]) == 3


CHAIN = 5000
LONG = {
    "rules": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(CHAIN)) + f'r{CHAIN}: "z"\n',
    "alternatives": "start: r0\n" + "".join(f'r{i}: (r{i + 1} | "b")\n' for i in range(1500)) + 'r1500: "z"\n',
}


@pytest.mark.parametrize("kind", LONG)
def test_long_chains_of_rules_do_not_overflow_the_stack(vocabulary: Vocabulary, kind: str) -> None:
    assert accepts(compiled(vocabulary, lark=LONG[kind]), "b")


HOSTILE = {
    "nested groups": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "nested groups in a pattern": "start: /" + "(" * 50_000 + "a" + ")" * 50_000 + "/",
    "nested schema": "start: %json " + '{"items":' * 20_000 + "true" + "}" * 20_000,
    "stars of stars": "start: /" + "(" * 99 + "a" + ")*" * 99 + "/",
    "many states": "start: /(a|b)*a(a|b){2000}/",
    "repeats of repeats": "start: /(((.{1000}){1000}){1000}){1000}/",
    "repeated rules": 'start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"{1000000}',
    "doubling rules": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "z" | "y"',
    "doubling terminals": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "z"',
    "and": "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(1, 20)),
    "alternatives": "start: " + " | ".join(f'"word{i}"' for i in range(10_000)),
    "choices in a row": "start: " + '("a" | "b" | "c") ' * 20_000,
    "optional parts": "start: " + "x? " * 3000 + '\nx: "a" | "b"',
    "ambiguous": 'start: e\ne: e e e | e e | "a" | ',
    "long string": 'start: %json {"type": "string", "minLength": 1000000}',
    "long list": 'start: %json {"type": "array", "minItems": 1000000}',
    "chain of terminals": "start: A0\n" + "".join(f"A{i}:((A{i + 1})?)*\n" for i in range(9000)) + 'A9000: "z"',
    "chain of negations": "start: A0\n" + "".join(f"A{i}:~A{i + 1}\n" for i in range(9000)) + 'A9000: "z"',
    "negations": "start: A\nA: " + "~" * 20_000 + '"z"',
    "long text": 'start: "' + "a" * 600_000 + '"',
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k in ("optional parts", "and") else ()) for k in HOSTILE]
)
def test_hostile_grammars_are_refused_or_walked_in_bounded_time(vocabulary: Vocabulary, kind: str) -> None:
    begin = time.process_time()  # other processes add nothing to it
    try:
        matcher = compiled(vocabulary, lark=HOSTILE[kind]).start()
        walk(matcher, seed=0, steps=20)
        matcher.forced_bytes()
    except GrammarError as refusal:
        assert len(str(refusal)) < 2000
    assert time.process_time() - begin < 10  # seconds; a slow machine's allowance, all take less than 2


@pytest.mark.parametrize(
    ("lark", "deep"),
    [
        ('start: A B\nA: "((((" B\nB: "x"', 3),
        ("start: A\nA: (B (B | C))\nB: /((/ // (((\nC: ~(D)\nD: B", 9),
        ("start: start? A\nA: B\nB: A", 2),
        ('start: item\nitem: ("(" item ")")*', 2),
    ],
)
def test_depth_counts_brackets_negations_and_terminals_written_out(lark: str, deep: int) -> None:
    assert depth(lark) == deep


def test_too_deep_terminals_name_the_limit(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match=r"terminals are nested 27,00. deep, the limit is 500"):
        compiled(vocabulary, lark=HOSTILE["chain of terminals"])


def test_too_long_a_text_names_the_limit(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="600,009 characters are more than the 524,288"):
        compiled(vocabulary, lark=HOSTILE["long text"])


@pytest.mark.parametrize("turns", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_the_contract_is_kept(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """The stricter policy; its masks are those of the other one with tokens taken out. Every language over one of the two vocabularies
    and in one of its notations; in the quick run every other pair of languages.
    """
    every = references()

    def in_turns() -> Iterator[Reference]:
        for place, reference in enumerate(every):
            number, language = place // 2, reference.language
            if place % 2 != number % 2 or number % turns > 1:
                continue
            if language.regex and language.lark:
                language = replace(language, **{("regex", "lark")[number // 2 % 2]: None})
            yield replace(reference, language=language)

    monkeypatch.setattr(grammars, "references", in_turns)
    check_backend(LLGuidance, policies=("canonical",))


@pytest.mark.slow
def test_the_contract_is_kept_under_both_policies() -> None:
    check_backend(LLGuidance)


def test_a_mask_of_one_path_leaves_no_trace_in_that_of_another(vocabulary: Vocabulary) -> None:
    """llguidance 1.9.1 looks ahead for a mask, and takes what it found for the path that follows a rollback."""
    grammar = compiled(vocabulary, lark='start: item\nitem: "x" | "[" "]" | "[" item ("," item)* "]"\n')
    matcher, text = grammar.start(), [*b"[[[[x]],"]
    assert matcher.advance(text) == len(text)
    for path in (b"x]", b"[x", b"[[", b"[]"):
        assert matcher.advance([*path]) == 2
        direct = grammar.start()
        assert direct.advance([*text, *path]) == len(text) + 2
        assert mask(matcher) == mask(direct), path
        matcher.rollback(2)


def test_masks_are_written_to_contiguous_int32_on_the_cpu_only(vocabulary: Vocabulary) -> None:
    matcher, words = compiled(vocabulary, regex="a*").start(), mask_words(len(vocabulary))
    for out in (torch.empty(words, dtype=torch.int64), torch.empty(words, 2, dtype=torch.int32)[:, 0]):
        with pytest.raises(ValueError, match="contiguous int32"):
            matcher.fill_mask(out)
    with pytest.raises(ValueError):
        matcher.fill_mask(torch.empty(words + 1, dtype=torch.int32))


def test_matchers_of_one_grammar_work_in_several_threads(vocabulary: Vocabulary) -> None:
    grammar = compiled(vocabulary, lark=library.read("json.lark"))
    expected = [walk(grammar.start(), seed=seed, steps=40) for seed in range(4)]
    fresh = compiled(vocabulary, lark=library.read("json.lark"))
    found: dict[int, list[set[int]]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: walk(fresh.start(), seed=seed, steps=40)}))
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(4)] == expected


def test_tries_are_made_once_for_equal_vocabularies_and_few_are_kept(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_tokenizers", type(tokenizers._tokenizers)())
    monkeypatch.setattr(tokenizers, "KEPT_TOKENIZERS", 2)
    first = tokenizers.tokenizer_for(vocabulary)
    assert tokenizers.tokenizer_for(Vocabulary(vocabulary.tokens, vocabulary.stops)) is first
    for stop in (0, 1):
        tokenizers.tokenizer_for(Vocabulary(vocabulary.tokens, [stop]))
    assert len(tokenizers._tokenizers) == 2
    assert tokenizers.tokenizer_for(vocabulary) is not first
