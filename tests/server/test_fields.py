"""No value of any field, on any route, is an error of the server."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..turns import slow_but

pytest.importorskip("fastapi")

COMPLETE, CHAT, RESPOND = "/v1/completions", "/v1/chat/completions", "/v1/responses"
FUNCTION = {"name": "walk", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            "strict": False}  # fmt: skip
COMMON: dict[str, Any] = {
    "model": "tiny", "stream": False, "max_tokens": 1, "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
    "stop": ["x"], "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0},
    "response_format": {"type": "regex", "regex": "[ab]+"}, "strategy": "prompt_lookup", "strategy_config": {"max_ngram": 2},
    "deadline": 5.0, "cache_salt": "a", "drafted": True, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
    "safety_identifier": "a", "prompt_cache_key": "a", "prompt_cache_retention": "a",
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    COMPLETE: COMMON | {"prompt": "a", "echo": True},
    CHAT: COMMON | {
        "messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "name": "n", "tool_call_id": "i",
                      "tool_calls": [{"id": "i", "function": {"name": "walk", "arguments": "{}"}}]}],
        "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 2, "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto", "parallel_tool_calls": True, "chat_template_kwargs": {"a": 1},
    },
    RESPOND: {name: value for name, value in COMMON.items() if name not in ("max_tokens", "n", "response_format")} | {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
            {"type": "function_call", "call_id": "i", "name": "walk", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "i", "output": "a"},
        ],
        "instructions": "a", "max_output_tokens": 1, "tools": [FUNCTION | {"type": "function"}], "parallel_tool_calls": True,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "walk"}]},
        "text": {"format": {"type": "text"}}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        "reasoning": {"effort": "low", "summary": "auto"}, "chat_template_kwargs": {"a": 1}, "previous_response_id": None,
    },
}  # fmt: skip
#: Bodies that have other fields in the place of some.
OTHERS: dict[str, list[dict[str, Any]]] = {
    COMPLETE: [
        {"prompt": [5, 6], "logprobs": 2, "echo": False, "response_format": {"type": "choice", "choices": ["a", "b"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {
            "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 3, "multipleOf": 1},
                                             "b": {"type": "string", "minLength": 0, "maxLength": 3, "pattern": "a"},
                                             "c": {"type": "array", "minItems": 0, "maxItems": 2, "items": {"enum": [1]}}}}}}},
        {"response_format": {"type": "grammar", "grammar": 'start: "a"'}, "strategy": "suffix+prompt_lookup",
         "strategy_config": {"suffix": {"alpha": 1.0, "nodes": 4, "min_probability": 0.1}}},
        {"stream": True, "stream_options": {"include_usage": True}, "strategy": "threshold", "strategy_config": {"threshold": 0.3}},
    ],
    RESPOND: [{"input": "a", "tools": [], "tool_choice": "none", "text": {"format": {"type": "json_schema", "name": "n", "schema": {
        "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 3}}}}}}],
    CHAT: [{"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "walk"}}]}}}],
}  # fmt: skip
DIGITS = "9" * 400
#: As they stand in a body; Python's writer has not all of them.
EXTREMES = (
    "null", "true", "false", "0", "-1", "-0.0", "1e-320", "1e308", "-1e308", "1e400", "9223372036854775808", DIGITS, f"-{DIGITS}",
    "9" * 5000, '""', f'"{DIGITS}"', r'"\u0000"', r'"\ud800"', '"\U0001f600\U0001f600"', '" "', '"' + "(" * 300 + '"', "[]", "{}",
    f"[{DIGITS}]", '{"":""}', f'{{"{DIGITS}":{DIGITS}}}', "[" * 150 + "]" * 150, '{"a":' * 150 + "1" + "}" * 150, "[[],[]]",
)  # fmt: skip
PLACE = "\x01place\x01"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in a body, at any depth."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def written(body: dict[str, Any], path: tuple[Any, ...], extreme: str) -> bytes:
    """The body with another value at one place."""
    changed = copy.deepcopy(body)
    part: Any = changed
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = PLACE
    return json.dumps(changed).replace(json.dumps(PLACE), extreme).encode()


def cases(route: str) -> list[tuple[tuple[Any, ...], str, bytes]]:
    every, known = [], set()
    for body in (BODIES[route], *(BODIES[route] | other for other in OTHERS[route])):
        for path in places(body):
            own = (path, json.dumps(body[path[0]]))
            if own not in known:
                known.add(own)
                every += [(path, extreme, written(body, path, extreme)) for extreme in EXTREMES]
    return every


def failures(client: Any, chosen: list[tuple[tuple[Any, ...], str, bytes]], route: str) -> list[str]:
    wrong = []
    for path, extreme, content in chosen:
        response = client.post(route, content=content, headers={"Content-Type": "application/json"})
        if response.status_code not in (200, 400, 404, 504):  # another model's name, a deadline of nothing
            wrong.append(f"{path} = {extreme[:40]}: {response.status_code} {response.text[:200]}")
        elif response.status_code == 400 and not (error := response.json()["error"])["param"]:
            # No single field is at fault in a body that is no JSON, and in values that together leave no token to draw.
            if error["code"] != "invalid_json" and "nothing can be drawn" not in error["message"]:
                wrong.append(f"{path} = {extreme[:40]}: no field is named: {response.text[:200]}")
        elif response.status_code == 504 and path != ("deadline",):
            wrong.append(f"{path} = {extreme[:40]}: {response.text[:200]}")
    return wrong


@pytest.mark.parametrize("route", slow_but([CHAT], [COMPLETE, CHAT]))
def test_extreme_values_of_plain_fields_are_answered_or_refused(client: Any, route: str, caplog: Any) -> None:
    plain = {name: value for name, value in BODIES[route].items() if not isinstance(value, dict | list)}
    if route == CHAT:
        plain |= {"messages": [{"role": "user", "content": "a"}]}
        del plain["tool_choice"], plain["parallel_tool_calls"]
    assert client.post(route, json=plain).status_code == 200, "every other value would be refused because of this one"
    numbers = {name: value for name, value in plain.items() if isinstance(value, int | float)}
    # A penalty takes the other values' way: without one, steps apply top_k and the like.
    alone = {name: value for name, value in plain.items() if name not in numbers} | {
        "max_tokens": 1,
        "temperature": 0.5,
    }
    chosen = [
        ((name,), extreme, written(body | {name: value}, (name,), extreme))
        for body, extremes in ((plain, (DIGITS, "-1")), (alone, EXTREMES[3:14]))
        for name, value in numbers.items()
        for extreme in extremes
    ]
    assert not failures(client, chosen, route)
    assert not [record for record in caplog.records if record.name == "decoders.server"]


@pytest.mark.parametrize("route", [COMPLETE, CHAT, RESPOND])
def test_a_refusal_names_the_field_with_the_wrong_value(client: Any, route: str) -> None:
    from decoders.server.bodies import ChatBody, CompletionBody
    from decoders.server.response_bodies import ResponseBody

    kinds: dict[str, Any] = {COMPLETE: CompletionBody, CHAT: ChatBody, RESPOND: ResponseBody}
    given = {COMPLETE: {"prompt": "a", "max_tokens": 1}, CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
             RESPOND: {"input": "a", "max_output_tokens": 1}}[route]  # fmt: skip
    fields = {*kinds[route].model_fields, *kinds[route].instead, "nothing_has_this_name"}
    named = set()
    for name in fields:
        for wrong in ("-1e400", "5", '"wrong"', '{"a": 1e400}'):
            content = written({**given, name: None}, (name,), wrong)
            response = client.post(route, content=content, headers={"Content-Type": "application/json"})
            if response.status_code != 200:
                error = response.json()["error"]
                assert (error["param"] or "").partition(".")[0] == name, f"{name} = {wrong}: {error}"
                named.add(name)
    assert named == fields


@pytest.mark.slow
@pytest.mark.parametrize("route", [COMPLETE, CHAT, RESPOND])
def test_extreme_values_at_every_place_are_answered_or_refused(client: Any, route: str, caplog: Any) -> None:
    assert not failures(client, cases(route), route)
    assert not [record for record in caplog.records if record.name == "decoders.server"]
