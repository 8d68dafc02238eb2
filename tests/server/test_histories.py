"""Conversations with calls come back: what a server wrote, or another one, is what every template takes in the next turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.server.bodies import Message
from decoders.server.prompts import Conversations
from decoders.server.refusals import Refusal

from .test_call_formats import PUBLISHED, each, template
from .test_chat import ASKED, ROUTE, TOOLS, post

ASK = "<assistant>"
#: What templates refuse in a message m: checks of Mistral's, Llama's, gpt-oss's and others.
REFUSE = "{{ raise_exception('not so') }}"
CHECKS = {
    "nothing": "",
    "ids": "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}" + REFUSE + "{% endif %}{% endfor %}"
           "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}" + REFUSE + "{% endif %}",
    "two calls": "{% if m.tool_calls and m.tool_calls | length > 1 %}" + REFUSE + "{% endif %}",
    "text beside a thought": "{% if m.tool_calls and m.content and m.thinking %}" + REFUSE + "{% endif %}",
    "no name": "{% if m.role == 'tool' and not m.name %}" + REFUSE + "{% endif %}",
    "no text": "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}" + REFUSE + "{% endif %}",
    "two users": "{% if not loop.first and m.role == 'user' == messages[loop.index0 - 1].role %}" + REFUSE + "{% endif %}",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_of(byte_tokenizer: Callable[..., Any]) -> Callable[[list[str]], Any]:
    def make(marks: list[str]) -> Any:
        fast = byte_tokenizer(["<pad>", "</s>", "<unk>"], unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
        fast.add_tokens(marks, special_tokens=True)
        return fast

    return make


def called(*ids: str | None, arguments: str = '{"a": 1}') -> list[dict[str, Any]]:
    function = {"name": "walk", "arguments": arguments}
    return [{"type": "function", "function": function} | ({} if id is None else {"id": id}) for id in ids]


def turn(*ids: str | None, **more: Any) -> list[Message]:
    """An assistant's message with calls, and what the functions answer."""
    messages = [{"role": "assistant", "tool_calls": called(*ids), **more}]
    messages += [{"role": "tool", "tool_call_id": id, "content": f"answer {n}"} for n, id in enumerate(ids)]
    return [Message.model_validate(message) for message in messages]


USER = Message(role="user", content="go on")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [*PUBLISHED, "none"])
def test_what_a_server_writes_comes_back(name: str, check: str, tokenizer_of: Callable[..., Any]) -> None:
    if (name, check) == ("kimi-k2", "ids"):
        pytest.skip("its ids hold the functions' names")
    calls, marks, _ = PUBLISHED.get(name, ("", [], ""))
    ask = "<|start|>assistant" if name == "harmony" else ASK
    source = template(calls, ask).replace("{% for m in messages %}", "{% for m in messages %}" + CHECKS[check])
    conversations = Conversations(tokenizer_of(marks), source)
    style = conversations.style
    own = [style.new_id() for _ in range(2)]
    assert len({*own}) == 2 and all(style.id_of(id) == id for id in own)
    counts = [1] if style.one_call else [1, 2]
    for ids in [*(own[:n] for n in counts), ["call_1", "toolu_0"], [None]]:
        for more in (
            {},
            {"content": "Well."},
            {"reasoning_content": "So."},
            {"content": "Well.", "reasoning_content": "So."},
        ):
            text = conversations.prompt(
                [USER, *turn(*ids, **more), Message(role="assistant", content="Done."), USER], (), {}
            )
            assert text.count("walk") >= len(ids) and text.index("answer 0") < text.index("Done.")
    thought = Message(role="assistant", content="", reasoning_content="So.")
    assert conversations.prompt([USER, thought, USER], (), {}).endswith(ask)


