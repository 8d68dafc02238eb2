"""Conversations as prompts, through the tokenizer's chat template.

What a template takes and how it writes calls of functions is found by rendering conversations through it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..constraints import ThinkingMarkers, known_markers
from ..errors import SettingsError
from .bodies import Message, Tool
from .refusals import Refusal, log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_template(path: Path) -> str:
    """The chat template in a file.

    Raises:
        SettingsError: it is no text, or no template.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        text = path.read_text(encoding="utf-8")
        render_jinja_template([[]], chat_template=text)
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"--chat-template {path} is no text in UTF-8: {error.reason} at byte {error.start}"
        ) from error
    except TemplateSyntaxError as error:
        raise SettingsError(f"--chat-template {path} is no template: line {error.lineno}: {error.message}") from error
    except Exception:  # it may well refuse a conversation without messages
        pass
    return text


class Conversations:
    """Renders messages.

    Args:
        template: in the place of the tokenizer's own.
        thinking: what thoughts begin and end with; by default what is known of the model.

    Attributes:
        style: how it writes calls.
        thinking: the markers of thoughts; None where none are known.
        messages: which messages it takes.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, thinking: tuple[str, str] | None = None
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.thinking = ThinkingMarkers(*thinking) if thinking is not None else known_markers(tokenizer, template)
        self.style, self.messages = CallStyle(), MessageStyle()
        if self.has_template:
            added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
            specials = [token for token in dict.fromkeys([*tokenizer.all_special_tokens, *added]) if token]
            self.messages = message_style(self._render)
            self.style = call_style(self._render, self.messages, specials)
            if "user" in self.messages.unread:
                log.warning(
                    "the chat template refuses a conversation of one user's message, or leaves its text out, as a string and in "
                    "parts: requests of /v1/chat/completions may be refused, or answered without it"
                )

    @property
    def reads_effort(self) -> bool:
        """Whether the template itself asks for an effort of reasoning."""
        return "reasoning_effort" in str(self.template or self.tokenizer.chat_template or "")

    @property
    def has_template(self) -> bool:
        return bool(self.template or self.tokenizer.chat_template)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]) -> str:
        """The text that asks for the next message.

        Args:
            variables: for the template, beside what it always gets.

        Raises:
            Refusal: there is no template, or it does not take this conversation.
        """
        if not self.has_template:
            message = "this model has no chat template: use /v1/completions, or start the server with --chat-template"
            raise Refusal(400, message, param="messages", code="no_chat_template")
        listed = [tool.model_dump(exclude_none=True) for tool in tools]
        plain = [self._plain(message, place) for place, message in enumerate(messages)]
        if listed and not self.style.reads_tools:
            plain = _introduced(plain, listed, self.style)
            listed = []
        if "system" in self.messages.unread:
            plain = _without_system(plain)
        plain = [message | {"content": self.messages.content(message["role"], message["content"])} for message in plain]
        forbidden = {"messages", "tools", "tokenize", "add_generation_prompt", "chat_template"} & variables.keys()
        if forbidden:
            message = f"chat_template_kwargs must not hold {', '.join(sorted(forbidden))}"
            raise Refusal(400, message, param="chat_template_kwargs", code="invalid_value")
        try:
            return self._render(plain, listed, True, variables)
        except Exception as error:  # a template raises what it likes
            message = f"the chat template does not take this conversation: {error}"
            raise Refusal(400, message, param="messages", code="chat_template_error") from error

    def ids(self, text: str) -> list[int]:
        """Tokens of a rendered text: the template writes the special ones itself."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ask: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:  # fmt: skip
        options: dict[str, Any] = {"tools": tools or None, "tokenize": False, "add_generation_prompt": ask, **variables}
        if self.template:
            options["chat_template"] = self.template
        text: Any = self.tokenizer.apply_chat_template(messages, **options)
        return str(text)

    def _plain(self, message: Message, place: int) -> dict[str, Any]:
        role = "system" if message.role == "developer" else message.role
        content = _text_of(message.content, place)
        plain: dict[str, Any] = {"role": role, "content": content}
        calls = [_call_of(call, place, number) for number, call in enumerate(message.tool_calls or [])]
        if calls and not self.style.reads_calls:
            written = "\n".join(json.dumps(call["function"], ensure_ascii=False) for call in calls)
            plain["content"] = f"{content}\n{written}".strip()
        if role == "tool" and (not self.style.reads_calls or "tool" in self.messages.unread):
            return {"role": "user", "content": f"Result of the function call: {content}"}
        if not self.style.reads_calls:
            return plain
        if calls:
            plain["tool_calls"] = calls
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            plain["name"] = message.name
        return plain


