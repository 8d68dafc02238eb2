"""Structural tags: phases of a text, markers in any tokens, and budgets, against what strings say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decoders
from decoders.constraints import (
    CompiledGrammar,
    Spec,
    Table,
    Thinking,
    ThinkingMarkers,
    Vocabulary,
    mask_words,
    unpack,
)
from decoders.constraints.tags import TaggedGrammar
from decoders.errors import DecodersError, GrammarError, SettingsError, UnsupportedError

END = 0
SPECIAL = {"<|call|>": 1, "<|say|>": 2}
TEXTS = [*"ab<>/te!", "</", "t>", "a>", ">a", "<<", "/t>b", "ab", "</t>", "</t>ab", "!!", "b!", "te", "</t>ab!"]
VOCABULARY = Vocabulary([None, None, None, *(text.encode() for text in TEXTS), None], [END], special=SPECIAL)
ids = st.integers(0, len(VOCABULARY) - 1)


def compile(spec: Spec) -> CompiledGrammar:
    return Table().compile(spec.language(), VOCABULARY, spec.policy)


def compiled(spec: Any) -> TaggedGrammar:
    grammar = spec.compiled(VOCABULARY, compile)
    assert isinstance(grammar, TaggedGrammar)
    return grammar


def token(text: str) -> int:
    return 3 + TEXTS.index(text)


def tokens(*texts: str) -> list[int]:
    return [SPECIAL[text] if text in SPECIAL else token(text) for text in texts]


class Strings:
    """What may be written, by strings alone. choices: the texts of every grammar."""

    def __init__(self, tags: Sequence[tuple[str, list[str], str | None]], required: bool) -> None:
        self.tags, self.required = tags, required
        self.free, self.inside, self.tag, self.ended = "", "", -1, False

    def legal(self, number: int) -> bool:
        return self.after(number) is not None

    def after(self, number: int) -> Strings | None:
        new = Strings(self.tags, self.required)
        new.free, new.inside, new.tag, new.ended = self.free, self.inside, self.tag, self.ended
        text = (VOCABULARY.tokens[number] or b"").decode()
        if self.ended:
            return None
        if number == END:
            _, choices, end = self.tags[self.tag]
            new.ended = self.inside in choices and end is None if self.tag >= 0 else not self.required
            return new if new.ended else None
        if self.tag < 0:
            if not text:
                return new._free(" ")
            return new._free(text)
        return new._inside(text) if text else None

    def _free(self, text: str) -> Strings | None:
        for place, character in enumerate(text, start=1):
            self.free += character
            for number, (begin, _, _) in enumerate(self.tags):
                if self.free.endswith(begin):
                    self.tag, self.inside, self.free = number, "", ""
                    return self._inside(text[place:]) if text[place:] else self
        return self

    def _inside(self, text: str) -> Strings | None:
        _, choices, end = self.tags[self.tag]
        self.inside += text
        whole = [choice + (end or "") for choice in choices]
        if not any(each.startswith(self.inside) for each in whole):
            return None
        if end is not None and self.inside in whole:
            self.tag, self.required = -1, False
        return self


def masked(matcher: Any) -> list[int]:
    out = torch.zeros(mask_words(len(VOCABULARY)), dtype=torch.int32)
    matcher.fill_mask(out)
    return unpack(out, len(VOCABULARY)).nonzero().flatten().tolist()


CHOICES = ["ab", "a/", "te!!"]
TAGS: dict[str, tuple[list[tuple[str, list[str], str | None]], Callable[[], Any], bool]] = {
    "after": ([("</t>", CHOICES, None)], lambda: decoders.after("</t>", decoders.choice(CHOICES)), True),
    "after repeating letters": (
        [("aab", CHOICES, None)],
        lambda: decoders.after("aab", decoders.choice(CHOICES)),
        True,
    ),
    "tags": (
        [("</t>", CHOICES, "!"), ("<a", ["b", "be"], "</t>")],
        lambda: decoders.tagged(
            {"</t>": (decoders.choice(CHOICES), "!"), "<a": (decoders.choice(["b", "be"]), "</t>")}
        ),
        False,
    ),
    "required": (
        [("</t>", CHOICES, "!")],
        lambda: decoders.tagged({"</t>": (decoders.choice(CHOICES), "!")}, required=True),
        True,
    ),
}


@pytest.mark.parametrize("name", TAGS)
@settings(max_examples=12)
@given(data=st.data())
def test_what_is_legal_is_what_strings_say(name: str, data: st.DataObject) -> None:
    tags, make, required = TAGS[name]
    matcher = compiled(make()).start()
    states = [Strings(tags, required)]
    for _ in range(data.draw(st.integers(1, 12))):
        legal = [number for number in range(len(VOCABULARY)) if states[-1].legal(number)]
        assert masked(matcher) == (legal or [END])
        assert matcher.accepting == (states[-1].ended or states[-1].legal(END))
        replaced = matcher.replacements()
        if replaced is not None:
            assert sorted(replaced) == sorted({*range(len(VOCABULARY))} - {*legal})
            assert {*replaced.values()} <= {*legal}
        if not legal:
            break
        number = data.draw(st.sampled_from(legal))
        refused = [other for other in range(len(VOCABULARY)) if other not in legal][-1:]
        assert matcher.advance(refused) == 0 and matcher.advance([number]) == 1
        states.append(states[-1].after(number) or pytest.fail("legal"))
        back = data.draw(st.sampled_from([0, 0, 0, 1, 3]))
        if back and len(states) > back:
            matcher.rollback(back)
            del states[-back:]


def test_what_is_replaced_spells_the_markers_part() -> None:
    grammar = compiled(decoders.after("</t>", decoders.choice(["b", "te"])))
    matcher, whole = grammar.start(), dict.fromkeys(tokens("</t>ab", "</t>ab!"), token("</t>"))
    assert matcher.replacements() == whole | {END: token("</t>")}
    matcher.advance(tokens("a", "</"))
    assert matcher.replacements() == whole | {END: token("t>")}
    matcher.rollback(1)
    matcher.advance(tokens("<"))
    assert matcher.replacements() == whole | {END: token("/")}  # `/t>b` goes on as the grammar does
    assert matcher.advance(tokens("/t>b")) == 1 and matcher.accepting


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_forces_the_marker_exactly(budget: int) -> None:
    thinking = Thinking(budget, "<<", "</t>")
    spec = thinking.around(decoders.choice(["ab"]), tokens("<<", "a"), VOCABULARY, None)
    matcher = compiled(spec).start()
    free = [token("a")] * budget
    assert matcher.advance(free) == budget and matcher.forced_tokens(5) == [token("</t>")] == masked(matcher)
    assert matcher.replacements() is None and not matcher.accepting
    assert matcher.advance(tokens("</t>", "ab")) == 2 and matcher.accepting


def test_a_marker_that_has_begun_when_the_budget_ends_is_completed() -> None:
    matcher = compiled(Thinking(2, "<<", "</t>").around(None, tokens("<<"), VOCABULARY, None)).start()
    matcher.advance(tokens("a", "</"))
    assert matcher.forced_tokens(5) == tokens("t>") and masked(matcher) == tokens("t>")
    matcher.advance(tokens("t>"))
    assert matcher.accepting and matcher.advance([END]) == 1


def test_a_text_without_a_thought_has_no_budget() -> None:
    matcher = compiled(Thinking(1, "<<", "</t>").around(None, tokens("a"), VOCABULARY, None)).start()
    assert matcher.advance(tokens("a", "b", "a", "b")) == 4 and matcher.forced_tokens(1) is None
    assert matcher.advance(tokens("<<", "a")) == 2 and matcher.forced_tokens(1) == tokens("</t>")
    assert matcher.advance(tokens("</t>", "<<", "b")) == 3 and matcher.forced_tokens(1) == tokens("</t>")


def test_the_first_token_opens_a_thought_or_begins_the_grammar() -> None:
    spec = Thinking(2, "<<", "</t>").around(decoders.choice(["ab"]), [], VOCABULARY, None)
    matcher = compiled(spec).start()
    assert masked(matcher) == sorted(tokens("a", "ab", "<<"))
    assert matcher.advance(tokens("ab", "<<")) == 1 and matcher.accepting
    matcher.rollback(1)
    assert matcher.advance(tokens("<<", "b", "</t>", "ab")) == 4 and matcher.accepting
    spec = Thinking(2, "<<", "</t>").around(
        decoders.tagged({"te": (decoders.choice(["ab"]), "!")}), [], VOCABULARY, None
    )
    assert compiled(spec).start().advance(tokens("<<", "te", "b", "b")) == 3  # a tag within a thought is none


def test_special_tokens_are_markers_and_are_never_spelt() -> None:
    grammar = compiled(decoders.tagged({"<|call|>te<|say|>": (decoders.choice(["ab", "abb"]), "!<|call|>")}))
    matcher = grammar.start()
    assert matcher.advance(tokens("<|call|>", "t", "e", "<|say|>")) == 4
    assert masked(matcher) == sorted(tokens("a", "ab"))
    matcher.advance(tokens("a", "b"))
    assert masked(matcher) == sorted(tokens("b", "!", "b!"))
    matcher.advance(tokens("b!"))
    assert masked(matcher) == tokens("<|call|>")
    assert matcher.advance(tokens("<|call|>", "t", "<|call|>", "te")) == 4 and matcher.accepting
    matcher.rollback(11)
    assert masked(matcher) == [*range(len(VOCABULARY))]


def test_an_end_marker_may_have_special_tokens_anywhere() -> None:
    matcher = compiled(decoders.tagged({"<|call|>": (decoders.choice(["a"]), "!<|say|>a<|call|>")})).start()
    assert matcher.advance(tokens("<|call|>", "a", "!", "<|say|>")) == 4
    assert masked(matcher) == tokens("a") and not matcher.accepting
    assert matcher.advance(tokens("a", "<|call|>", "t>")) == 3 and matcher.accepting


def test_a_token_is_a_marker_by_its_id_alone() -> None:
    matcher = compiled(decoders.after(token("</t>"), decoders.choice(["ab"]))).start()
    assert matcher.advance(tokens("</", "t>", "<", "/t>b", "</t>", "ab")) == 6 and matcher.accepting


def test_one_tag_or_as_many_as_there_are() -> None:
    tag = {"<": (decoders.choice(["ab"]), ">")}
    assert compiled(decoders.tagged(tag)).start().advance(tokens("<", "a", "b", ">", "te", "<", "te")) == 6
    matcher = compiled(decoders.tagged(tag, several=False)).start()
    assert matcher.advance(tokens("<", "a", "b", ">")) == 4 and masked(matcher) == [END]
    required = compiled(decoders.tagged(tag, required=True)).start()
    assert required.replacements() == dict.fromkeys([END, *tokens("</", "<<", "</t>", "</t>ab", "</t>ab!")], token("<"))


def test_grammars_inside_are_judged_by_themselves() -> None:
    def judged(text: str) -> None:
        if text != "ab":
            raise GrammarError(f"judged {text!r}")

    class Wide(decoders.constraints.Regex):
        def language(self) -> Any:
            return decoders.constraints.Language("wide", regex=self.whole, whole=judged)

    grammar = compiled(decoders.tagged({"<": (Wide("[ab]+"), ">")}))
    grammar.judge(tokens("te", "<", "a", "b", ">", "a", "<", "ab", ">", "t") + [END])
    with pytest.raises(GrammarError, match="judged 'b'"):
        grammar.judge(tokens("te", "<", "ab", ">", "a", "<", "b", ">"))
    with pytest.raises(GrammarError, match="judged 'aa'"):
        compiled(decoders.after(">", Wide("[ab]+"))).judge(tokens("te", ">a", "a"))


@pytest.mark.parametrize(
    ("prompt", "open"),
    [
        (["a", "<<", "b"], True),
        (["<<", "a", "</t>", "b"], False),
        (["<<", "a", "</", "t>", "b", "<", "<", "a"], True),
        (["a", "b"], None),
        (["<<", "a", "<|say|>", "b"], None),
        (["<<", "</t>", "<|say|>", "b", "<<"], True),
        ([], None),
    ],
)
def test_whether_the_last_turn_has_begun_a_thought(prompt: list[str], open: bool | None) -> None:
    assert ThinkingMarkers("<<", "</t>").begun(tokens(*prompt), VOCABULARY) is open


class Named:
    """A tokenizer as far as markers are looked for."""

    def __init__(self, names: Sequence[str], template: str | None = None) -> None:
        self.names, self.chat_template = names, template

    def get_vocab(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}


@pytest.mark.parametrize(
    ("tokenizer", "end"),
    [
        (Named(["<think>", "</think>"]), "</think>"),  # Qwen 3, DeepSeek-R1
        (Named([], "{{ '<think>\\n' }}{{ content.split('</think>')[-1] }}"), "</think>"),
        (Named(["[THINK]", "[/THINK]"]), "[/THINK]"),  # Magistral
        (Named(["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]), "<|channel|>final<|message|>"),  # gpt-oss
        (Named(["<|channel>", "<channel|>"]), "<channel|>"),  # Gemma 4
        (Named(["<s>"], "{{ messages }}"), None),
        (None, None),
    ],
)
def test_the_markers_of_models_are_known(tokenizer: Any, end: str | None) -> None:
    markers = ThinkingMarkers.of(tokenizer)
    assert (markers.end if markers is not None else None) == end


def test_harmony_ends_a_thought_with_the_head_of_the_answer() -> None:
    names = ["<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>"]
    special = {name: place for place, name in enumerate(names)}
    words = [b"analysis", b"final", b"assistant", b"x", b"{", b"}"]
    vocabulary = Vocabulary([None] * 5 + words + [bytes([byte]) for byte in range(256)], [4], special=special)
    spec = Thinking(2).around(decoders.choice(["{}"]), [1, 7], vocabulary, Named(names))  # type: ignore[arg-type]
    assert isinstance(spec, Spec)
    matcher = spec.compiled(vocabulary, lambda inner: Table().compile(inner.language(), vocabulary)).start()
    assert matcher.advance([2, 5]) == 2
    assert matcher.forced_tokens(9) == [0, 1, 7, 2, 6, 3]
    matcher.rollback(2)
    assert matcher.advance([2, 6, 3, 9, 10, 4]) == 6  # its own head of the answer will do


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: decoders.after("", "iso_date"), GrammarError, "'' is not a marker"),
        (lambda: decoders.after(True, "iso_date"), GrammarError, "True is not a marker"),
        (lambda: decoders.after("</t>", "iso_dat"), DecodersError, "iso_date"),
        (lambda: decoders.tagged({}), GrammarError, "there are no tags"),
        (lambda: decoders.tagged(["<"]), GrammarError, "is not a dict of tags"),
        (lambda: decoders.tagged({"<": None}), GrammarError, "no grammar after '<'"),
        (lambda: decoders.tagged({"<": (decoders.after("a", "uuid"), ">")}), GrammarError, "give one grammar"),
        (lambda: compiled(decoders.after(99, decoders.choice(["a"]))), GrammarError, "no such token"),
        (
            lambda: compiled(decoders.tagged({"<": decoders.choice(["a"]), "a<b": decoders.choice(["a"])})),
            GrammarError,
            "'a<b' contains '<'",
        ),
        (
            lambda: compiled(decoders.tagged({"<": (compile(decoders.choice(["a"])), ">")})),
            GrammarError,
            "cannot end a compiled grammar",
        ),
        (lambda: Thinking.of(-1), SettingsError, "give the thinking budget"),
        (lambda: Thinking.of(True), SettingsError, "thinking budget"),
        (lambda: Thinking.of({"token": 3}), SettingsError, "thinking has no 'token'. Did you mean 'tokens'"),
        (lambda: Thinking(3).markers(None), UnsupportedError, "needs the markers of a thought"),
        (lambda: Thinking(3, end="!").markers(None), UnsupportedError, 'give "begin", too'),
    ],
)
def test_errors_say_what_to_give(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)
