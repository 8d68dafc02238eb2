"""A turn that is streamed and the same turn told as a whole: the same items, texts, calls and log probabilities."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.common.pieces import special_tokens
from decoders.constraints import FORMATS, ThinkingMarkers, call_arguments
from decoders.constraints.tags.thinking import KNOWN
from decoders.engine.decode.output import TokenLogprobs
from decoders.prompts.templates import CallStyle, format_named
from decoders.server.arguments import Stops
from decoders.server.bodies import ChatBody
from decoders.server.chat import Chat
from decoders.server.grammars import Calling
from decoders.server.limits import Arrival
from decoders.server.reasoning import Reasoning
from decoders.server.response_bodies import ResponseBody
from decoders.server.responses import Kept, Response
from decoders.server.texts import Choice, Job, Span, Spelling
from decoders.server.turns import Turn

from .test_call_formats import PUBLISHED, TOOLS

CALLS = [("walk", '{"a": "}", "b": "x\\n\\"<b>"}'), ("rest", '{"a": 1, "c": true}')]
THINK = ThinkingMarkers("<think>", "</think>")
MESSAGE, NEXT = "<|channel|>{}<|message|>", "<|end|><|start|>assistant"


def turns() -> dict[str, tuple[str, str]]:
    """By name: a format of calls, and what is written."""
    texts = {}
    for format in FORMATS:
        written = format.written(CALLS if format.between is not None else CALLS[:1])
        texts[format.name] = (
            format.name,
            f"<think>So I\nwalk.\n</think>\n\n{'Well. ' if format.trigger else ''}{written}",
        )
    analysis, comment, final = (MESSAGE.format(name) for name in ("analysis", "commentary", "final"))
    head = f"{analysis}Hm.{NEXT}{comment}One moment. {NEXT}{analysis}So.{NEXT}"
    texts["harmony"] = "harmony", head + format_named("harmony").written(CALLS[:1])
    texts["harmony, text"] = "harmony", f"{head}{final}Yes.{NEXT}{final}And no.<|return|>"
    texts["text"] = "hermes", "<think>Hm.</think>Nothing to call <tool_call"
    texts["without a thought"] = "hermes", "Yes.  "
    return texts


def generation(tokens: list[int], most: int) -> Any:
    logprobs = [TokenLogprobs(token, -1.0, ()) for token in tokens]
    request = SimpleNamespace(
        new_tokens=most, stopping=SimpleNamespace(tokens=(1,)), strategy=SimpleNamespace(name="none")
    )
    return SimpleNamespace(
        tokens=tokens, drafted=[False] * len(tokens), logprobs=logprobs, report=None, waited=0.0, call=SimpleNamespace(request=request),
        cancel=lambda: None,
    )  # fmt: skip


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", turns())
def test_a_stream_tells_what_the_whole_answer_does(name: str, cut: bool, byte_tokenizer: Callable[..., Any]) -> None:
    style, text = turns()[name]
    harmony = style == "harmony"
    tokenizer = byte_tokenizer(["<pad>", "</s>", "<unk>"], unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    tokenizer.add_tokens(PUBLISHED.get(style, ("", []))[1], special_tokens=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids = ids[: len(ids) * 3 // 4] if cut else ids
    service: Any = SimpleNamespace(tokenizer=tokenizer, spelling=Spelling(tokenizer), name="tiny")
    service.conversations = SimpleNamespace(special=special_tokens(tokenizer))
    arguments = (
        Calling(tuple(TOOLS), CallStyle(format_named(style)), False, True),
        Reasoning(KNOWN[0] if harmony else THINK, None),
    )
    asked = ResponseBody(input="a", include=["message.output_text.logprobs"], store=False)
    bodies: list[Any] = [asked.chat([]), ChatBody(messages=[{"role": "user", "content": "a"}], logprobs=True)]  # type: ignore[list-item]

    def answers(tokens: list[int]) -> list[Any]:
        own = [
            Job("id", [Choice(0, 0, generation(tokens, len(ids) if cut else 999), [])], Stops(), Arrival("me"), 1)
            for _ in bodies
        ]
        return [Response(Kept(), service, bodies[0], own[0], *arguments), Chat(service, bodies[1], own[1], *arguments)]

    whole = [answer.whole() for answer in answers(ids)]
    streamed, events = answers([]), [list[dict[str, Any]](), list[dict[str, Any]]()]
    growing = [answer.growing(answer.job.choices[0]) for answer in streamed]
    for end in range(1, len(ids) + 1):
        for answer, one, told in zip(streamed, growing, events, strict=True):
            answer.job.choices[0].generation = generation(ids[:end], len(ids) if cut else 999)
            one.choice.generation = answer.job.choices[0].generation
            content = answer.next_events(one, end == len(ids)).decode()
            told += [json.loads(line[6:]) for line in content.split("\n") if line.startswith("data: ")]

    output, expected = streamed[0].output, whole[0]["output"]
    same = [{**item, "id": 0, "call_id": 0} for item in expected]
    assert [{**item, "id": 0, "call_id": 0} for item in output] == same
    for index, item in enumerate(output):
        deltas = [
            event["delta"] for event in events[0] if event["type"].endswith(".delta") and event["output_index"] == index
        ]
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    for item in output:
        if item["type"] == "message":
            part = item["content"][0]
            assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"]
    if harmony and not cut:
        kinds = [
            "reasoning",
            "message",
            "reasoning",
            *(["message", "message"] if "text" in name else ["function_call"]),
        ]
        assert [item["type"] for item in output] == kinds

    (choice,), parts = whole[1]["choices"], [part for event in events[1] for part in event["choices"]]
    message, deltas = choice["message"], [part["delta"] for part in parts]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (message.get(field) or "")
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == "".join(
        call["function"]["arguments"] for call in message.get("tool_calls", ())
    )
    entries = [entry for part in parts for entry in (part["logprobs"] or {}).get("content") or ()]
    assert entries == choice["logprobs"]["content"] and parts[-1]["finish_reason"] == choice["finish_reason"]
    if not cut and "text" not in name and name != "without a thought":
        own = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
        assert own == [(called, json.loads(each)) for called, each in CALLS[: len(own)]]


def test_a_value_of_a_growing_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    format, reads, read = format_named("qwen3-coder"), list[int](), call_arguments._read_value
    monkeypatch.setattr(call_arguments, "_read_value", lambda *given: reads.append(given[1]) or read(*given))
    text = format.written([("walk", json.dumps({f"a{n}": n for n in range(40)}))])
    spans = [Span(piece, False) for piece in re.split("(?<=</parameter>)", text)]
    growing: Any = SimpleNamespace(read=lambda ended: ([spans.pop(0)], ()))
    turn = Turn(growing, None, Calling(tuple(TOOLS), CallStyle(format), False, True))
    while spans:
        turn.read(ended=False)
    assert json.loads(turn.calls[0].arguments)["a39"] == 39 and turn.calls[0].complete
    assert len(reads) == len(set(reads)) == 40
