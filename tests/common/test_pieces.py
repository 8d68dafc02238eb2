"""The text of tokens behind a prompt, whole and in pieces, by every kind of tokenizer."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import decoders
from decoders.common.pieces import UNFINISHED, TextPieces, special_tokens, text_behind
from decoders.testing.models import ARCHITECTURES, Architecture

from ..tokenizer_kinds import BYTE_KINDS, KINDS, tokenizer_of

#: Texts, and single tokens whatever they are; every kind makes tokens of its own of them.
PARTS = st.lists(st.text("atrue é🙂{\n", max_size=8) | st.integers(0, 300) | st.just("</s>"), max_size=12)


def tokens_of(tokenizer: Any, parts: list[str | int]) -> list[int]:
    tokens: list[int] = []
    for part in parts:
        own = tokenizer(part, add_special_tokens=False).input_ids if isinstance(part, str) else [part % len(tokenizer)]
        tokens += own
    return tokens


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def expected(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """What `tokens` add to the text of `prompt`; a character that it has begun is theirs."""
    before, whole = decoded(tokenizer, prompt), decoded(tokenizer, prompt + tokens)
    if before.endswith(UNFINISHED):
        before = before[: max(n for n in range(len(before) + 1) if whole.startswith(before[:n]))]
    return whole[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(before=PARTS, behind=PARTS, cuts=st.lists(st.integers(1, 4), max_size=40))
@example(before=["a", 7] * 15, behind=["é", "</s>", 200, "a é"], cuts=[1] * 40)
@example(before=["🙂🙂🙂ñ"], behind=["🙂 a"], cuts=[1] * 40)
@example(before=["a", *["</s>"] * 20], behind=[" true", "🙂", *["</s>"] * 20, " true"], cuts=[1] * 40)
def test_pieces_are_what_decoding_prompt_and_tokens_adds(
    kind: str, before: list[str | int], behind: list[str | int], cuts: list[int]
) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, tokens = tokens_of(tokenizer, before), tokens_of(tokenizer, behind)
    text = expected(tokenizer, prompt, tokens)
    pieces, count, shown = TextPieces(tokenizer, prompt), 0, ""
    for cut in cuts:
        count = min(count + cut, len(tokens))
        shown += pieces.next(tokens[:count], ended=False)
        assert text.startswith(shown)
        assert expected(tokenizer, prompt, tokens[:count]) == shown + pieces.held
    assert shown + pieces.next(tokens, ended=True) == text == text_behind(tokenizer, prompt, tokens)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(before=PARTS, behind=PARTS, cuts=st.lists(st.integers(1, 4), max_size=40))
@example(before=["<|im_start|>"] * 20, behind=[" true"], cuts=[1] * 40)
@example(before=[], behind=["{", '"'], cuts=[])
@example(before=["a"], behind=["a", *[" true", "<|im_start|>"] * 20], cuts=[1] * 40)
@example(before=["a"], behind=[*["<|im_start|>"] * 20, " true"], cuts=[1] * 40)
@example(before=["aaaaaaa🙂", 129], behind=[1, "</s>", "\n"], cuts=[2])
def test_names_of_special_tokens_are_written_into_the_text_that_would_be_there_without(
    kind: str, before: list[str | int], behind: list[str | int], cuts: list[int]
) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, tokens = tokens_of(tokenizer, before), tokens_of(tokenizer, behind)
    special = special_tokens(tokenizer)
    others = decoded(tokenizer, [token for token in tokens if token not in special.values()])
    assume(not any(name in others for name in special))  # other tokens can spell a name, such as { and "
    pieces, count, shown = TextPieces(tokenizer, prompt, frozenset(special.values())), 0, ""
    whole = TextPieces(tokenizer, prompt, frozenset(special.values())).next(tokens, ended=True)
    for cut in [*cuts, len(tokens)]:
        count = min(count + cut, len(tokens))
        shown += pieces.next(tokens[:count], ended=count == len(tokens))
        assert whole.startswith(shown)
        if count == len(tokens):
            break
    assert shown == whole
    names = [name for token in tokens for name, own in special.items() if own == token]
    assert re.findall("|".join(map(re.escape, special)), whole) == names
    bare = whole
    for name in names:
        bare = bare.replace(name, "", 1)
    bare_expected = expected(tokenizer, prompt, tokens)
    if UNFINISHED not in decoded(tokenizer, prompt) + whole + bare_expected:  # a name may stand within a character
        assert bare == bare_expected


@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(deadline=None)
@given(text=st.text("atrue é🙂{\n", max_size=30), place=st.integers(0, 60))
def test_a_text_in_two_is_the_text(kind: str, text: str, place: int) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer(f"a{text}", add_special_tokens=False).input_ids
    prompt, rest = tokens[:place], tokens[place:]
    before = decoded(tokenizer, prompt).rstrip(UNFINISHED)
    assert before + text_behind(tokenizer, prompt, rest) == decoded(tokenizer, tokens)


def test_a_character_of_bytes_comes_once_no_other_byte_can_spoil_it() -> None:
    tokenizer = tokenizer_of("byte fallback, prefix")
    tokens = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0x0A>", "a", "</s>", "▁t"])
    pieces, seen = TextPieces(tokenizer, [tokenizer.convert_tokens_to_ids("a")]), []
    for count in range(1, len(tokens) + 1):
        seen.append((pieces.next(tokens[:count], ended=False), pieces.held))
    assert seen == [("", UNFINISHED), ("", "é"), ("", "é\n"), ("é\na", ""), ("", ""), (" t", "")]


@pytest.mark.parametrize("kind", ["byte fallback, prefix", "metaspace"])
def test_requests_have_the_blank_behind_the_prompt(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    options = MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": len(tokenizer)})
    model = decoders.enable(Architecture("llama", options)(0), tokenizer=tokenizer)
    choice = dict(grammar=decoders.choice([" true"]), max_new_tokens=9, eos_token_id=tokenizer.eos_token_id)
    with decoders.Scheduler(model, tokenizer=tokenizer, decoders_config={"compile": False}) as scheduler:
        generation = scheduler.submit("a", **choice)
        assert generation.result() == generation.text == "".join(generation) == " true"
    prompts = ["a", tokenizer("a").input_ids]
    completions = decoders.generate_many(
        model, prompts, tokenizer=tokenizer, decoders_config={"compile": False}, **choice
    )
    assert [completion.text for completion in completions] == [" true"] * 2
