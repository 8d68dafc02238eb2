"""Defines the fields of requests, OpenAI's and this server's own. A request with any other field is refused."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

#: Fields that OpenAI or other servers accept and this server refuses, each with what the client can do instead.
INSTEAD = {
    "best_of": "ask for n and choose yourself",
    "suffix": "text is written from left to right only",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "text only",
    "modalities": "text only",
    "prediction": "strategy='prompt_lookup' or 'suffix' drafts from the text",
    "reasoning_effort": "only /v1/chat/completions and /v1/responses separate thoughts from answers",
    "thinking_budget": "only /v1/chat/completions and /v1/responses separate thoughts from answers",
    "verbosity": "say in the messages how long answers are to be",
    "web_search_options": "there is no search",
    "guided_json": 'use response_format={"type": "json_schema", …}',
    "guided_regex": 'use response_format={"type": "regex", "regex": …}',
    "guided_grammar": 'use response_format={"type": "grammar", "grammar": …}',
    "guided_choice": 'use response_format={"type": "choice", "choices": […]}',
    "grammar": 'use response_format={"type": "grammar", "grammar": …}',
    "do_sample": "temperature 0 is greedy, more than 0 draws",
    "max_new_tokens": "it is called max_tokens here",
    "stop_strings": "it is called stop here",
}
#: Maps a reasoning effort to the share of the allowed new tokens that a thought (reasoning text) may take; None for no limit.
EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": None, "max": None}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
#: Maps a refused field to the value with which it is accepted, because the value has no effect. ``best_of`` may also equal ``n``.
NO_OPS = {"suffix": "", "modalities": ["text"], "verbosity": "medium"}
#: Maps a field to a description of what it may contain, for error messages.
SHAPES = {
    "prompt": "a text, token ids, or a list of either",
    "stop": "a text or a list of up to 16",
    "content": 'a text or a list of parts such as {"type": "text", "text": "…"}',
    "tool_choice": '"none", "auto", "required", or an object with the type "function" or "allowed_tools"',
    "schema": "a JSON schema",
}


#: Greatest number of fields of an object in a body. An object with more fields is refused before its fields are validated.
MOST_FIELDS = 200
#: Greatest number of messages or items of a conversation in a body. Validating a megabyte of messages would take long.
MOST_MESSAGES = 10_000
T = TypeVar("T")
#: A list that is validated up to its first wrong item only: reporting a megabyte of wrong items would take seconds.
Several = Annotated[list[T], Field(fail_fast=True)]


class Part(BaseModel):
    """Base class of the JSON objects in a body: unknown fields are errors, null counts as not given, and values are not converted.

    Attributes:
        instead: the fields that the object refuses, each with advice on what the client can do instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    instead: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_few_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MOST_FIELDS:
            raise PydanticCustomError(
                "too_many_fields", f"an object has {{count}} fields; the limit is {MOST_FIELDS}", {"count": len(given)}
            )
        known = cls.model_fields.keys() | cls.instead.keys()
        return {name: value for name, value in given.items() if value is not None or name not in known}


class StreamOptions(Part):
    """Options of a stream. include_usage: whether the stream ends with a chunk that contains ``usage`` (numbers of tokens)."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(Part):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Part):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Part):
    """A JSON schema with a name. Without ``schema``, any object is allowed. If a grammar cannot express some of the schema's rules, the
    schema is refused; with ``strict: false`` it is accepted, and the finished text is checked against these rules.
    """

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Part):
    """JSON that conforms to a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Part):
    """Text that matches a regular expression as a whole."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(Part):
    """Text that a grammar allows: either rules in Lark's notation (``grammar``), or a grammar of the package's library (``name``)."""

    type: Literal["grammar"]
    grammar: str | None = None
    name: str | None = None


class ChoiceFormat(Part):
    """One of several texts."""

    type: Literal["choice"]
    choices: list[str] = Field(min_length=1, max_length=10_000)


Format = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class BaseBody(Part):
    """The fields that all routes accept. Values of sampling fields that a body leaves out come from the model's generation config.

    Attributes:
        names: maps names of fields in error messages to the names in this route, such as ``prompt`` to ``messages`` in chats.
    """

    instead: ClassVar[dict[str, str]] = INSTEAD
    names: ClassVar[dict[str, str]] = {}

    model: str | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    # Fields that OpenAI does not have:
    strategy: str | None = Field(None, max_length=200)
    strategy_config: dict[str, Any] | None = None
    deadline: float | None = Field(None, gt=0)
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)
    drafted: bool = False
    # These fields have no effect, except ``store`` in /v1/responses. Answers of /v1/responses repeat most of them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_no_ops(cls, given: Any) -> Any:
        """Drops fields with a value that has no effect."""
        if not isinstance(given, dict):
            return given
        no_ops = NO_OPS | {"best_of": given.get("n") or 1}
        return {name: value for name, value in given.items() if name not in no_ops or value != no_ops[name]}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Body(BaseBody):
    """The fields that completions and chat have in common."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    response_format: Format | None = None

    @property
    def most_tokens(self) -> tuple[int | None, str]:
        """The requested greatest number of new tokens (None if the body sets none), and the name of its field, for errors."""
        return self.max_tokens, "max_tokens"

    @property
    @abstractmethod
    def listed(self) -> int | None:
        """How many of the likeliest tokens to return at each position, with log probabilities; None for no log probabilities."""

    @property
    def heavy(self) -> bool:
        """Whether preparing the request takes long even if its body is small."""
        return False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that contains ``usage``."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Body):
    """``POST /v1/completions``."""

    instead: ClassVar[dict[str, str]] = INSTEAD | {"messages": "send them to /v1/chat/completions"}

    prompt: str | Several[str] | Several[int] | Several[Several[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, even if the body gives only one."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given

    @property
    def listed(self) -> int | None:
        return self.logprobs


class Function(Part):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class ToolName(Part):
    """The name of a function."""

    name: str


class NamedTool(Part):
    """A tool, given by its function's name."""

    type: Literal["function"]
    function: ToolName


class AllowedTools(Part):
    """The tools that the model may call. With mode "required" it must call at least one of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class ToolChoice(Part):
    """The function that must be called, or the tools that may be called."""

    type: Literal["function", "allowed_tools"]
    function: ToolName | None = None
    allowed_tools: AllowedTools | None = None


class Message(BaseModel):
    """A message of a conversation. Unknown fields are ignored, such as ``annotations`` of assistants' messages."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    instead: ClassVar[dict[str, str]] = INSTEAD | {"prompt": "send it to /v1/completions, or as messages"}
    names: ClassVar[dict[str, str]] = {"prompt": "messages"}

    messages: Several[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = Field(None, ge=0)

    @property
    def most_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is None:
            return super().most_tokens
        return self.max_completion_tokens, "max_completion_tokens"

    @property
    def heavy(self) -> bool:  # a small image file may have millions of pixels to prepare
        lists = (message.content for message in self.messages if isinstance(message.content, list))
        return any(part.get("type") == "image_url" for parts in lists for part in parts)

    @property
    def listed(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
