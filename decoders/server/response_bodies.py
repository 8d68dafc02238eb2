"""The fields of requests to ``/v1/responses``, and their conversion to chat requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ..errors import shortened, suggest
from .bodies import (
    INSTEAD,
    MOST_MESSAGES,
    AllowedTools,
    BaseBody,
    ChatBody,
    ChoiceFormat,
    Effort,
    Function,
    GrammarFormat,
    JsonObjectFormat,
    NamedSchema,
    NamedTool,
    Part,
    RegexFormat,
    Several,
    StreamOptions,
    TextFormat,
    Tool,
    ToolName,
)
from .refusals import wrong


class FlatSchemaFormat(NamedSchema):
    """JSON that conforms to a JSON schema. Unlike in chat requests, the schema's fields stand beside ``type``."""

    type: Literal["json_schema"]


FlatFormat = Annotated[
    TextFormat | JsonObjectFormat | FlatSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]


class TextSettings(Part):
    """The format of the answer's text."""

    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(Part):
    """The reasoning effort. Thoughts are returned whole, not as summaries."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FlatTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") != "function":
            kind = shortened(repr(given.get("type")))
            raise PydanticCustomError(
                "unsupported_tool", "only functions are supported, not tools of type {kind}", {"kind": kind}
            )
        return given


class FlatName(ToolName):
    """The name of a function. Unlike in chat requests, it stands beside ``type``."""

    type: Literal["function"]


class FlatChoice(Part):
    """The function that must be called, or the tools that may be called."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[FlatName] | None = Field(None, max_length=128)


class ResponseBody(BaseBody):
    """``POST /v1/responses``."""

    instead: ClassVar[dict[str, str]] = INSTEAD | {
        "messages": "it is called input here",
        "max_tokens": "it is called max_output_tokens here",
        "max_completion_tokens": "it is called max_output_tokens here",
        "response_format": 'use text={"format": …}',
        "reasoning_effort": 'use reasoning={"effort": …}',
        "n": "one response per request",
        "background": "responses are complete, or streamed",
        "conversation": "use previous_response_id",
        "prompt": "there are no stored prompts: use instructions and input",
        "max_tool_calls": "functions are called by the client",
        "context_management": "nothing is left out of a conversation",
        "moderation": "this server has none",
    }
    names: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }

    input: str | Annotated[Several[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=200)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[FlatTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    thinking_budget: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    # The metadata is kept with the response; the limits are OpenAI's.
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    stream_options: StreamOptions | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items: messages, function calls, outputs of functions, and thoughts."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def chat(self, earlier: list[dict[str, Any]], large: bool = False) -> TurnBody:
        """Converts this request to a chat request.

        Args:
            earlier: the items of the conversation before this request.
            large: whether `earlier` has so many bytes that preparing the request takes long.

        Raises:
            Refusal: an item or a part of an item is not supported.
        """
        for name, value in self.model_dump(exclude={"input"}).items():
            try:  # the response repeats the request's fields, so JSON has to be able to hold them
                json.dumps(value, allow_nan=False)
            except (ValueError, RecursionError) as error:
                raise wrong(name, "a number is out of range, or a value is nested too deeply") from error
        items = [*earlier, *self.items]
        messages = messages_of(items, len(earlier))
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise wrong("input", "there is nothing to answer: give a message")
        same = (
            *BaseBody.model_fields, "parallel_tool_calls", "thinking_budget", "chat_template_kwargs", "top_logprobs",
        )  # fmt: skip
        logprobs = self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
        return TurnBody(
            **{name: getattr(self, name) for name in same}, messages=messages,  # type: ignore[arg-type]
            max_completion_tokens=self.max_output_tokens, tools=[_tool(each) for each in self.tools or ()] or None,
            tool_choice=self._choice(), response_format=self.text.format if self.text is not None else None, logprobs=logprobs or None,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None, asked=self, items=items, large=large,
        )  # fmt: skip

    def _choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, FlatChoice):
            return choice
        if choice.type == "function":
            return {"type": "function", "function": ToolName(name=choice.name) if choice.name is not None else None}
        if choice.mode is None or not choice.tools:
            return {"type": "allowed_tools"}
        names = [ToolName(name=tool.name) for tool in choice.tools]
        allowed = AllowedTools(mode=choice.mode, tools=[NamedTool(type="function", function=name) for name in names])
        return {"type": "allowed_tools", "allowed_tools": allowed}


class TurnBody(ChatBody):
    """A request to ``/v1/responses`` as a chat request.

    Attributes:
        asked: the original body.
        items: the items of the conversation, including the request's input.
        large: whether earlier requests' items have so many bytes that preparing the request takes long.
    """

    response_format: FlatFormat | None = None  # type: ignore[assignment]
    asked: ResponseBody
    items: list[dict[str, Any]]
    large: bool

    @property
    def most_tokens(self) -> tuple[int | None, str]:
        return self.max_completion_tokens, "max_output_tokens"

    @property
    def heavy(self) -> bool:
        return self.large or super().heavy


def _tool(tool: FlatTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))


