"""``/v1/chat/completions``: conversations through the template, and calls of functions."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

pytest.importorskip("fastapi")

from decoders.constraints import CallFormat
from decoders.constraints.constructors import regex
from decoders.constraints.specs import JsonSchema
from decoders.errors import GrammarError
from decoders.prompts.templates import CallStyle, format_named
from decoders.server.bodies import ChatBody, Tool
from decoders.server.grammars import Calling
from decoders.server.prompts import Conversations
from decoders.server.refusals import Refusal, parsed

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


def style_of(prefix: str, suffix: str) -> CallStyle:
    """Calls that are JSON between two marks."""
    return CallStyle(
        CallFormat("template", f'{prefix}{{"name": "', closing=f"}}{suffix}", between="\n" if prefix else None)
    )


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
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    check_call(call, "walk")
    parts = [c for chunk in stream(client, ROUTE, **ASKED, **body) for c in chunk["choices"]]
    first, *others = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert first["index"] == 0 and first["function"]["name"] == "walk" and first["id"].startswith("call_")
    arguments = [part["function"]["arguments"] for part in (first, *others)]
    assert "".join(arguments) == call["function"]["arguments"] and len(others) > 3
    assert all(each == {"index": 0, "function": each["function"]} for each in others)
    assert parts[-1]["finish_reason"] == "stop"
    assert not any(part["delta"].get("content") for part in parts)


PLACE: dict[str, Any] = {
    "type": "object", "properties": {"place": {"enum": ["x", "y"]}}, "required": ["place"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
def test_an_answer_is_a_call_or_follows_its_format(client: Any, stream: Any, choice: str | None) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    body: dict[str, Any] = {
        "tools": TOOLS[1:],
        "tool_choice": choice,
        "response_format": format,
        "max_tokens": 80,
        "temperature": 1,
    }
    kinds = set()
    for seed in range(2):
        (answer,) = post(client, **body, seed=seed)["choices"]
        message = answer["message"]
        kinds.add(bool(message.get("tool_calls")))
        if not message.get("tool_calls"):
            jsonschema.validate(json.loads(message["content"]), PLACE)
        parts = [c for chunk in stream(client, ROUTE, **ASKED, **body, seed=seed) for c in chunk["choices"]]
        assert "".join(part["delta"].get("content") or "" for part in parts) == (message["content"] or "")
    assert kinds <= {choice == "required"} if choice in ("none", "required") else kinds <= {True, False}


def test_a_schema_that_is_not_given_is_any_object(client: Any) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "any"}}
    assert post(client, response_format=format)["choices"][0]["message"]["content"].startswith("{")


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
    assert style == CallStyle(style_of("<call>", "</call>").format, reads_tools=True, reads_calls=True)
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    conversations = Conversations(tokenizer, plain)
    assert conversations.style == CallStyle()
    body = parsed(ChatBody, json.dumps(ASKED | {"tools": TOOLS}).encode())
    text = conversations.prompt(body.messages, body.tools or (), {})
    assert '"name": "walk"' in text and text.startswith("[system]Be brief.")  # it is told there


ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + ALL
SILENT = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEXTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>" + TEXTS + "{% endfor %}"
USER_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text if m.role == 'user' else m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    "template, expected",
    [
        (ALL, "<system>A<user>B<assistant>C<system>D<user>E<assistant>"),
        (NO_SYSTEM, "<user>A\n\nB<assistant>C<user>D\n\nE<assistant>"),
        (SILENT, "<user>A\n\nB<assistant>C<user>D\n\nE<assistant>"),
        (PARTS, "<system>A<user>B<assistant>C<system>D<user>E<assistant>"),
        (USER_PARTS, "<system>A<user>B<assistant>C<system>D<user>E<assistant>"),
    ],
)
def test_every_text_reaches_the_template(tokenizer: Any, template: str, expected: str) -> None:
    conversations = Conversations(tokenizer, template + ASKS)
    roles = ["system", "user", "assistant", "system", "user"]
    strings = [{"role": role, "content": text} for role, text in zip(roles, "ABCDE", strict=True)]
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in strings]
    for messages in (strings, parts):
        body = parsed(ChatBody, json.dumps({"messages": messages, "tools": TOOLS}).encode())
        assert conversations.prompt(body.messages, (), {}) == expected
        told = conversations.prompt(body.messages, body.tools or (), {})
        assert '"name": "walk"' in told and all(letter in told for letter in "ABCDE")
    body = parsed(ChatBody, json.dumps({"messages": strings[:1]}).encode())
    assert "A" in conversations.prompt(body.messages, (), {})


def test_the_commands_show_a_template_of_parts_the_text(tokenizer: Any) -> None:
    from decoders.prompts.reading import encode

    own = copy.copy(tokenizer)
    own.chat_template = PARTS + ASKS
    expected = own("<user>A<assistant>").input_ids
    assert encode(own, [{"role": "user", "content": "A"}]) == expected


def test_answers_of_tools_reach_a_template_that_leaves_them_out(tokenizer: Any) -> None:
    call = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    template = ALL.replace("{% endfor %}", call + "{% endfor %}").replace("messages", "messages if m.role != 'tool'")
    conversations = Conversations(tokenizer, template + ASKS)
    assert conversations.style.reads_calls
    asked = {"id": "call_1", "type": "function", "function": {"name": "rest", "arguments": "{}"}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rested"},
    ]
    body = parsed(ChatBody, json.dumps({"messages": messages}).encode())
    text = conversations.prompt(body.messages, (), {})
    assert text.endswith("<user>Result of the function call: rested<assistant>") and "<call>{" in text


def test_a_template_that_shows_no_text_is_said_to(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    Conversations(tokenizer, "{% for m in messages %}<{{ m.role }}>{% endfor %}")
    assert "leaves its text out" in caplog.text


def test_calls_in_a_list_of_the_template_are_required(service_of: Any, served: Any) -> None:
    written = '{"tool_calls": [{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}]}'
    template = ALL.replace("{% endfor %}", "{% if m.tool_calls %}" + written + "{% endif %}{% endfor %}") + ASKS
    service = service_of(chat_template=template)
    assert service.conversations.style.format.mark == '{"tool_calls": ['
    with served(service) as client:
        (choice,) = post(client, tools=TOOLS[1:], tool_choice="required", max_tokens=150)["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]][:1] == ["rest"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]


CALL = '{"name": "rest", "arguments": {}}'
MISTRAL = CallStyle(format_named("mistral"))


@pytest.mark.parametrize(
    "style, text, content, count",
    [
        (style_of("<call>", "</call>"), f"<call>{CALL}</call>", "", 1),
        (style_of("<call>", "</call>"), f"Well. <call>{CALL}</call>\n<call>{CALL}</call>", "Well.", 2),
        (style_of("<call>", "</call>"), '<call>{"name": "rest", "argu', '<call>{"name": "rest", "argu', 0),
        (style_of("<call>", "</call>"), f"just {CALL}", f"just {CALL}", 0),
        (style_of('{"tool_calls": [', "]}"), f'{{"tool_calls": [{CALL}]}}', "", 1),
        (style_of('{"tool_calls": [', "]}"), f'Well. {{"tool_calls": [{CALL}, {CALL}]}}', "Well.", 2),
        (style_of('{"tool_calls": [', "]}"), f'{{"tool_calls": [{CALL}]}}\n{{"tool_calls": [{CALL}]}}', "", 2),
        (style_of('{"tool_calls": [', "]}"), '{"tool_calls": []}', '{"tool_calls": []}', 0),
        (MISTRAL, f"One moment. [TOOL_CALLS] [{CALL}, {CALL}]", "One moment.", 2),
        (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", 0),
        (CallStyle(), CALL, "", 1),
        (CallStyle(), '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', 0),
        (CallStyle(), f"text {CALL}", f"text {CALL}", 0),
        (CallStyle(), '{"name":"rest","arguments":{"a": 1e999, "b": ' + "9" * 5000 + "}}", "", 1),
        *(
            (style, begin + wrong, begin + wrong, 0)
            for style, begin in [(style_of("<call>", "</call>"), "<call>"), (CallStyle(), "")]
            for wrong in [
                '{"name": ["rest"], "arguments": {}}',
                '{"name": {}, "arguments": {}}',
                '{"name": 5}',
                '{"name": "rest", "arguments": {"a": NaN}}',
                '{"name": "rest", "arguments": {"a": -Infinity}}',
                '{"name": "rest", "arguments": ' + "[" * 3000,
                '{"name": "rest", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
                '{"name": "rest", "more": ' + '{"a":' * 3000,
            ]
        ),
    ],
)
def test_calls_are_read_from_text(style: CallStyle, text: str, content: str, count: int) -> None:
    calling = Calling((Tool.model_validate_json(json.dumps(TOOLS[1])),), style, required=False, several=True)
    written = calling.read(text, ended=True)
    assert (written.text, len(written.calls)) == (content, count)
    sent = ""
    for end in range(min(len(text), 100) + 1):  # what is sent before the end is no part of a call, and stays
        now = calling.read(text[:end], ended=False).text
        assert now.startswith(sent) and content.startswith(now)
        sent = now


def test_calls_beside_a_format_are_at_the_beginning() -> None:
    tool = Tool.model_validate_json(json.dumps(TOOLS[1]))
    calling = Calling((tool,), style_of("<call>", "</call>"), False, True, format=regex('"[^"]*"'))
    text = f'"<call>{CALL}</call>"'
    assert calling.read(text, True).text == text and not calling.read(text, True).calls
    assert calling.read(text[:3], False).text == text[:1] and calling.read("<c", False).text == ""
    assert len(calling.read(f"<call>{CALL}</call>", True).calls) == 1


def test_a_format_beside_calls_that_special_tokens_mark_is_refused() -> None:
    text = {"type": "regex", "regex": "a"}
    body = ChatBody.model_validate_json(
        json.dumps({"messages": ASKED["messages"], "tools": TOOLS, "response_format": text})
    )
    style = style_of("<call>", "</call>")
    calling = Calling.of(body, style)
    assert calling is not None and calling.format is not None
    with pytest.raises(Refusal, match="marks calls with special tokens"):
        Calling.of(body, replace(style, special=True))


NESTED = {
    "type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}},
}  # fmt: skip


@pytest.mark.in_turns
@pytest.mark.parametrize("backend", ["table", "llguidance"])
@pytest.mark.parametrize("prefix, suffix", [("<call>\n", "\n</call>"), ("", ""), ('{"tool_calls": [', "]}")])
@pytest.mark.parametrize("format", [None, "object", "place", "regex"])
def test_answers_are_calls_or_text_that_is_none(
    tokenizer: Any, backend: str, prefix: str, suffix: str, format: str | None
) -> None:
    from decoders.constraints import LLGuidance, Table
    from decoders.hf.grammars import vocabulary_of

    if backend == "table" and format == "object":
        pytest.skip("objects of any depth are no regular expression")
    if backend == "llguidance":  # a recursive schema is no regular expression
        functions = [TOOLS[1]["function"], {"name": "nest", "parameters": NESTED}]
    else:
        functions = [TOOLS[1]["function"], TOOLS[0]["function"]]
    tools = tuple(Tool.model_validate_json(json.dumps({"type": "function", "function": f})) for f in functions)
    vocabulary = vocabulary_of(tokenizer, 288, [1])

    def accepts(text: str, required: bool, several: bool) -> bool:
        specs = {
            "object": JsonSchema({"type": "object"}),
            "place": JsonSchema(PLACE),
            "regex": regex(r"(yes|no)/T1/|a\\/b"),
        }
        wanted = specs[format] if format else None
        spec = Calling(tools, style_of(prefix, suffix), required, several, format=wanted).spec
        compiler = Table() if backend == "table" else LLGuidance()
        matcher = spec.compiled(vocabulary, lambda part: compiler.compile(part.language(), vocabulary)).start()
        ids = tokenizer(text).input_ids
        return matcher.advance(ids) == len(ids) and matcher.accepting

    if backend == "llguidance" and prefix.startswith("{") and format is not None:
        with pytest.raises(GrammarError, match="may begin like a call"):
            accepts("", False, True)
        return
    second = '{"name": "nest", "arguments": {"next": {"next": {}}}}'
    if backend == "table":
        second = '{"name": "walk", "arguments": {"a": 2, "unit": "ft"}}'
    rest, walk = f"{prefix}{CALL}{suffix}", f"{prefix}{second}{suffix}"
    for required in (True, False):
        assert accepts(rest, required, False) and accepts(walk, required, False)
        assert accepts(f"{rest}\n{walk}", required, True) == bool(prefix)
        assert accepts(f"{prefix}{CALL.replace('rest', 'rust')}{suffix}", required, True) == (
            not required and not prefix and format == "object"
        )
    if format is None:
        for text in ("", "Well.", "<", "<cal", "two\nlines", *(['{"nam'] if prefix else [])):
            assert accepts(text, False, True) and not accepts(text, True, True)
        return
    texts = {
        "object": ["{}", '{"a": [{"b": "<call>"}]}', '{"name": 1}', '{"name": "rust", "arguments": {}}'],
        "place": ['{"place": "x"}'],
        "regex": ["yes/T1/", r"a\/b"],
    }
    for text in texts[format]:
        assert accepts(text, False, True) and not accepts(text, True, True)
    for text in ("", "Well.", f"{prefix}{{", '{"place": "z"'):
        assert not accepts(text, False, True)