def _introduced(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], style: CallStyle
) -> list[dict[str, Any]]:  # fmt: skip
    """The conversation with a system message that says which functions there are."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    shape = f'{style.prefix}{{"name": "…", "{style.arguments}": {{…}}}}{style.suffix}'
    text = f"You may call functions. To call one, answer with nothing but {shape}. The functions:\n{listed}"
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with each system message put in front of the next user message."""
    conversation, waiting = list[dict[str, Any]](), list[str]()
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user":
            conversation.append(message | {"content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            conversation.append(message)
    return [*conversation, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else conversation


def _text_of(content: str | list[dict[str, Any]] | None, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.get("type") not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
            param = f"messages.{place}.content.{number}"
            message = f"{param}: only parts of type text are read, not {part.get('type')!r}"
            raise Refusal(400, message, param=param, code="unsupported_content")
        texts.append(part[part["type"]])
    return "".join(texts)


def _call_of(call: dict[str, Any], place: int, number: int) -> dict[str, Any]:
    """A call in an assistant's message, its arguments as an object."""
    function = call.get("function")
    try:
        assert isinstance(function, dict)
        arguments = function.get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        # Templates write them again: nothing that UTF-8 or JSON do not have.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        return {
            "id": call.get("id"),
            "type": "function",
            "function": {"name": str(function["name"]), "arguments": arguments},
        }
    except (AssertionError, KeyError, ValueError, RecursionError) as error:
        param = f"messages.{place}.tool_calls.{number}"
        message = f'{param}: {{"function": {{"name": …, "arguments": "{{JSON}}"}}}} is needed'
        raise Refusal(400, message, param=param, code="invalid_value") from error


#: Renders messages and, perhaps, tools; the last argument says whether the next message is asked for.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

_NAME, _KEY, _VALUE, _TEXT = "probe_function", "probe_key", "probe value", "probed text"
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class CallStyle:
    """How a model writes a call of a function: ``prefix{"name": …, "arguments": …}suffix``.

    Attributes:
        prefix: before the JSON, empty where the template says nothing of calls.
        suffix: after it, likewise.
        arguments: name of the key.
        reads_tools: whether the template shows the model which functions there are.
        reads_calls: whether it takes messages with calls.
        special: whether the prefix holds tokens that are no text: then it is put in front, and not written by the model.
        shown: what is text of such a prefix.
    """

    prefix: str = ""
    suffix: str = ""
    arguments: str = "arguments"
    reads_tools: bool = False
    reads_calls: bool = False
    special: bool = False
    shown: str = ""


@dataclass(frozen=True)
class MessageStyle:
    """Which messages a template shows the model, and in which form.

    Attributes:
        parts: roles whose content is a list of parts; that of others is a string.
        unread: roles whose messages it refuses, or leaves out silently.
    """

    parts: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()

    def content(self, role: str, text: str) -> str | list[dict[str, str]]:
        """`text` as the content of a message of `role`."""
        return [{"type": "text", "text": text}] if role in self.parts else text

    def message(self, role: str, text: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": self.content(role, text), **more}


def message_style(render: Render) -> MessageStyle:
    """Whether a text in a message of each role is shown, as a string and as a part."""
    style = MessageStyle()
    for role in ("user", "assistant", "system", "tool"):
        strings, parts = style, MessageStyle(style.parts | {role}, style.unread)
        style = next(
            (each for each in (strings, parts) if _TEXT in _rendered(render, _conversation(role, each))),
            MessageStyle(style.parts, style.unread | {role}),
        )
    return style


def prompt_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the tokenizer's own template that asks for the next message. Contents that are strings are given as it reads them."""

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ask: bool) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))

    style, given = message_style(render), [dict(message) for message in messages]
    for message in given:
        if isinstance(message.get("content"), str):
            message["content"] = style.content(message.get("role", ""), message["content"])
    return render(given, None, True)


def call_style(render: Render, messages: MessageStyle, specials: Sequence[str]) -> CallStyle:
    """How the template writes the call in a conversation.

    Args:
        specials: texts of tokens that are no text.
    """
    user = messages.message("user", "probe")
    reads_tools = _NAME in _rendered(render, [user], [_TOOL], True)
    prompt = _rendered(render, [user], None, True)
    answered = _rendered(render, [user, messages.message("assistant", "", tool_calls=[_CALL])])
    call = _find_call(answered, prompt) if prompt else None
    if call is None:
        return CallStyle(reads_tools=reads_tools)
    begin, end, key = call
    prefix, suffix = answered[len(prompt) : begin], answered[end:]
    cut = min((place for token in specials if (place := suffix.find(token)) >= 0), default=len(suffix))
    shown = prefix
    for token in specials:
        shown = shown.replace(token, "")
    special = shown != prefix
    return CallStyle(prefix, suffix[:cut].rstrip(), key, reads_tools, True, special, shown.strip() if special else "")


def _conversation(role: str, style: MessageStyle) -> list[dict[str, Any]]:
    user, text = style.message("user", "probe"), style.message(role, _TEXT)
    match role:
        case "user":
            return [text]
        case "assistant":
            return [user, text, user]
        case "system":
            return [text, user]
    call = style.message("assistant", "", tool_calls=[_CALL])
    return [user, call, text | {"tool_call_id": _CALL["id"], "name": _NAME}]


def _rendered(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, ask: bool = False
) -> str:  # fmt: skip
    """Nothing where the template does not take them."""
    try:
        return render(messages, tools, ask)
    except Exception:  # a template raises what it likes
        return ""


def _find_call(text: str, prompt: str) -> tuple[int, int, str] | None:
    """Begin and end of the probe's JSON behind `prompt`, and the key of its arguments."""
    place = text.find(_NAME)
    if place < 0 or not text.startswith(prompt):
        return None
    begin = place
    while (begin := text.rfind("{", len(prompt), begin)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("name") == _NAME:
            key = next((key for key, given in value.items() if given == {_KEY: _VALUE}), None)
            return (begin, end, key) if key is not None and len(value) == 2 else None
    return None
