"""``/v1/responses``: items in and out, events, responses that are kept, OpenAI's client and an agent on top of it."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

pytest.importorskip("fastapi")

from decoders.server.refusals import Refusal
from decoders.server.response_bodies import ResponseBody, messages_of
from decoders.server.responses import Kept

from .test_chat import post
from .test_reasoning import SCHEMA, THINKS

ROUTE = "/v1/responses"
WALK = {"type": "function", "name": "walk", "parameters": SCHEMA}
INPUT = {"instructions": "Be brief.", "input": "two and two"}


@pytest.fixture(scope="module")
def thinker(served: Any, service_of: Any) -> Iterator[Any]:
    with served(service_of("prompt_lookup", chat_template=THINKS), keys=["one", "two"]) as client:
        client.headers["Authorization"] = "Bearer one"
        yield client


TEXT, IMAGE = {"type": "input_text", "text": "a"}, {"type": "input_image", "detail": "auto"}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [*parts]}]}


def respond(client: Any, **body: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json=INPUT | {"max_output_tokens": 20, "temperature": 1, "seed": 3} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    checked("Response").validate_python(answer)
    return answer


def events(client: Any, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed response, whose names are their types."""
    body = INPUT | {"max_output_tokens": 20, "temperature": 1, "seed": 3, "stream": True} | body
    with client.stream("POST", ROUTE, json=body) as response:
        assert response.status_code == 200
        blocks = "".join(response.iter_text()).strip().split("\n\n")
    pairs = [block.split("\n") for block in blocks if not block.startswith(":")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    for event in found:
        checked("ResponseStreamEvent").validate_python(event)
    return found


@functools.cache
def checked(name: str) -> TypeAdapter[Any]:
    """What OpenAI's client takes for a value of that name."""
    return TypeAdapter(getattr(pytest.importorskip("openai.types.responses"), name))


def test_a_response_is_what_a_conversation_answers(client: Any) -> None:
    answer = respond(client)
    message = post(client, max_tokens=20, temperature=1, seed=3)
    (item,) = answer["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == message["choices"][0]["message"]["content"]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    usage, own = answer["usage"], message["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (own["prompt_tokens"], own["completion_tokens"])
    assert usage["decoders"]["strategy"] == "prompt_lookup"
    parts = [{"type": "input_text", "text": "two "}, {"type": "input_text", "text": "and two"}]
    items = [{"role": "developer", "content": "Be brief."}, {"type": "message", "role": "user", "content": parts}]
    assert respond(client, input=items, instructions=None)["output"][0]["content"] == item["content"]
    listed = respond(client, include=["message.output_text.logprobs"], top_logprobs=2)["output"][0]["content"][0][
        "logprobs"
    ]
    assert "".join(entry["token"] for entry in listed) and all(len(entry["top_logprobs"]) == 2 for entry in listed)


def test_a_text_follows_its_format(client: Any) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    answer = respond(client, text=text, max_output_tokens=60)
    assert 0 <= json.loads(answer["output"][0]["content"][0]["text"])["n"] <= 9
    assert answer["status"] == "completed" and answer["text"] == text | {
        "format": text["format"] | {"description": None},
        "verbosity": None,
    }
    assert respond(client, text={"format": {"type": "json_object"}})["output"][0]["content"][0]["text"][0] == "{"


@pytest.mark.parametrize("calls", [False, True])
def test_events_tell_of_items_as_they_grow(thinker: Any, calls: bool) -> None:
    more: dict[str, Any] = (
        {"tools": [WALK], "tool_choice": "required"} if calls else {"text": {"format": {"type": "json_object"}}}
    )
    body = more | {"thinking_budget": 9, "max_output_tokens": 60, "parallel_tool_calls": False}
    found, whole = events(thinker, **body), respond(thinker, **body)
    kind = "function_call_arguments" if calls else "output_text"
    part = [] if calls else ["content_part.added"]
    done = [] if calls else ["content_part.done"]
    order = [event["type"].removeprefix("response.") for event in found]
    assert [name for place, name in enumerate(order) if name != order[place - 1]] == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done", "output_item.added", *part, f"{kind}.delta", f"{kind}.done", *done,
        "output_item.done", whole["status"],
    ]  # fmt: skip
    response = found[-1]["response"]
    assert (response["status"] == "completed") or not calls
    for one, two in zip(response["output"], whole["output"], strict=True):
        assert {**one, "id": 0, "call_id": 0} == {**two, "id": 0, "call_id": 0}
    for index, item in enumerate(response["output"]):
        deltas = [
            event["delta"] for event in found if event["type"].endswith(".delta") and event["output_index"] == index
        ]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == said and len(deltas) > 1
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 9
    thought, answer = response["output"]
    assert thought["type"] == "reasoning" and thought["content"][0]["text"]
    if calls:
        assert (
            answer["name"] == "walk" and json.loads(answer["arguments"])["n"] <= 9 and answer["status"] == "completed"
        )


def test_conversations_go_on_from_what_is_kept(thinker: Any) -> None:
    body: dict[str, Any] = {"tools": [WALK], "max_output_tokens": 80, "thinking_budget": 4}
    first = respond(thinker, **body, tool_choice={"type": "function", "name": "walk"}, cache_salt="a")
    call = next(item for item in first["output"] if item["type"] == "function_call")
    given = [{"type": "function_call_output", "call_id": call["call_id"], "output": "walked"}]
    again: dict[str, Any] = {"tools": [WALK], "max_output_tokens": 8, "thinking_budget": 0, "cache_salt": "a"}
    on = respond(thinker, input=given, previous_response_id=first["id"], **again)
    items = [{"role": "user", "content": INPUT["input"]}, *first["output"], *given]
    assert on["output"][0]["content"] == respond(thinker, input=items, **again)["output"][0]["content"]
    assert on["usage"]["input_tokens_details"]["cached_tokens"] > 20  # the conversation is not read again
    assert thinker.get(f"{ROUTE}/{first['id']}", params={"cache_salt": "a"}).json() == first
    # Of another client, or with another salt, there is none.
    others = {"Authorization": "Bearer two"}
    wrong = {"input": "a", "previous_response_id": first["id"]}
    for headers, salt in ((others, "a"), ({}, "b"), ({}, None)):
        answer = thinker.post(ROUTE, json=wrong | ({"cache_salt": salt} if salt else {}), headers=headers)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "previous_response_not_found"
        assert answer.json()["error"]["param"] == "previous_response_id"
        for method in ("GET", "DELETE"):
            params = {"cache_salt": salt} if salt else {}
            assert thinker.request(method, f"{ROUTE}/{first['id']}", params=params, headers=headers).status_code == 404
    gone = thinker.delete(f"{ROUTE}/{first['id']}", params={"cache_salt": "a"})
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert thinker.get(f"{ROUTE}/{first['id']}", params={"cache_salt": "a"}).status_code == 404
    assert thinker.get(f"{ROUTE}/{respond(thinker, store=False)['id']}").status_code == 404


def test_what_is_kept_is_bounded_in_bytes() -> None:
    kept = Kept(3000)
    me, other = ("me", "a"), ("other", "")
    kept.keep(other, {"id": "resp_0"}, [{"role": "user", "content": "x" * 600}])
    for number in range(9):
        kept.keep(me, {"id": f"resp_{number}"}, [{"role": "user", "content": "x" * 600}])
        assert kept.find(me, "resp_0" if number < 3 else f"resp_{number}")
    kept.keep(me, {"id": "large"}, [{"content": "x" * 5000}])
    assert 2000 < kept.size <= 3000
    assert kept.find(me, "resp_8") and kept.find(other, "resp_0")  # a client makes room for its own
    for owner, id in ((me, "resp_1"), (me, "large"), (("me", "b"), "resp_8")):
        with pytest.raises(Refusal, match="not found"):
            kept.find(owner, id)
    kept.delete(me, "resp_8")
    kept.delete(other, "resp_0")
    assert kept.size < 2000


def test_a_conversation_grows_no_larger_than_a_body(served: Any, service_of: Any) -> None:
    with served(service_of(body=500)) as client:
        first = respond(client, input="a" * 100, max_output_tokens=1)
        second = respond(client, input="b" * 100, max_output_tokens=1, previous_response_id=first["id"])
        answer = client.post(ROUTE, json={"input": "d", "previous_response_id": second["id"]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "previous_response_id"
        assert "larger than the body of a request may be" in answer.json()["error"]["message"]
        assert client.get(f"{ROUTE}/{second['id']}").json() == second


def test_a_choice_among_tools_has_a_mode_and_tools() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "walk"}]}
    choice = ResponseBody.model_validate({"input": "a", "tool_choice": allowed})._choice()
    assert choice["allowed_tools"].mode == "required" and choice["allowed_tools"].tools[0].function.name == "walk"
    for name in ("mode", "tools"):
        body = {"input": "a", "tool_choice": {key: value for key, value in allowed.items() if key != name}}
        assert ResponseBody.model_validate(body)._choice() == {"type": "allowed_tools"}


