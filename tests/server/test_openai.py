"""OpenAI's own client speaks with the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

ASKED: list[Any] = [{"role": "user", "content": "two and two"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "walk",
            "parameters": {
                "type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False,
            },
        },
    }
]  # fmt: skip


@pytest.fixture
def api(client: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=60) as api:
        yield api


def test_completions_and_their_streams(api: Any) -> None:
    options: dict[str, Any] = dict(model="tiny", prompt="abcabc", max_tokens=16, temperature=0.8, seed=3, stop=["\x00"])
    whole = api.completions.create(**options, extra_body={"strategy": "prompt_lookup"})
    chunks = list(api.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    assert whole.usage.decoders["strategy"] == "prompt_lookup"


def test_conversations_and_their_streams(api: Any) -> None:
    options: dict[str, Any] = dict(model="tiny", messages=ASKED, max_completion_tokens=16, temperature=0.8, seed=3)
    whole = api.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(api.chat.completions.create(**options, stream=True))
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == whole.choices[0].message.content


class Step(pydantic.BaseModel):
    size: int = pydantic.Field(ge=1, le=9)
    done: bool


def test_a_parsed_answer_is_an_object(api: Any) -> None:
    answer = api.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Step, max_tokens=60, temperature=1, seed=2
    )
    assert isinstance(answer.choices[0].message.parsed, Step)


def test_functions_are_called(api: Any) -> None:
    options: dict[str, Any] = dict(
        model="tiny", messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=120,
        temperature=1, seed=2,
    )  # fmt: skip
    whole = api.chat.completions.create(**options)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "walk" and json.loads(call.function.arguments)["a"] in (1, 2, 3)
    with api.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert final.choices[0].finish_reason == "tool_calls"
    answer: list[Any] = [*ASKED, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    again = api.chat.completions.create(model="tiny", messages=answer, tools=TOOLS, tool_choice="none", max_tokens=4)
    assert again.choices[0].message.content is not None


def test_errors_are_the_clients_own(api: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="Did you mean 'strategy'") as caught:
        api.completions.create(model="tiny", prompt="a", extra_body={"stratgy": "x"})
    assert caught.value.param == "stratgy"
    assert [model.id for model in api.models.list()] == ["tiny"]


def test_the_async_client_gets_many_answers_at_once(client: Any, api: Any) -> None:
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as many:
            asked = [
                many.completions.create(model="tiny", prompt="ab", max_tokens=8, seed=s, temperature=1)
                for s in range(12)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    texts = asyncio.run(ask())
    for seed in (0, 7):
        assert (
            api.completions.create(model="tiny", prompt="ab", max_tokens=8, seed=seed, temperature=1).choices[0].text
            == texts[seed]
        )