KINDS = ("message", "function_call", "function_call_output", "reasoning")
#: Maps the types of parts with text to the name of the field that holds the text.
_TEXTS = dict.fromkeys(("input_text", "output_text", "text", "summary_text", "reasoning_text"), "text") | {
    "refusal": "refusal"
}


def messages_of(items: list[dict[str, Any]], earlier: int = 0) -> list[dict[str, Any]]:
    """Converts items to messages. A thought is merged into the assistant's message or call after it, a call into the message before it.

    Args:
        earlier: number of items from earlier responses.

    Raises:
        Refusal: an item is not supported, or a field is missing.
    """
    messages, thought = list[dict[str, Any]](), ""
    for number, item in enumerate(items, -earlier):
        place = f"input.{number}"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            thought = str(_content(item.get("content") or item.get("summary") or "", f"{place}.content"))
            continue
        last = messages[-1] if messages else {}
        if kind == "message":
            role = _string(item, "role", place)
            content = _content(item.get("content"), f"{place}.content", role == "user")
            if role not in ("system", "developer", "user", "assistant"):
                given = shortened(repr(role))
                raise wrong(f"{place}.role", f"{given} is not a role. Choose from: assistant, developer, system, user")
            own = {"reasoning_content": thought} if thought and role == "assistant" else {}
            messages.append({"role": role, "content": content} | own)
        elif kind == "function_call":
            function = {"name": _string(item, "name", place), "arguments": _string(item, "arguments", place)}
            call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
            if last.get("role") != "assistant" or thought:
                last = {"role": "assistant", "content": ""} | ({"reasoning_content": thought} if thought else {})
                messages.append(last)
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": output})
        else:
            given = shortened(str(kind))
            raise wrong(f"{place}.type", f"items of type {given!r} are not supported. {suggest(given, KINDS)}")
        thought = ""
    return messages


def _string(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong(f"{place}.{name}", "a text is needed")
    return value


def _content(content: Any, place: str, images: bool = False) -> str | list[dict[str, Any]]:
    """Converts an item's content, a string or a list of parts, to a text or, if there are images, to parts as in chat requests.

    Args:
        images: whether images are allowed.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(place, "a text is needed, or a list of parts")
    parts = list[dict[str, Any]]()
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if images and kind == "input_image":
            url = part.get("image_url")
            if not isinstance(url, str) or not url.startswith("data:"):
                given = "a file" if url is None else shortened(repr(url))
                message = f"an image is a data URL (data:image/png;base64,…) in image_url, since nothing is fetched, not {given}"
                raise wrong(f"{place}.{number}", message, "invalid_image")
            parts.append({"type": "image_url", "image_url": {"url": url}})
            continue
        text = part.get(_TEXTS.get(kind)) if isinstance(kind, str) else None
        if not isinstance(text, str):
            read = "text and input_image" if images else "text"
            message = f"only parts of {read} are supported, not {shortened(repr(kind))}"
            raise wrong(f"{place}.{number}", message, "unsupported_content")
        parts.append({"type": "text", "text": text})
    return parts if any(part["type"] == "image_url" for part in parts) else "".join(part["text"] for part in parts)
