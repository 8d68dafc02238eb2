"""What a model thinks before it answers: ``reasoning_content``, apart from the answer, and its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.constraints import ThinkingMarkers
from decoders.constraints.tags.thinking import KNOWN
from decoders.server.reasoning import Reasoning

from .conftest import TEMPLATE
from .test_chat import ASKED, ROUTE, post

THINKS = TEMPLATE.replace(
    "<assistant>{% endif %}",
    "<assistant>{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}",
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def thinker(served: Any, service_of: Any) -> Iterator[Any]:
    with served(service_of("prompt_lookup", chat_template=THINKS)) as client:
        yield client


HARMONY, THINK = KNOWN[:2]
CALL = ' to=functions.unknown<|message|>{"a": 1}'


def split(reasoning: Reasoning, text: str, ended: bool) -> tuple[str, str]:
    """The thoughts, and the answers."""
    parts = [part for part in reasoning.parts(text, ended) if part.text]
    assert all(text[part.begin :].startswith(part.text) for part in parts)
    thoughts, answers = ([part.text for part in parts if (part.kind == "thought") is kind] for kind in (True, False))
    return "\n\n".join(thoughts), "\n\n".join(answers)


@pytest.mark.parametrize(
    ("markers", "open", "text", "thought", "answer"),
    [
        (THINK, True, "\nso <b> </thin\n</think>\n\nyes </think>", "so <b> </thin\n", "yes </think>"),
        (THINK, None, "<think>a</think>b", "a", "b"),
        (THINK, None, "<thing>a</think>b", "", "<thing>a</think>b"),
        (THINK, True, "never ends </thi", "never ends </thi", ""),
        (THINK, None, "<thi", "", "<thi"),
        (HARMONY, None, f"{HARMONY.begin}so{HARMONY.closing}yes", "so", "yes"),
        (HARMONY, None, f"{HARMONY.end}yes", "", "yes"),
        (HARMONY, None, f"{HARMONY.end}One.<|end|><|start|>assistant{HARMONY.end}Two.", "", "One.\n\nTwo."),
        (HARMONY, None, f"<|channel|>commentary{CALL}<|end|><|start|>assistant<|channel|>commentary{CALL}<|end|>{HARMONY.end}x",
         "", f"<|channel|>commentary{CALL}\n\n<|channel|>commentary{CALL}\n\nx"),
        (ThinkingMarkers("(", ")"), True, ")x", "", "x"),
    ],
)  # fmt: skip
def test_thoughts_and_answers_grow_apart(
    markers: ThinkingMarkers, open: bool | None, text: str, thought: str, answer: str
) -> None:
    reasoning, seen = Reasoning(markers, open), ("", "")
    for end in range(len(text) + 1):
        now = split(reasoning, text[:end], ended=False)
        assert all(after.startswith(before) for before, after in zip(seen, now, strict=True))
        seen = now
    last, rest = split(reasoning, text, ended=True)
    assert (last, rest) == (thought, answer)
    assert last.startswith(seen[0]) and rest.startswith(seen[1])


def test_messages_that_never_begin_or_end_are_read_in_one_pass() -> None:
    size = 200_000  # the square of which takes minutes
    head, message = "<|channel|>" + "a" * size, "<|message|>" * (size // 10)
    assert Reasoning(HARMONY, None).parts(head, ended=False) == []
    for ended in (False, True):
        (part,) = Reasoning(HARMONY, None).parts(head + message, ended)
        assert (part.kind, len(part.text)) == ("text", len(message) - len("<|message|>"))


@pytest.mark.parametrize("stream_it", [False, True])
def test_an_answer_follows_its_format_behind_a_thought_with_a_budget(
    thinker: Any, stream: Any, stream_it: bool
) -> None:
    body = ASKED | {"thinking_budget": 9, "response_format": FORMAT, "max_tokens": 60}
    if stream_it:
        deltas = [part["choices"][0]["delta"] for part in stream(thinker, ROUTE, **body) if part["choices"]]
        thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
        thought, content = "".join(thoughts), "".join(delta.get("content") or "" for delta in deltas)
        first = next(place for place, delta in enumerate(deltas) if delta.get("content"))
        assert len(thoughts) > 1 and not any("reasoning_content" in delta for delta in deltas[first:])
        assert not any(delta.get("content") and "reasoning_content" in delta for delta in deltas)
    else:
        message = post(thinker, **body)["choices"][0]["message"]
        thought, content = message["reasoning_content"], message["content"]
    assert len(thought.encode()) > 0 and "think" not in thought
    assert 0 <= json.loads(content)["n"] <= 9


def test_no_effort_is_no_thought(thinker: Any) -> None:
    message = post(thinker, reasoning_effort="none", response_format=FORMAT)["choices"][0]["message"]
    assert "reasoning_content" not in message and json.loads(message["content"])["n"] <= 9


def test_an_effort_is_a_share_of_the_tokens(thinker: Any) -> None:
    body = ASKED | {"reasoning_effort": "minimal", "max_tokens": 60, "response_format": FORMAT}
    answer = post(thinker, **body)
    assert json.loads(answer["choices"][0]["message"]["content"])["n"] <= 9
    assert answer["usage"]["completion_tokens"] <= 6 + len("</think>") + len('{"n": 1}') + 1


def test_functions_are_called_behind_a_thought(thinker: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    body = ASKED | {"tools": [tool], "tool_choice": "required", "thinking_budget": 5, "max_tokens": 120}
    (choice,) = post(thinker, **body)["choices"]
    (call, *_) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"])["n"] <= 9
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "tool_calls"


def test_a_budget_needs_markers(client: Any) -> None:
    answer = client.post(ROUTE, json=ASKED | {"thinking_budget": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_budget"
    assert "reasoning_content" not in post(client, reasoning_effort="low")["choices"][0]["message"]
