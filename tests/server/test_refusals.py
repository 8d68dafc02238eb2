"""Whatever is refused is refused in OpenAI's form, with a status, a field and what would be right."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.errors import SettingsError
from decoders.prompts.templates import read_template

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "walk"}}

CASES: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (COMPLETE, {"prompt": "a", "max_token": 3}, 400, "max_token", "Did you mean 'max_tokens'"),
    (COMPLETE, {"prompt": "a", "stratgy": "auto"}, 400, "stratgy", "Did you mean 'strategy'"),
    (COMPLETE, {"prompt": "a", "best_of": 2}, 400, "best_of", "not supported: ask for n"),
    (COMPLETE, {"prompt": "a", "guided_regex": "a"}, 400, "guided_regex", "use response_format"),
    (COMPLETE, {"max_tokens": 3}, 400, "prompt", "missing"),
    (COMPLETE, {"messages": HI}, 400, "messages", "not supported: send them to /v1/chat/completions"),
    (COMPLETE, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": None}, 400, "prompt", "missing"),
    (COMPLETE, {"prompt": 5}, 400, "prompt", "must be a text, token ids, or a list of either, not 5"),
    (COMPLETE, {"prompt": ["a", 1]}, 400, "prompt.1", "valid string, not 1"),
    (COMPLETE, {"prompt": "a", "best_of": 2, "n": 1}, 400, "best_of", "not supported"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix", "left to right"),
    (COMPLETE, {"prompt": "a", "max_token": None}, 400, "max_token", "Did you mean 'max_tokens'"),
    (COMPLETE, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "at most 16 items"),
    (COMPLETE, {"prompt": "a", "stop": 5}, 400, "stop", "must be a text or a list of up to 16, not 5"),
    (COMPLETE, {"prompt": [3, 999]}, 400, "prompt", "not a token id"),
    (COMPLETE, {"prompt": "a", "max_tokens": "3"}, 400, "max_tokens", "valid integer"),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1, not 0"),
    (COMPLETE, {"prompt": "a", "max_tokens": 201}, 400, "max_tokens", "the limit is 200"),
    (COMPLETE, {"prompt": "a" * 301}, 400, "prompt", "the limit is 300"),
    (COMPLETE, {"prompt": "a" * 290, "max_tokens": 150}, 400, "max_tokens", "can be 110"),
    (COMPLETE, {"prompt": "a", "temperature": -1}, 400, "temperature", "greater"),
    (COMPLETE, {"prompt": "a", "top_p": 0}, 400, "top_p", "greater"),
    (COMPLETE, {"prompt": "a", "n": 9}, 400, "n", "the limit is 8"),
    (COMPLETE, {"prompt": ["a"] * 5, "n": 2}, 400, "n", "the limit is 8"),
    (COMPLETE, {"prompt": "a", "stop": ""}, 400, "stop", "at least 1"),
    (COMPLETE, {"prompt": "a", "seed": 2**64}, 400, "seed", ""),
    (COMPLETE, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "not a token id"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"²": 1}}, 400, "logit_bias", "not a token id"),
    (COMPLETE, {"prompt": "a", "echo": True, "logprobs": 1}, 400, "echo", "not supported"),
    (COMPLETE, {"prompt": "a", "model": "tinny"}, 404, "model", "only 'tiny'"),
    (COMPLETE, {"prompt": "a", "strategy": "prompt-lokup"}, 400, "strategy", "Did you mean 'prompt_lookup'"),
    (COMPLETE, {"prompt": "a", "strategy_config": {"max_ngrm": 3}}, 400, "strategy_config.max_ngrm", "Did you mean 'max_ngram'"),
    (COMPLETE, {"prompt": "a", "strategy_config": {"max_ngram": -3}}, 400, "strategy_config", "strategy_config.max_ngram: Input"),
    (COMPLETE, {"prompt": "a", "strategy": "grammar"}, 400, "strategy", "needs a grammar: give response_format or tools"),
    (COMPLETE, {"prompt": "a", "strategy": "prompt_lookup+medusa"}, 400, "strategy", "without the heads for it. Choose from: auto"),
    (COMPLETE, {"prompt": "a", "strategy": "medusa", "strategy_config": {"heads": "x"}}, 400, "strategy_config.heads", "operator"),
    (COMPLETE, {"prompt": "a", "strategy": "auto", "strategy_config": {"config": {"ngram": {"table": "x"}}}}, 400,
     "strategy_config.config", "operator"),
    (COMPLETE, {"prompt": "a", "strategy": "staged", "strategy_config": {"stage": "/etc/x"}}, 400, "strategy_config.stage", "operator"),
    (COMPLETE, {"prompt": "a", "strategy": "speculative"}, 400, "strategy", "without a draft model (--assistant). Choose"),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format", "json_schema"),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "regex"}}, 400, "response_format.regex", "missing"),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "regex", "regex": "("}}, 400, "response_format", ""),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "regex", "regex": r"(a)\1"}}, 400, "response_format", ""),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "grammar"}}, 400, "response_format", "name"),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "grammar", "grammar": "/etc/hosts"}}, 400, "response_format", "start"),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "grammar", "name": "jsn"}}, 400, "response_format", "json"),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x/y"}}}}, 400,
     "response_format", ""),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}, 400,
     "response_format.json_schema.shema", "Did you mean 'schema'"),
    (COMPLETE, {"prompt": "a", "strategy": "suffix+suffix"}, 400, "strategy", "merged only once"),
    (COMPLETE, {"prompt": ["a"] * 9}, 400, "prompt", "the limit is 8"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 301}]}, 400, "messages", "the limit is 300"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": [{"role": "boss", "content": "hi"}]}, 400, "messages.0.role", "'user'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages.0.content.0", "text"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, 400, "messages.0.content.0", 'an object, not "hi"'),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "a text or a list of parts"),
    (CHAT, {"messages": HI, "max_completion_tokens": 201}, 400, "max_completion_tokens", "max_completion_tokens is 201"),
    (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, 400, "modalities", "text only"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
    (CHAT, {"messages": HI, "functions": []}, 400, "functions", "use tools"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice", "needs tools"),
    (CHAT, {"messages": HI, "tools": [TOOL, TOOL]}, 400, "tools", "different names"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "run"}}}, 400, "tool_choice",
     "Choose from: walk"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function"}}, 400, "tool_choice.function", "missing"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "any"}, 400, "tool_choice", 'not "any"'),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "run"}}]}}}, 400, "tool_choice", "Choose from: walk"),
    (CHAT, {"messages": HI, "tools": [TOOL], "response_format": {"type": "grammar", "grammar": 'start: "a"'}}, 400, "response_format",
     "leave one"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "no blanks"}}]}, 400, "tools.0.function.name", ""),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", "tokenize"),
    (CHAT, {"messages": HI, "prompt": "a"}, 400, "prompt", "not supported: send it to /v1/completions"),
]  # fmt: skip


@pytest.mark.parametrize("route, body, status, param, words", CASES)
def test_a_wrong_field_is_named(
    client: Any, route: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:  # fmt: skip
    response = client.post(route, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert words in error["message"]


#: Words of Python's callers, which mean nothing in a request.
OF_PYTHON = re.compile(r"decoders\.\w|\w=(?!=)|generate\(|enable\(|Settings:|max_new_tokens|assistant_model")


@pytest.mark.parametrize("format", [
    {"type": "regex", "regex": "(?<=a)b"},
    {"type": "regex", "regex": "a{9999999}"},
    {"type": "choice", "choices": ["a" * 90, "b"] * 70_000},
    {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "number", "multipleOf": 1.0e-70}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(?<=a)b"}}},
    {"type": "grammar", "grammar": "start: x"},
])  # fmt: skip
def test_errors_of_grammars_speak_of_requests(service_of: Any, served: Any, format: dict[str, Any]) -> None:
    with served(service_of(body=40 << 20)) as client:
        response = client.post(COMPLETE, json={"prompt": "a", "max_tokens": 1, "response_format": format})
        error = response.json()["error"]
        assert response.status_code == 400 and not OF_PYTHON.search(error["message"]), error


@pytest.mark.parametrize("default", ["prompt_lookup", "grammar"])
def test_strategies_that_a_server_lacks_are_not_named_to_clients(default: str, service_of: Any, served: Any) -> None:
    service = service_of(default)
    with served(service) as client:
        assert "lookahead" in service.offered.names and not {"medusa", "speculative"} & {*service.offered.names}
        for strategy in [
            "nothing",
            "speculativ",
            "medusa",
            "staged",
            "lookahead+eagle3",
            "mtp",
            "dflash",
            "grammar",
            None,
        ]:
            response = client.post(COMPLETE, json={"prompt": "a", "max_tokens": 1, "strategy": strategy})
            if strategy is None and default == "prompt_lookup":
                assert response.status_code == 200
                continue
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "strategy") and not OF_PYTHON.search(
                error["message"]
            )
            listed = error["message"].partition("Choose from: ")[2]
            assert "medusa" not in listed and ("lookahead" in listed or "response_format" in error["message"])


NULLABLE = "stream n stop seed logprobs functions function_call modalities audio prediction reasoning_effort drafted verbosity best_of"
NULLABLE += " web_search_options echo suffix response_format guided_json prompt_cache_retention"


@pytest.mark.parametrize("route", [COMPLETE, CHAT])
def test_null_and_what_asks_for_nothing_are_as_if_not_there(client: Any, route: str) -> None:
    body = {"prompt": "a", "echo": None} if route == COMPLETE else {"messages": HI, "tools": None, "tool_choice": None}
    plain = client.post(route, json={key: value for key, value in body.items() if value} | {"max_tokens": 2})
    others = set(NULLABLE.split()) - (set() if route == COMPLETE else {"echo"})
    silent: dict[str, Any] = {
        "best_of": 1,
        "suffix": "",
        "modalities": ["text"],
        "stream_options": {"include_usage": None},
    }
    if route == CHAT:
        silent |= {"tool_choice": "auto", "logprobs": False, "top_logprobs": 0}
    for more in (dict.fromkeys(others), silent, silent | {"n": 1}):
        response = client.post(route, json=body | {"max_tokens": 2} | more)
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == plain.json()["choices"]


def nested(begin: str, end: str, depth: int = 190) -> Any:
    """As deep as a body may be."""
    return json.loads(begin * depth + "1" + end * depth)


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


@pytest.mark.parametrize(
    "body",
    [
        *(
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}
            for arguments in ["[" * 5000, "[" * 900 + "]" * 900, '{"a": NaN}', r'{"a": "\ud800"}', "9" * 5000, nested("[", "]")]
        ),
        {"response_format": schema_of({"const": nested("[", "]")})},
        {"response_format": schema_of({"type": "object", "properties": {"a": {"enum": [nested('{"a":', "}")]}}})},
        {"response_format": schema_of(nested('{"items":', "}", 150))},
        {"response_format": schema_of(nested('{"anyOf":[', "]}", 90))},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested('{"items":', "}", 150)}}],
         "tool_choice": "required"},
        {"response_format": {"type": "regex", "regex": "(" * 5000 + ")" * 5000}},
        {"response_format": {"type": "regex", "regex": "a" + "*" * 5000}},
        {"response_format": {"type": "grammar", "grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}},
        {"strategy_config": {"a": nested("[", "]")}},
        {"chat_template_kwargs": {"a": nested("[", "]")}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "more": nested("[", "]", 180)}]}]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [True, False])
def test_what_is_nested_deeply_or_no_text_is_no_error_of_the_server(
    client: Any, plain: Any, template: bool, body: dict[str, Any]
) -> None:
    response = (client if template else plain).post(CHAT, json={"messages": HI, "max_tokens": 1} | body)
    assert response.status_code in (200, 400), response.text


@pytest.fixture(scope="module")
def plain(served: Any, service_of: Any) -> Any:
    """A client of a server whose template knows no calls."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with served(service_of(chat_template=template)) as client:
        yield client


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'"a"', b"null", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"[" * 5000, b'{"prompt": "\\ud800"}',
    ],
)  # fmt: skip
def test_a_malformed_body_is_refused(client: Any, content: bytes) -> None:
    response = client.post(COMPLETE, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_another_type_is_refused(client: Any) -> None:
    """A web page can send text/plain to any address without asking."""
    response = client.post(COMPLETE, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


def test_unknown_routes_and_methods(client: Any) -> None:
    missing = client.get("/v1/model")
    assert missing.status_code == 404 and "/v1/models" in missing.json()["error"]["message"]
    for path in (COMPLETE, CHAT):
        slashed = client.post(f"{path}/", json={})
        assert slashed.status_code == 404 and f"Did you mean {path!r}" in slashed.json()["error"]["message"]
    wrong = client.get(COMPLETE)
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"
    assert wrong.json()["error"]["message"].endswith("this route takes POST")
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/other").status_code == 404
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and "prompt_lookup" in card["decoders"]["strategies"]


def test_what_can_be_got_can_be_asked_for_its_head(client: Any) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/tiny"):
        head, got = client.head(path), client.get(path)
        assert head.status_code == 200 and not head.content
        assert head.headers["content-type"] == got.headers["content-type"]
    assert client.head("/v1/models/other").status_code == 404
    assert client.head(COMPLETE).status_code == 405


def test_too_large_a_body_is_refused_with_and_without_its_length(served: Any, service_of: Any) -> None:
    with served(service_of(body=1000)) as client:
        large = json.dumps({"prompt": "a" * 2000}).encode()
        assert client.post(COMPLETE, content=large, headers={"Content-Type": "application/json"}).status_code == 413

        def pieces() -> Any:
            for begin in range(0, len(large), 100):
                yield large[begin : begin + 100]

        response = client.post(COMPLETE, content=pieces(), headers={"Content-Type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        assert client.post(COMPLETE, json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_key_is_asked_for(served: Any, service_of: Any) -> None:
    with served(service_of(), keys=["s3cret-ü", "other"]) as client:
        body = {"prompt": "a", "max_tokens": 2}
        for given, words in [
            ("", "missing"),
            ("Bearer wrong", "wrong"),
            ("Basic s3cret", "missing"),
            ("Bearer", "missing"),
        ]:
            response = client.post(COMPLETE, json=body, headers={"Authorization": given} if given else {})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert words in response.json()["error"]["message"]
        assert client.get("/metrics").status_code == client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == client.get("/").status_code == 200
        right = {"Authorization": "Bearer s3cret-ü".encode()}
        assert client.post(COMPLETE, json=body, headers=right).status_code == 200


def test_only_its_own_names_are_answered_on_a_loopback_address(served: Any, service_of: Any) -> None:
    from decoders.server.limits import hosts_of

    assert hosts_of("0.0.0.0", []) is None
    with served(service_of(), hosts=hosts_of("127.0.0.1", ["my.test"])) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health", headers={"Host": "MY.test:80"}).status_code == 200
        assert client.get("/health", headers={"Host": "[::1]:80"}).status_code == 200
        assert client.get("/health", headers={"Host": "evil.test"}).status_code == 403


def test_without_a_template_there_is_no_chat(served: Any, service_of: Any, tokenizer: Any) -> None:
    import copy

    from decoders.server.prompts import Conversations

    bare, service = copy.deepcopy(tokenizer), service_of()
    bare.chat_template = None
    service.conversations = Conversations(bare)
    with served(service) as client:
        response = client.post(CHAT, json={"messages": HI})
        assert response.status_code == 400 and response.json()["error"]["code"] == "no_chat_template"


def test_a_template_that_refuses_is_quoted(served: Any, service_of: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with served(service_of(chat_template=template)) as client:
        response = client.post(CHAT, json={"messages": HI})
        assert response.status_code == 400 and "roles must alternate" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"{{ messages }}\n{% if %}", "bad.jinja is invalid: line 2: Expected an expression"),
        (b"{% for m in messages %}", "line 1"),
        (b"\xff", "bad.jinja is not text in UTF-8"),
    ],
)
def test_a_broken_template_is_refused_before_a_model_is_loaded(tmp_path: Any, content: bytes, words: str) -> None:
    from typer.testing import CliRunner

    from decoders.cli import app

    path = tmp_path / "bad.jinja"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=re.escape(words)):
        read_template(path)
    result = CliRunner().invoke(app, ["serve", "no-model", "--chat-template", str(path)])
    assert result.exit_code == 2 and "--chat-template" in result.output


def test_a_template_that_wants_messages_is_read(tmp_path: Any) -> None:
    path = tmp_path / "good.jinja"
    path.write_text("{{ raise_exception('none') }}{{ messages[0].content }}{% generation %}{% endgeneration %}")
    assert read_template(path) == path.read_text()


def test_every_setting_that_names_a_file_is_the_operators() -> None:
    import typing
    from pathlib import Path

    from decoders.registry import registry
    from decoders.server.client_settings import OPERATORS

    naming = set()
    for entry in registry().strategies().values():
        for name, field in entry.cls.settings_class.model_fields.items():
            kinds = set(typing.get_args(field.annotation)) | {field.annotation}
            if Path in kinds or {str, type(None)} <= kinds:  # a name that may be left out is no choice among words
                naming.add(name)
    assert naming and naming <= set(OPERATORS)


@pytest.mark.parametrize("keys, status", [(None, 200), ((), 200), ("secret", 401), (["secret"], 401)])
def test_an_application_takes_no_key_one_or_several(service_of: Any, keys: Any, status: int) -> None:
    from fastapi.testclient import TestClient

    from decoders.server.app import make_app

    with TestClient(make_app(service_of(), keys, None)) as client:
        assert client.get("/v1/models").status_code == status
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_key_may_have_any_letters(service_of: Any) -> None:
    from fastapi.testclient import TestClient

    from decoders.server.app import make_app

    with TestClient(make_app(service_of(), "voilà", None)) as client:
        for key, status in (("voilà".encode(), 200), ("voilà ".encode(), 200), (b"voil", 401)):
            headers = {b"Authorization": b"Bearer " + key}
            assert client.get("/v1/models", headers=headers).status_code == status
