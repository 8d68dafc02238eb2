"""Text that is sent in pieces: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from decoders.common.pieces import special_tokens, text_behind
from decoders.constraints.calls import not_beginning
from decoders.engine.decode.output import TokenLogprobs
from decoders.server.answers import GrowingChoice
from decoders.server.arguments import Stops, StopStrings
from decoders.server.texts import ChoiceText, Spelling, named
from decoders.testing.models import ARCHITECTURES, Architecture

from ..tokenizer_kinds import KINDS, tokenizer_of


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    growing, shown, place = ChoiceText(tokenizer, Stops(tuple(stops))), "", 0
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        tokens=[],
        drafted=[],
        logprobs=[],
        call=SimpleNamespace(request=SimpleNamespace(stopping=SimpleNamespace(tokens=()))),
    )
    growing = GrowingChoice(
        SimpleNamespace(generation=generation, prompt=[]), joining, Stops(tuple(stops)), Spelling(joining)
    )  # type: ignore[arg-type]
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


@pytest.mark.parametrize("kind", KINDS)
@given(
    before=st.sampled_from(["", "</s>", "a", "a true"]),
    numbers=st.lists(st.integers(0, 300) | st.integers(256, 300), max_size=20),
    stops=st.lists(st.text("atru é", min_size=1, max_size=2), max_size=1),
)
def test_tokens_stand_at_their_places_with_their_bytes(
    kind: str, before: str, numbers: list[int], stops: list[str]
) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer(before, add_special_tokens=False).input_ids
    ids = [number % len(tokenizer) for number in numbers]
    generation: Any = SimpleNamespace(
        tokens=ids, drafted=[token % 2 > 0 for token in ids], logprobs=[TokenLogprobs(token, 0.0, ()) for token in ids],
        call=SimpleNamespace(request=SimpleNamespace(stopping=SimpleNamespace(tokens=()))),
    )  # fmt: skip
    growing = GrowingChoice(
        SimpleNamespace(generation=generation, prompt=prompt), tokenizer, Stops(tuple(stops)), Spelling(tokenizer)
    )  # type: ignore[arg-type]
    spans, tokens = growing.read(ended=True)
    whole, shown = text_behind(tokenizer, prompt, ids), "".join(span.text for span in spans)
    assert shown == min((whole.partition(stop)[0] for stop in stops), key=len, default=whole)
    data = b"".join(token.data for token in tokens)
    inside = set(ids[1:-1]) & set(tokenizer.all_special_ids)  # hidden, and perhaps between the bytes of one character
    if "\N{REPLACEMENT CHARACTER}" not in shown and not inside:  # else the bytes are those that are no text
        assert data.decode() == shown
    for token in tokens:
        name = named(token.data)
        assert name.encode() != token.data or shown.startswith(name, token.begin)


@pytest.mark.parametrize("kind", ["byte fallback, prefix", "metaspace", "word piece"])
def test_a_stop_string_with_a_blank_in_front_ends_the_text_where_it_comes_first(kind: str) -> None:
    tokenizer, stop = tokenizer_of(kind), " true"
    a, true = tokenizer("a", add_special_tokens=False).input_ids, tokenizer(stop, add_special_tokens=False).input_ids
    criterion = StopStrings(tokenizer, Stops((stop,)), len(a))
    assert bool(criterion(torch.tensor([a + true]), None))
    growing = ChoiceText(tokenizer, Stops((stop,)), a)
    growing.add(true + a, [False] * len(true + a), ended=True)
    assert growing.stopped and not growing.shown.strip()


def test_a_stop_string_of_bytes_ends_the_text_at_its_last_byte() -> None:
    tokenizer = tokenizer_of("byte fallback, prefix")
    a, newline = tokenizer.convert_tokens_to_ids(["a", "<0x0A>"])
    assert bool(StopStrings(tokenizer, Stops(("\n",)), 1)(torch.tensor([[a, a, newline]]), None))


@pytest.mark.parametrize("kind", ["byte fallback, prefix", "metaspace"])
def test_answers_have_the_blank_behind_the_prompt(kind: str, served: Any, stream: Any) -> None:
    from decoders.server.limits import Limits
    from decoders.server.service import Service

    tokenizer = tokenizer_of(kind)
    options = MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": len(tokenizer)})
    model = Architecture("llama", options)(0)
    limits = Limits(slots=100, prompt_tokens=50, new_tokens=50)
    with served(Service(model, tokenizer, name="tiny", limits=limits, config={"compile": False})) as client:
        body = {
            "prompt": "a",
            "max_tokens": 9,
            "logprobs": 1,
            "response_format": {"type": "choice", "choices": [" true"]},
        }
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == " true" == "".join(choice["logprobs"]["tokens"])
        chunks = stream(client, "/v1/completions", **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " true"
        del body["logprobs"]
        echo = {"echo": True, **body}
        assert client.post("/v1/completions", json=echo).json()["choices"][0]["text"] == "a true"
        chunks = stream(client, "/v1/completions", **echo)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a true"


def test_bytes_that_are_no_text_have_a_name() -> None:
    assert [named(data) for data in (b"a", "é".encode(), b" \xf0\x9f", b"\x80b")] == ["a", "é", r" \xf0\x9f", r"\x80b"]


def test_a_stop_string_ends_the_text_where_it_is_complete(tokenizer: Any) -> None:
    prompt, text = tokenizer("stop").input_ids, tokenizer("a sto🙂p stopp").input_ids
    criterion = StopStrings(tokenizer, Stops(("never", "stop")), len(prompt))
    told = [bool(criterion(torch.tensor([prompt + text[:n]]), None)) for n in range(1, len(text) + 1)]
    assert told.index(True) == len(tokenizer("a sto🙂p stop").input_ids) - 1
    fresh = StopStrings(tokenizer, Stops(("stop",)), len(prompt))
    assert fresh(torch.tensor([prompt + text]), None).tolist() == [True]  # asked of any place


MARKS = ("<|user|>", "<think>", "</think>", "<|x")


@pytest.fixture(scope="module")
def marked(byte_tokenizer: Any) -> Any:
    """A tokenizer with marks as special tokens."""
    tokenizer = byte_tokenizer(["<pad>"], pad_token="<pad>")
    tokenizer.add_tokens([*MARKS], special_tokens=True)
    return tokenizer


@given(
    elements=st.lists(st.sampled_from("ab") | st.sampled_from(MARKS), max_size=12),
    stops=st.lists(st.lists(st.sampled_from("ab") | st.sampled_from(MARKS), min_size=1, max_size=3), min_size=1, max_size=2),
    shown=st.sets(st.sampled_from(MARKS)),
    cuts=st.lists(st.integers(1, 3), max_size=12),
)  # fmt: skip
@example(elements=["a", "<|user|>", "a", "b"], stops=[["<|user|>", "b"]], shown=set(), cuts=[1] * 12)
@example(elements=["a", "<think>", "b"], stops=[["a", "b"]], shown={"<think>"}, cuts=[1] * 12)
def test_stop_strings_end_texts_at_the_special_tokens_that_they_name(
    marked: Any, elements: list[str], stops: list[list[str]], shown: set[str], cuts: list[int]
) -> None:
    tokenizer, special = marked, special_tokens(marked)
    given = Stops.of(["".join(stop) for stop in stops], special)
    assert given.special == {special[mark] for mark in MARKS if any(mark in stop for stop in given.strings)}
    ids, criterion = tokenizer.convert_tokens_to_ids(elements), StopStrings(tokenizer, given, 1)

    def text_of(count: int, seen: Callable[[str], bool]) -> str:
        return "".join(each for each in elements[:count] if each not in MARKS or seen(each))

    def matched(count: int) -> str:
        return text_of(count, lambda mark: special[mark] in given.special)

    ends = (count for count in range(1, len(ids) + 1) if any(stop in matched(count) for stop in given.strings))
    end = next(ends, None)
    told = [bool(criterion(torch.tensor([[0, *ids[:count]]]), None)) for count in range(1, (end or len(ids)) + 1)]
    assert told == [False] * (len(told) - 1) + [end is not None] * bool(told)
    ids = ids[:end]
    # The text is that of the tokens in front of the place where the stop string begins.
    place = min((at for stop in given.strings if (at := matched(len(ids)).find(stop)) >= 0), default=None)
    lengths = [len(matched(count)) for count in range(len(ids) + 1)]
    before = len(ids) if place is None else max(n for n, length in enumerate(lengths) if length <= place)
    expected = text_of(before, shown.__contains__)
    growing, pieces, begin = ChoiceText(tokenizer, given, [], frozenset(special[mark] for mark in shown)), "", 0
    for count in [*cuts, len(ids)]:
        new, ended = ids[begin : begin + count], count == len(ids)
        begin += len(new)
        pieces += "".join(span.text for span in growing.add(new, [False] * len(new), ended))
        assert expected.startswith(pieces)
        if ended:
            break
    assert (pieces, growing.shown, growing.stopped) == (expected, expected, place is not None)
    assert [growing.written[first:last] for first, last in growing.places] == [
        each if each not in MARKS or each in shown else "" for each in elements[: len(ids)]
    ]


@pytest.mark.parametrize("stop", ["<|user|>", "<|user|><|user|>"])
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
def test_a_request_ends_at_the_special_token_that_its_stop_string_names(
    strategy: str, stop: str, service_of: Any, tokenizer: Any, served: Any, stream: Any
) -> None:
    own = copy.deepcopy(tokenizer)
    own.add_tokens([*MARKS], special_tokens=True)
    mark = own.convert_tokens_to_ids("<|user|>")
    shared = {"stop": stop, "max_tokens": 9, "temperature": 0, "logit_bias": {str(mark): 100}}
    with served(service_of(strategy, tokenizer=own)) as client:
        bodies = {
            "/v1/completions": {"prompt": "<|user|>" * 9, **shared},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "<|user|>" * 9}], **shared},
        }
        for route, body in bodies.items():
            answer = client.post(route, json=body).json()
            assert answer["usage"]["completion_tokens"] == stop.count("<|user|>")
            choice = answer["choices"][0]
            assert (
                choice["finish_reason"] == "stop"
                and not (choice.get("message") or {"content": choice["text"]})["content"]
            )
            *_, last = stream(client, route, **body)
            assert last["choices"][0]["finish_reason"] == "stop"


@settings(deadline=None)
@given(st.text("<tool_c[]\\^-\n{", min_size=1, max_size=6), st.text("<tool_c[]\\^-\n{", max_size=9))
def test_free_text_is_what_does_not_begin_with_a_call(prefix: str, text: str) -> None:
    assert bool(re.fullmatch(not_beginning(prefix), text)) == (not text.startswith(prefix))
