"""Chat templates: how one is read, what messages it takes and how it writes calls of functions, found by rendering conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..constraints import FORMATS, CallFormat
from ..errors import SettingsError, UnknownNameError

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


#: Renders messages and, perhaps, tools; the last argument says whether the next message is asked for.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

_NAME, _KEY, _VALUE, _TEXT = "probe_function", "probe_key", "probe value", "probed text"
_ID = "call00000"
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}


def format_named(name: str) -> CallFormat:
    """The format of calls of that name.

    Raises:
        UnknownNameError: there is none.
    """
    known = {each.name: each for each in FORMATS}
    if name not in known:
        raise UnknownNameError("format of calls", name, [*known])
    return known[name]


@dataclass(frozen=True)
class CallStyle:
    """How a model writes calls of functions, and what its template takes of them.

    Attributes:
        format: of calls; bare JSON where the template says nothing of calls.
        reads_tools: whether the template shows the model which functions there are.
        reads_calls: whether it takes messages with calls.
        as_text: whether it takes the arguments of a call as text in JSON; else as an object.
        special: whether special tokens are in the marks of calls.
    """

    format: CallFormat = CallFormat("template", between=None)
    reads_tools: bool = False
    reads_calls: bool = False
    as_text: bool = False
    special: bool = False

    def call(self, name: str, arguments: Any, id: Any) -> dict[str, Any]:
        """A call of a function as the template takes it."""
        text = json.dumps(arguments, ensure_ascii=False) if self.as_text else arguments
        return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


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
        forms = (style, MessageStyle(style.parts | {role}, style.unread))
        style = next(
            (form for form in forms if any(_TEXT in _rendered(render, each) for each in _conversations(role, form))),
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


#: Ways in which a template may take messages with calls.
_STYLES = tuple(CallStyle(reads_calls=True, as_text=as_text) for as_text in (False, True))


def _probe(style: CallStyle) -> dict[str, Any]:
    return style.call(_NAME, {_KEY: _VALUE}, _ID)


def call_style(render: Render, messages: MessageStyle, specials: Sequence[str], source: str = "") -> CallStyle:
    """How the template writes the call in a conversation.

    Args:
        specials: texts of tokens that are no text.
        source: of the template.
    """
    user = messages.message("user", "probe")
    reads_tools = _NAME in _rendered(render, [user], [_TOOL], True)
    prompt = _rendered(render, [user], None, True)
    for style in _STYLES:
        answered = _rendered(render, [user, messages.message("assistant", "", tool_calls=[_probe(style)])])
        known = next((each for each in FORMATS if each.trigger and each.shows(answered, _NAME)), None)
        if known is not None:
            return replace(style, format=known, reads_tools=reads_tools)
        place = _find_call(answered, prompt) if prompt else None
        if place is not None:
            break
    else:
        said = next((each for each in FORMATS if each.source and all(text in source for text in each.source)), None)
        return CallStyle(said or CallStyle.format, reads_tools)
    begin, end, key = place
    prefix, suffix = answered[len(prompt) : begin], answered[end:]
    cut = min((found for token in specials if (found := suffix.find(token)) >= 0), default=len(suffix))
    own = CallFormat(
        "template",
        f'{prefix}{{"name": "',
        f'", "{key}": ',
        f"}}{suffix[:cut].rstrip()}",
        between="\n" if prefix else None,
    )
    return replace(style, format=own, reads_tools=reads_tools)


def _conversations(role: str, style: MessageStyle) -> Iterator[list[dict[str, Any]]]:
    """Conversations that have the probed text in a message of `role`."""
    user, text = style.message("user", "probe"), style.message(role, _TEXT)
    match role:
        case "user":
            yield [text]
        case "assistant":
            yield [user, text, user]
        case "system":
            yield [text, user]
        case _:
            for calls in _STYLES:
                call = style.message("assistant", "", tool_calls=[_probe(calls)])
                yield [user, call, text | {"tool_call_id": _ID, "name": _NAME}]


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
