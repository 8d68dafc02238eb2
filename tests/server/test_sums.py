"""The sum of a stream is the whole answer, for every field of every route, wherever a stop string, a mark or a read cuts."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from decoders.common.pieces import special_tokens
from decoders.constraints import ThinkingMarkers
from decoders.constraints.tags.thinking import KNOWN
from decoders.engine.decode.output import TokenLogprobs
from decoders.prompts.templates import CallStyle, format_named
from decoders.server.arguments import Stops
from decoders.server.bodies import ChatBody, CompletionBody
from decoders.server.chat import Chat
from decoders.server.completions import Completion
from decoders.server.grammars import Calling
from decoders.server.limits import Arrival
from decoders.server.reasoning import Reasoning
from decoders.server.response_bodies import ResponseBody
from decoders.server.responses import Kept, Response
from decoders.server.texts import Choice, Job, Spelling

from .test_call_formats import PUBLISHED, TOOLS

CALL = '<tool_call>\n{"name": "walk", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
PARTS = ("<think>", "so ab", "</think>", "ab 🙂", "é", " ", "ab", "\n\n", CALL, "<|user|>", "<tool_call>", "<to")
HARMONY = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant", "<|end|>", "so ab", "é ab",
           "<|channel|>commentary to=functions.walk <|constrain|>json<|message|>", '{"a": 1, "b": "x"}', "<|call|>", "🙂")  # fmt: skip
STOPS = ("ab", "b 🙂", "🙂", "é ", "<|user|>", "</think>", 'a": 1', "b\n", "walk", " ab")


@pytest.fixture(scope="module")
def service(byte_tokenizer: Any) -> Any:
    """Of tokens of bytes, some of two letters, and marks that are special tokens."""
    tokenizer = byte_tokenizer(["<pad>", "</s>", "<unk>"], unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    tokenizer.add_tokens(["ab", " a", 'a": '])
    tokenizer.add_tokens(["<|user|>", "<think>", "</think>", *PUBLISHED["harmony"][1]], special_tokens=True)
    conversations = SimpleNamespace(special=special_tokens(tokenizer))
    return SimpleNamespace(tokenizer=tokenizer, spelling=Spelling(tokenizer), name="tiny", conversations=conversations)


def generation(tokens: list[int], length: int) -> Any:
    logprobs = [TokenLogprobs(token, -float(n), ((token, -float(n)), (5, -9.0))) for n, token in enumerate(tokens)]
    stopping, strategy = SimpleNamespace(tokens=(1,)), SimpleNamespace(name="none")
    request = SimpleNamespace(new_tokens=length, stopping=stopping, strategy=strategy)
    return SimpleNamespace(
        tokens=tokens, drafted=[token % 2 > 0 for token in tokens], logprobs=logprobs, report=None, waited=0.0,
        call=SimpleNamespace(request=request), cancel=lambda: None,
    )  # fmt: skip


def answer_of(service: Any, route: str, stops: Stops, tokens: list[list[int]], length: int, style: str) -> Any:
    shared: Any = {"stop": list(stops.strings) or None, "drafted": True}
    choices = [Choice(n, 0, generation(own, length), []) for n, own in enumerate(tokens)]
    job = Job("id", choices, stops, Arrival("me"), 1)
    markers = {"think": ThinkingMarkers("<think>", "</think>"), "harmony": KNOWN[0]}.get(style)
    format = format_named("harmony" if style == "harmony" else "hermes")
    turn = Calling(tuple(TOOLS), CallStyle(format), False, True), markers and Reasoning(markers, None)
    if route == "completions":
        return Completion(service, CompletionBody(prompt="a", logprobs=2, echo=None, **shared), job)
    if route == "chat":
        asked = ChatBody(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2, **shared)  # type: ignore[list-item]
        return Chat(service, asked, job, *turn)
    body = ResponseBody(input="a", include=["message.output_text.logprobs"], top_logprobs=2, store=False, **shared)
    return Response(Kept(), service, body.chat([]), job, *turn)


def added(whole: Any, part: Any) -> Any:
    """What a client makes of a field and more of it: texts and lists grow, other values replace, and None says nothing."""
    if part is None or whole is None:
        return whole if part is None else part
    if isinstance(part, dict):
        return {
            key: added(whole.get(key), part.get(key)) for key in [*whole, *(key for key in part if key not in whole)]
        }
    return whole + part if isinstance(part, str | list) else part


def summed(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of chunks, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        delta = part.pop("delta", {})
        calls = {str(call.pop("index")): call for call in delta.pop("tool_calls", ())}
        message = {"message": delta | {"tool_calls": calls}} if delta or calls else {}
        choices[part["index"]] = added(choices.get(part["index"], {}), part | message)
    for choice in choices.values():
        if "message" in choice:
            choice["message"]["tool_calls"] = [*choice["message"]["tool_calls"].values()]
    return [choices[n] for n in sorted(choices)]


def drafted(shown: Any) -> list[tuple[str, bool]]:
    """Of each character, whether it was drafted."""
    return [(letter, token["drafted"]) for token in (shown or {}).get("tokens", ()) for letter in token["text"]]


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    choice = choice | {"decoders": drafted(choice.get("decoders"))}
    if "message" in choice:
        message = {key: value for key, value in choice["message"].items() if value}
        if "tool_calls" in message:  # ids are made anew for every answer
            message["tool_calls"] = [call | {"id": call["id"][:5]} for call in message["tool_calls"]]
        choice["message"] = message
    logprobs = choice.get("logprobs") or {}
    return choice | {"logprobs": {key: value for key, value in logprobs.items() if value}}


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
@settings(max_examples=40, deadline=None)
@given(
    asked=st.sampled_from(["", "think", "harmony"]).flatmap(lambda style: st.tuples(st.just(style), st.lists(
        st.lists(st.sampled_from(HARMONY if style == "harmony" else PARTS), max_size=6).map("".join), min_size=1, max_size=2))),
    stops=st.lists(st.sampled_from(STOPS), max_size=2),
    reads=st.lists(st.integers(0, 4), max_size=60),
    lacking=st.integers(0, 9),
    between=st.lists(st.integers(0, 60), max_size=3),
)  # fmt: skip
@example(asked=("", [CALL]), stops=[], reads=[], lacking=0, between=[])
@example(asked=("", ["ab🙂é"]), stops=[], reads=[1] * 20, lacking=0, between=[2, 7])
@example(asked=("", ["ab ab🙂"]), stops=["b 🙂"], reads=[1] * 20, lacking=0, between=[])
@example(
    asked=("harmony", ["".join([HARMONY[6], "<|call|>", HARMONY[0], "so"])]),
    stops=[],
    reads=[1] * 99,
    lacking=0,
    between=[],
)
@example(asked=("think", ["<think>so</think>ab" + CALL]), stops=[], reads=[1] * 99, lacking=0, between=[])
def test_the_sum_of_a_stream_is_the_whole_answer(
    service: Any,
    route: str,
    asked: tuple[str, list[str]],
    stops: list[str],
    reads: list[int],
    lacking: int,
    between: list[int],
) -> None:
    style, texts = asked
    given = Stops.of(stops, service.conversations.special)
    tokens = [service.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    mark = service.conversations.special["<unk>"]  # of no text, also between the bytes of a character
    for own, place in itertools.product(tokens, between):
        own[place:place] = [mark] * (place < len(own))
    tokens = [own[: max(len(own) - lacking, 0)] for own in tokens][: 1 if route == "responses" else 2]
    length = max(map(len, tokens)) if lacking else 999
    whole = answer_of(service, route, given, tokens, length, style)
    expected = whole.whole()
    streamed = answer_of(service, route, given, [[] for _ in tokens], length, style)
    growing = [streamed.growing(choice) for choice in streamed.job.choices]
    content = streamed.first_events()
    for choice, own, one in zip(streamed.job.choices, tokens, growing, strict=True):
        end = 0
        for count in [*reads, len(own)]:
            end = min(end + count, len(own))
            choice.generation = generation(own[:end], length)
            content += streamed.next_events(one, False)
        content += streamed.next_events(one, True)
    content += streamed.last_events()
    lines = [line[6:] for line in content.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert streamed.usage() == whole.usage()
    if route == "chat" and not style and not stops and not lacking:
        for choice in expected["choices"]:
            if choice["message"].get("tool_calls"):  # their tokens have log probabilities, too, and are no content
                continue
            told = [byte for token in choice["logprobs"]["content"] for byte in token["bytes"]]
            assert bytes(told).decode() == (choice["message"]["content"] or "")
    if route != "responses":
        assert [*map(comparable, summed(events))] == [*map(comparable, expected["choices"])]
        return
    last, ids = events[-1]["response"], ("id", "call_id", "completed_at", "created_at")
    assert drafted(last.pop("decoders", None)) == drafted(expected.pop("decoders", None))
    for answer in (last, expected):
        answer["output"] = [{key: value for key, value in item.items() if key not in ids} for item in answer["output"]]
    assert {key: last[key] for key in last if key not in ids} == {
        key: expected[key] for key in expected if key not in ids
    }
    told = [event for event in events if event["type"].endswith((".delta", ".done")) and "delta" in event]
    for place, item in enumerate(expected["output"]):
        own = [event for event in told if event["output_index"] == place]
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(event["delta"] for event in own) == text
        if item["type"] == "message":
            assert [each for event in own for each in event["logprobs"]] == item["content"][0]["logprobs"]
