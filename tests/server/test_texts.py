"""Text that is sent in pieces: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from decoders.engine.request_output import TokenLogprobs
from decoders.server.answers import Growing
from decoders.server.calls import not_beginning
from decoders.server.processors import StopStrings
from decoders.server.texts import ChoiceText, Spelling, named


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("abé🙂 ", max_size=30),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=40),
)
@example(text="aab", stops=["ab"], cuts=[1, 1, 1])
@example(text="baa", stops=["a", "baa"], cuts=[2])
def test_pieces_are_the_text_before_the_first_stop(
    tokenizer: Any, text: str, stops: list[str], cuts: list[int]
) -> None:
    # Writing ends with the character that completes a stop string.
    text = text[: min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))]
    tokens = tokenizer(text).input_ids
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    expected = text[: min(places)] if places else text
    growing, shown, place = ChoiceText(tokenizer, stops), "", 0
    for count in cuts:
        new = tokens[place : place + count]
        place += len(new)
        piece = "".join(span.text for span in growing.add(new, [False] * len(new)))
        assert "\N{REPLACEMENT CHARACTER}" not in piece
        shown += piece
        assert expected.startswith(shown)
    rest = tokens[place:]
    shown += "".join(span.text for span in growing.add(rest, [True] * len(rest), ended=True))
    assert shown == expected == growing.shown
    assert growing.stopped == bool(places)


@pytest.fixture(scope="module")
def joining() -> Any:
    """A tokenizer with tokens of several bytes: of two letters, and of a blank with the beginning of a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("Ġ", "ð"), ("Ġð", "Ł"), ("a", "b")]
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("abé🙂 ", max_size=30),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(1, 4), max_size=40),
)
@example(text="a 🙂", stops=["🙂"], cuts=[1] * 9)
@example(text="a ab", stops=["b"], cuts=[1] * 9)
@example(text="aba", stops=["bb"], cuts=[1] * 9)
def test_tokens_with_log_probabilities_are_those_of_the_text(
    joining: Any, text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = joining(text).input_ids
    generation: Any = SimpleNamespace(
        tokens=[], drafted=[], logprobs=[], call=SimpleNamespace(request=SimpleNamespace(stop_tokens=()))
    )
    growing = Growing(SimpleNamespace(generation=generation), joining, stops, Spelling(joining))  # type: ignore[arg-type]
    shown, data = "", b""
    for count in [*cuts, len(ids)]:
        new, ended = ids[len(generation.tokens) :][:count], count == len(ids)
        generation.tokens += new
        generation.drafted += [False] * len(new)
        generation.logprobs += [TokenLogprobs(token, 0.0, ()) for token in new]
        spans, tokens = growing.read(ended)
        shown += "".join(span.text for span in spans)
        for token in tokens:
            assert shown[: token.begin].encode() == data[: len(shown[: token.begin].encode())]
            data += token.data
        assert len(data) <= len(shown.encode())
        if ended:
            break
    assert data.decode() == shown


def test_bytes_that_are_no_text_have_a_name() -> None:
    assert [named(data) for data in (b"a", "é".encode(), b" \xf0\x9f", b"\x80b")] == ["a", "é", r" \xf0\x9f", r"\x80b"]


def test_a_stop_string_ends_the_text_where_it_is_complete(tokenizer: Any) -> None:
    import torch

    prompt, text = tokenizer("stop").input_ids, tokenizer("a sto🙂p stopp").input_ids
    criterion = StopStrings(tokenizer, ["never", "stop"], len(prompt))
    told = [bool(criterion(torch.tensor([prompt + text[:n]]), None)) for n in range(1, len(text) + 1)]
    assert told.index(True) == len(tokenizer("a sto🙂p stop").input_ids) - 1
    fresh = StopStrings(tokenizer, ["stop"], len(prompt))
    assert fresh(torch.tensor([prompt + text]), None).tolist() == [True]  # asked of any place


@settings(deadline=None)
@given(st.text("<tool_c[]\\^-\n{", min_size=1, max_size=6), st.text("<tool_c[]\\^-\n{", max_size=9))
def test_free_text_is_what_does_not_begin_with_a_call(prefix: str, text: str) -> None:
    assert bool(re.fullmatch(not_beginning(prefix), text)) == (not text.startswith(prefix))