def test_ids_are_what_the_template_takes(tokenizer_of: Callable[..., Any]) -> None:
    shown = (
        '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>({{ call.id }})'
    )
    plain = template(each(shown)).replace(
        "{{ m.content }}", "{{ m.content }}{{ '[' ~ m.tool_call_id ~ m.name ~ ']' if m.role == 'tool' }}"
    )
    strict = plain.replace("{% for m in messages %}", "{% for m in messages %}" + CHECKS["ids"])
    ids = [
        "call_0fypS1hVXabcdef",
        "toolu_01A09q90qw90lq917835lq9",
        "abcdefghi",
        "chatcmpl-tool-9d8f7e6a5b4c",
        "a bcdefgh",
    ]
    for source in (plain, strict):
        conversations = Conversations(tokenizer_of([]), source)
        text = conversations.prompt([USER, *turn(*ids)], (), {})
        given, answered = re.findall(r"</tool_call>\((.*?)\)", text), re.findall(r"\[(.*?)walk\]", text)
        assert given == answered and len({*given}) == len(ids)
        assert (given == ids) == (source is plain)
        assert conversations.style.short_ids == (source is strict)
        assert conversations.prompt([USER, *turn(*ids)], (), {}) == text  # a prompt that is known is not read again
        if source is strict:
            assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in given) and given[2] == "abcdefghi"


def test_ids_that_hold_names_are_made_of_foreign_ones(tokenizer_of: Callable[..., Any]) -> None:
    calls, marks, _ = PUBLISHED["kimi-k2"]
    source = template(calls).replace(
        "{{ m.content }}", "{{ m.content }}{{ '[' ~ m.tool_call_id ~ ']' if m.role == 'tool' }}"
    )
    conversations = Conversations(tokenizer_of(marks), source)
    for ids in (["call_1", "toolu_0", "functions.walk:7"], ["functions.walk:0", None, "functions.rest:2"]):
        text = conversations.prompt([USER, *turn(*ids)], (), {})
        given, answered = re.findall(r"call_begin\|>(.*?)<", text), re.findall(r"\[(functions.*?)\]", text)
        assert given == answered
        assert given == [
            "functions.walk:0",
            "functions.walk:1",
            ids[2] if ids[2] == "functions.walk:7" else "functions.walk:2",
        ]


def test_calls_without_ids_are_answered_in_their_order(tokenizer_of: Callable[..., Any]) -> None:
    shown = "<call>{{ c | tojson }}</call>{{ call.id }};"
    source = template(each(shown)).replace("{{ m.content }}", "{{ m.content }}{{ m.tool_call_id }}{{ m.name }};")
    conversations = Conversations(tokenizer_of([]), source)
    assert conversations.style.reads_calls
    text = conversations.prompt([USER, *turn(None, None)], (), {})
    first, second = re.findall("</call>(.*?);", text)
    assert first != second and f"answer 0{first}walk;" in text and f"answer 1{second}walk;" in text


def test_each_call_has_a_message_where_a_template_takes_one(tokenizer_of: Callable[..., Any]) -> None:
    source = template(each("<tool_call>\n" + "{{ c | tojson }}" + "\n</tool_call>"))
    source = source.replace("{% for m in messages %}", "{% for m in messages %}" + CHECKS["two calls"])
    text = Conversations(tokenizer_of([]), source).prompt([USER, *reversed_answers("x", "y", "z")], (), {})
    assert re.findall("answer .", text) == ["answer 0", "answer 1", "answer 2"]
    assert len(re.findall("</tool_call></s><tool>answer", text)) == 3


def reversed_answers(*ids: str) -> list[Message]:
    first, *answers = turn(*ids)
    return [first, *reversed(answers)]


VALUES = {"command": "date", "flag": True, "none": None, "t": "it's", "list": [False, {"k": None}], "number": 1.5}
EACH = "{%% for k, v in c.arguments.items() %%}"
WHOLE = {
    "hermes": '<tool_call>\n{"name": "{{ c.name }}", "arguments": %s}\n</tool_call>',
    "bare": "<call>{{ c.name }}\n%s</call>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral-args": "[TOOL_CALLS]{{ c.name }}[ARGS]%s",
    "qwen3-coder": f"<tool_call>\n<function={{{{ c.name }}}}>\n{EACH}<parameter={{{{ k }}}}>\n%s\n</parameter>\n"
                   "{%% endfor %%}</function>\n</tool_call>",
    "glm-4.7": f"<tool_call>{{{{ c.name }}}}{EACH}<arg_key>{{{{ k }}}}</arg_key><arg_value>%s</arg_value>{{%% endfor %%}}</tool_call>",
}  # fmt: skip
WAYS = {
    "as given": "{{ c.arguments }}",
    "as JSON": "{{ c.arguments | tojson }}",
    "joined": "{{ '' + c.arguments }}",
    "either": "{{ c.arguments if c.arguments is string else c.arguments | tojson }}",
}
VALUE_WAYS = {
    "as given": "{{ v }}",
    "strings": "{{ v | string }}",
    "objects as JSON": "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}",
    "as JSON": "{{ v if v is string else v | tojson }}",
}


