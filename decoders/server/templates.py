"""What a chat template takes and writes, found by rendering conversations through it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """What becomes of a text in a message of each role, as a string and as a part."""
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
    """One with a text in a message of `role`."""
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
