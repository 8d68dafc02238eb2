"""``/v1/chat/completions``: conversations through the template, and calls of functions."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest

pytest.importorskip("fastapi")

from decoders.server.bodies import Tool
from decoders.server.prompts import CallStyle, Conversations
from decoders.server.tools import Calling

ROUTE = "/v1/chat/completions"
ASKED = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two and two"}]}
RENDERED = "<system>Be brief.</s><user>two and two</s><assistant>"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 3]}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["a", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["m", "ft"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "walk", "description": "Walks.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "rest"}},
]


def post(client: Any, **body: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json=ASKED | {"max_tokens": 20} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_answer_is_what_generate_writes_behind_the_template(client: Any, tokenizer: Any, write_alone: Any) -> None:
    answer = post(client, temperature=0)
    (choice,) = answer["choices"]
    # The template writes special tokens as text; the tokenizer reads them.
    content = tokenizer.decode(write_alone(RENDERED, max_new_tokens=20), skip_special_tokens=True)
    assert choice["message"] == {"role": "assistant", "content": content, "refusal": None}
    assert choice["finish_reason"] == "length" and answer["object"] == "chat.completion"
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "and two"}]
    again = post(client, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert again["choices"] == post(client)["choices"]


def test_a_stream_is_the_whole_message_in_pieces(client: Any, stream: Any) -> None:
    body: dict[str, Any] = {"max_completion_tokens": 40, "temperature": 1.3, "seed": 8, "n": 2, "logprobs": True}
    whole = post(client, **body, top_logprobs=2)
    chunks = stream(client, ROUTE, **ASKED, **body, top_logprobs=2, drafted=True)
    for index in range(2):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        content = "".join(part["delta"].get("content", "") for part in parts)
        expected = whole["choices"][index]
        assert content == expected["message"]["content"]
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [e["token"] for e in expected["logprobs"]["content"]]
        spans = [span for part in parts if "decoders" in part for span in part["decoders"]["tokens"]]
        assert "".join(span["text"] for span in spans) == content


def test_log_probabilities_of_a_message(client: Any) -> None:
    entries = post(client, logprobs=True, top_logprobs=4, temperature=0)["choices"][0]["logprobs"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 4
        assert entry["logprob"] == pytest.approx(max(top["logprob"] for top in entry["top_logprobs"]))
        assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1.001


def test_bytes_of_tokens_make_the_text(client: Any) -> None:
    emoji = {"type": "choice", "choices": ["😀😁"]}
    (choice,) = post(client, logprobs=True, response_format=emoji)["choices"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"] == "😀😁"
    assert entries[0]["token"] == r"\xf0"


def check_call(call: dict[str, Any], name: str) -> None:
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == name
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS if name == "walk" else {"type": "object"})


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
def test_a_named_function_is_called(client: Any, stream: Any, strategy: str) -> None:
    body = {
        "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "walk"}}, "max_tokens": 120, "temperature": 1,
        "seed": 1, "strategy": strategy,
    }  # fmt: skip
    (choice,) = post(client, **body)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    check_call(call, "walk")
    parts = [c for chunk in stream(client, ROUTE, **ASKED, **body) for c in chunk["choices"]]
    (streamed,) = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert streamed.pop("index") == 0 and streamed["function"] == call["function"]
    assert parts[-1]["finish_reason"] == "tool_calls"
    assert not any(part["delta"].get("content") for part in parts)


def test_required_means_some_function(client: Any) -> None:
    for seed in range(3):
        body = {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 1.5,
            "seed": seed,
        }
        (choice,) = post(client, max_tokens=120, **body)["choices"]
        (call,) = choice["message"]["tool_calls"]
        check_call(call, call["function"]["name"])


def test_auto_may_write_text(client: Any, stream: Any) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "temperature": 1, "seed": 3, "max_tokens": 30}
    (choice,) = post(client, **body)["choices"]
    assert "tool_calls" not in choice["message"]
    parts = [c for chunk in stream(client, ROUTE, **ASKED, **body) for c in chunk["choices"]]
    assert "".join(part["delta"].get("content") or "" for part in parts) == choice["message"]["content"]


def test_a_conversation_with_calls_goes_on(client: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "walk", "arguments": '{"a": 1, "unit": "m"}'}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "walked"},
    ]
    assert post(client, messages=messages, tools=TOOLS, tool_choice="none")["usage"]["prompt_tokens"] > 80


def test_the_style_of_calls_is_read_from_the_template(tokenizer: Any) -> None:
    style = Conversations(tokenizer).style
    assert style == CallStyle("<call>", "</call>", "arguments", reads_tools=True, reads_calls=True)
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    conversations = Conversations(tokenizer, plain)
    assert conversations.style == CallStyle()
    from decoders.server.bodies import ChatBody, parsed

    body = parsed(ChatBody, json.dumps(ASKED | {"tools": TOOLS}).encode())
    text = conversations.prompt(body.messages, body.tools or (), {})
    assert '"name": "walk"' in text and text.startswith("[system]Be brief.")  # it is told there


CALL = '{"name": "rest", "arguments": {}}'


@pytest.mark.parametrize(
    "style, text, content, count",
    [
        (CallStyle("<call>", "</call>"), f"<call>{CALL}</call>", "", 1),
        (CallStyle("<call>", "</call>"), f"Well. <call>{CALL}</call>\n<call>{CALL}</call>", "Well.", 2),
        (CallStyle("<call>", "</call>"), '<call>{"name": "rest", "argu', '<call>{"name": "rest", "argu', 0),
        (CallStyle("<call>", "</call>"), f"just {CALL}", f"just {CALL}", 0),
        (CallStyle(), CALL, "", 1),
        (CallStyle(), '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', 0),
        (CallStyle(), f"text {CALL}", f"text {CALL}", 0),
        *(
            (style, begin + wrong, begin + wrong, 0)
            for style, begin in [(CallStyle("<call>", "</call>"), "<call>"), (CallStyle(), "")]
            for wrong in [
                '{"name": ["rest"], "arguments": {}}',
                '{"name": {}, "arguments": {}}',
                '{"name": 5}',
                '{"name": "rest", "arguments": {"a": NaN}}',
                '{"name": "rest", "arguments": {"a": -Infinity}}',
                '{"name": "rest", "arguments": {"a": 1e999}}',
                '{"name": "rest", "arguments": {"a": ' + "9" * 5000 + "}}",
                '{"name": "rest", "arguments": ' + "[" * 3000,
                '{"name": "rest", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
                '{"name": "rest", "more": ' + '{"a":' * 3000,
            ]
        ),
    ],
)
def test_calls_are_read_from_text(style: CallStyle, text: str, content: str, count: int) -> None:
    calling = Calling((Tool.model_validate_json(json.dumps(TOOLS[1])),), style, required=False, several=True)
    before, calls = calling.parse(text)
    assert (before, len(calls)) == (content, count)
    for end in range(min(len(text), 100) + 1):  # what is sent before the end is no part of a call
        free = calling.free(text[:end], False)
        assert text[:free].rstrip() == content[:free].rstrip() or not calls


def test_half_of_a_surrogate_pair_in_a_call_can_be_sent() -> None:
    calling = Calling((Tool.model_validate_json(json.dumps(TOOLS[1])),), CallStyle(), required=False, several=True)
    _, (call,) = calling.parse('{"name": "rest", "arguments": {"a": "\\ud800", "b": "é"}}')
    arguments = call["function"]["arguments"]
    assert json.loads(arguments.encode()) == {"a": "\ud800", "b": "é"}


NESTED = {
    "type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}},
}  # fmt: skip


@pytest.mark.parametrize("backend", ["table", "llguidance"])
@pytest.mark.parametrize("prefix, suffix", [("<call>\n", "\n</call>"), ("", "")])
def test_answers_are_calls_or_text_that_is_none(tokenizer: Any, backend: str, prefix: str, suffix: str) -> None:
    from decoders.constraints import LLGuidance, Table
    from decoders.hf.grammars import vocabulary_of

    if backend == "llguidance":  # a recursive schema is no regular expression
        functions = [TOOLS[1]["function"], {"name": "nest", "parameters": NESTED}]
    else:
        functions = [TOOLS[1]["function"], TOOLS[0]["function"]]
    tools = tuple(Tool.model_validate_json(json.dumps({"type": "function", "function": f})) for f in functions)
    vocabulary = vocabulary_of(tokenizer, 288, [1])

    def accepts(text: str, required: bool, several: bool) -> bool:
        spec = Calling(tools, CallStyle(prefix, suffix), required, several).spec
        assert spec is not None
        matcher = (Table() if backend == "table" else LLGuidance()).compile(spec.language(), vocabulary).start()
        ids = tokenizer(text).input_ids
        return matcher.advance(ids) == len(ids) and matcher.accepting

    second = '{"name": "nest", "arguments": {"next": {"next": {}}}}'
    if backend == "table":
        second = '{"name": "walk", "arguments": {"a": 2, "unit": "ft"}}'
    rest, walk = f"{prefix}{CALL}{suffix}", f"{prefix}{second}{suffix}"
    for required in (True, False):
        assert accepts(rest, required, False) and accepts(walk, required, False)
        assert accepts(f"{rest}\n{walk}", required, True) == bool(prefix)
        assert not accepts(f"{prefix}{CALL.replace('rest', 'rust')}{suffix}", required, True)
    for text in ("", "Well.", "<", "<cal", "two\nlines", *(['{"nam'] if prefix else [])):
        assert accepts(text, False, True) and not accepts(text, True, True)