@pytest.mark.parametrize("way", range(4))
@pytest.mark.parametrize("name", WHOLE)
def test_arguments_are_json_whatever_a_template_does_with_them(
    name: str, way: int, tokenizer_of: Callable[..., Any]
) -> None:
    by_value = "%%" in WHOLE[name]
    written = [*(VALUE_WAYS if by_value else WAYS).values()][way]
    conversations = Conversations(tokenizer_of([]), template(each(WHOLE[name] % written)))
    message = Message(role="assistant", tool_calls=called("call_1", arguments=json.dumps(VALUES)))
    text = conversations.prompt([USER, message], (), {})
    if not by_value:
        assert json.dumps(VALUES) in text
    else:
        shown = re.findall(r"(?:>\n|<arg_value>)([^<>]*?)(?:\n</parameter>|</arg_value>)", text)
        assert shown == [value if isinstance(value, str) else json.dumps(value) for value in VALUES.values()]


@pytest.mark.parametrize(
    "written, expected",
    [
        ('{"a": 1, "b": [1, {"c": "x"', '{"a": 1, "b": [1, {}]}'),
        ('{"a": "}{", "b": "cut \\', '{"a": "}{"}'),
        ('{"a": 1, "b": 2', '{"a": 1}'),
        ("{", "{}"),
        ("", "{}"),
        ('{"a": 1e999, "b": ' + "9" * 5000 + "}", '{"a": 1.7976931348623157e+308, "b": 1.7976931348623157e+308}'),
        ('{"a": "\\ud800x", "b": "\\ud83d\\ude42"}', '{"a": "\N{REPLACEMENT CHARACTER}x", "b": "🙂"}'),
    ],
)
def test_arguments_that_a_model_wrote_can_come_back(
    written: str, expected: str, tokenizer_of: Callable[..., Any]
) -> None:
    conversations = Conversations(tokenizer_of([]), template(each(WHOLE["hermes"] % WAYS["as JSON"])))
    message = Message(role="assistant", tool_calls=called("call_1", arguments=written))
    assert f'"arguments": {expected}}}' in conversations.prompt([USER, message], (), {})


@pytest.mark.parametrize("written", ["[1", '"{', "{'a': 1}", '{"a": 1,, ', "NaN", "x{"])
def test_arguments_that_are_no_object_are_refused(written: str, tokenizer_of: Callable[..., Any]) -> None:
    conversations = Conversations(tokenizer_of([]), template(each(WHOLE["hermes"] % WAYS["as JSON"])))
    message = Message(role="assistant", tool_calls=called("call_1", arguments=written))
    with pytest.raises(Refusal, match=r"messages\.1\.tool_calls\.0: .* with an object as arguments"):
        conversations.prompt([USER, message], (), {})


def test_a_server_takes_the_ids_of_its_own_calls(service_of: Any, served: Any, stream: Any) -> None:
    shown = each(
        '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>{{ call.id }}'
    )
    source = template(shown).replace("{% for m in messages %}", "{% for m in messages %}" + CHECKS["ids"])
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150, "seed": 1}
    with served(service_of(chat_template=source)) as client:
        message = post(client, **asked)["choices"][0]["message"]
        deltas = [part["delta"] for chunk in stream(client, ROUTE, **ASKED, **asked) for part in chunk["choices"]]
        ids = [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
        for id in (message["tool_calls"][0]["id"], ids[0], "call_of_another_server"):
            calls = [message["tool_calls"][0] | {"id": id}]
            messages = [*ASKED["messages"], message | {"tool_calls": calls}]
            messages.append({"role": "tool", "tool_call_id": id, "content": "walked"})
            post(client, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=1)
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        body = {"input": "go on", "tools": flat, "tool_choice": "required", "max_output_tokens": 150, "seed": 1}
        answer = client.post("/v1/responses", json=body).json()
        (call, *_) = (item for item in answer["output"] if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "walked"}
        more = {"previous_response_id": answer["id"], "input": [result], "max_output_tokens": 1}
        assert client.post("/v1/responses", json=more).status_code == 200