def test_thoughts_belong_to_what_the_assistant_says_next() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    messages = messages_of([thought, user, thought, said, said])
    assert messages == [user, said | {"reasoning_content": "hm"}, said]


@pytest.mark.parametrize("more", [{}, {"tools": [WALK]}])
def test_log_probabilities_are_of_the_text_alone(thinker: Any, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "include": ["message.output_text.logprobs"],
        "thinking_budget": 5,
        "stop": ["e", "aa bb cc dd"],
    }
    body |= {"max_output_tokens": 40} | more
    whole, found = respond(thinker, **body), events(thinker, **body)
    part, streamed = (each["output"][1]["content"][0] for each in (whole, found[-1]["response"]))
    assert part["text"] == streamed["text"] != ""
    assert [entry["bytes"] for entry in part["logprobs"]] == [entry["bytes"] for entry in streamed["logprobs"]]
    data = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
    assert data.decode(errors="replace") == part["text"]
    told = [entry for event in found if event["type"].endswith("text.delta") for entry in event.get("logprobs", ())]
    assert told == streamed["logprobs"][: len(told)] and told


def test_a_response_tells_which_tokens_were_drafted(client: Any) -> None:
    answer = respond(client, drafted=True)
    tokens = answer["decoders"]["tokens"]
    assert "".join(token["text"] for token in tokens) == answer["output"][0]["content"][0]["text"]
    assert "decoders" not in respond(client)
    streamed = events(client, drafted=True)[-1]["response"]["decoders"]["tokens"]
    # What is drafted follows the clock: another call may draft other tokens of the same text.
    assert "".join(token["text"] for token in streamed) == "".join(token["text"] for token in tokens)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "messages is not supported: it is called input here"),
        ({"background": True}, "background", "background: Input should be False"),
        ({"conversation": "conv_1"}, "conversation", "use previous_response_id"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "only functions are supported, not tools of type 'web_search'"),
        ({"tool_choice": {"type": "function", "name": "run"}, "tools": [WALK]}, "tool_choice", "no tool is called 'run'"),
        ({"instruction": "a"}, "instruction", "Did you mean 'instructions'"),
        ({"text": {"format": {"type": "json_schema", "shema": {}}}}, "text.format.shema", "Did you mean 'schema'"),
        ({"input": [{"type": "functon_call"}]}, "input.0.type", "Did you mean 'function_call'"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "not a role"),
        (said(TEXT, IMAGE | {"image_url": "https://a/b.png"}), "input.0.content.1", "nothing is fetched, not 'https://a"),
        (said(IMAGE | {"file_id": "file_1"}), "input.0.content.0", "not a file"),
        (said(IMAGE | {"image_url": "data:image/png;base64,AA=="}), "input", "text are supported, no images"),
        (said(TEXT, {"type": "input_file", "file_data": "a"}), "input.0.content.1", "text and input_image are "
                                                                                    "supported, not 'input_file'"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]}, "input.0.output.0", "'input_image'"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "walk"}]}, "input.0.arguments", "a text is needed"),
        ({"input": [], "instructions": None}, "input", "there is nothing to answer"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
        ({"max_output_tokens": 201}, "max_output_tokens", "max_output_tokens is 201; the limit is 200"),
        ({"input": "a " * 300}, "input", "tokens; the limit is 300"),
        ({"text": {"format": {"type": "regex", "regex": "("}}}, "text.format", "regex"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "512 characters"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}}, "tool_choice.tools.0.name", "missing"),
        ({"input": [{"type": "x" * 5000}]}, "input.0.type", "…' are not supported. Choose from"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(client: Any, body: dict[str, Any], param: str, message: str) -> None:
    answer = client.post(ROUTE, json=INPUT | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"]


@pytest.mark.parametrize(
    "field",
    ['"strategy_config": {"a": 1e400}', '"tools": [{"type": "function", "name": "f", "parameters": {"a": -1e400}}]'],
)
def test_what_json_has_not_is_not_said_again(client: Any, field: str) -> None:
    body = f'{{"input": "a", "max_output_tokens": 1, {field}}}'
    answer = client.post(ROUTE, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "out of range" in answer.json()["error"]["message"]


class Step(BaseModel):
    size: int = Field(ge=1, le=9)


def test_the_client_of_openai(thinker: Any) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{thinker.base_url}/v1", api_key="one", max_retries=0, timeout=60) as api:
        more: dict[str, Any] = {
            "extra_body": {"thinking_budget": 5, "seed": 1},
            "reasoning": {"effort": "low", "summary": "auto"},
        }
        asked: dict[str, Any] = dict(model="tiny", input=INPUT["input"], max_output_tokens=60, **more)
        whole = api.responses.parse(**asked, text_format=Step)
        assert isinstance(whole.output_parsed, Step)
        with api.responses.stream(**asked, text_format=Step) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert final.output_text == text == whole.output_text and isinstance(final.output_parsed, Step)
        assert api.responses.retrieve(whole.id).output_text == whole.output_text
        on = api.responses.create(**asked | {"input": "and two"}, previous_response_id=whole.id)
        assert on.usage.input_tokens > whole.usage.input_tokens
        api.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            api.responses.create(**asked, previous_response_id=whole.id)


@pytest.mark.slow  # importing the framework takes seconds
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_its_functions(thinker: Any, streamed: bool) -> None:
    openai, agents = pytest.importorskip("openai"), pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    walked: list[int] = []

    @agents.function_tool(is_enabled=lambda *_: not walked)  # a random model would call it again and again
    def walk(steps: Literal[1, 2, 3]) -> str:
        """Walks.

        Args:
            steps: how many.
        """
        walked.append(steps)
        return "walked"

    async def run() -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{thinker.base_url}/v1", api_key="one", max_retries=0, timeout=60
        ) as api:
            settings = agents.ModelSettings(tool_choice="required", max_tokens=120, temperature=1, parallel_tool_calls=False,
                                            extra_body={"thinking_budget": 4, "seed": 2})  # fmt: skip
            model = agents.OpenAIResponsesModel(model="tiny", openai_client=api)
            agent = agents.Agent(
                name="walker", instructions="Walk.", tools=[walk], model=model, model_settings=settings, output_type=Step,
            )  # fmt: skip
            if not streamed:
                return await agents.Runner.run(agent, "go", max_turns=3)
            result = agents.Runner.run_streamed(agent, "go", max_turns=3)
            kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
            assert {
                "response.function_call_arguments.delta",
                "response.output_text.delta",
                "response.reasoning_text.delta",
            } <= {*kinds}
            return result

    result = asyncio.run(run())
    assert len(walked) == 1 and isinstance(result.final_output, Step)
    assert [type(item).__name__ for item in result.new_items] == [
        "ReasoningItem", "ToolCallItem", "ToolCallOutputItem", "ReasoningItem", "MessageOutputItem",
    ]  # fmt: skip
