"""Chat templates: renders short conversations (probes) with a template, to learn which messages it accepts and how it writes calls."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..constraints import FORMATS, CallFormat
from ..errors import SettingsError, UnknownNameError

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


def read_template(path: Path) -> str:
    """The chat template in a file.

    Raises:
        SettingsError: the file is not text, or not a template.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        text = path.read_text(encoding="utf-8")
        render_jinja_template([[]], chat_template=text)
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"--chat-template {path} is not text in UTF-8: {error.reason} at byte {error.start}"
        ) from error
    except TemplateSyntaxError as error:
        raise SettingsError(f"--chat-template {path} is invalid: line {error.lineno}: {error.message}") from error
    except Exception:  # a template may refuse a conversation without messages
        pass
    return text


#: A function that renders messages and tools (or None). Its last argument says whether to add the generation prompt.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

_NAME, _KEY, _VALUE, _TEXT = "probe_function", "probe_key", "probe value", "probed text"
_ID, _OTHER_ID, _LONG_ID = "call00000", "call00001", f"call_{'0f' * 12}"
#: Letters and length of call ids, for templates that accept only short ids (:attr:`CallStyle.short_ids`).
_LETTERS, _SHORT = string.ascii_letters + string.digits, 9
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}


def format_named(name: str) -> CallFormat:
    """The format of function calls named `name`.

    Raises:
        UnknownNameError: no format has this name.
    """
    known = {each.name: each for each in FORMATS}
    if name not in known:
        raise UnknownNameError("format of calls", name, [*known])
    return known[name]


@dataclass(frozen=True)
class CallStyle:
    """How a model writes function calls, and in which form its template accepts calls.

    Attributes:
        format: the format of calls; JSON without markers if the template does not show any format.
        reads_tools: whether the template lists the functions for the model.
        reads_calls: whether the template accepts messages with calls.
        as_text: whether the template expects a call's arguments as a JSON string instead of an object.
        values_as_text: whether each argument's value is passed as a JSON text (strings unchanged), because the template would write
            other values as Python does: ``True``.
        short_ids: whether the template accepts only ids of nine letters and digits.
        one_call: whether the template accepts only one call per message.
        one_text: whether the template refuses a message with calls that has both a thought and a text.
        special: whether the markers around calls contain special tokens.
    """

    format: CallFormat = CallFormat("template", between=None)
    reads_tools: bool = False
    reads_calls: bool = False
    as_text: bool = False
    values_as_text: bool = False
    short_ids: bool = False
    one_call: bool = False
    one_text: bool = False
    special: bool = False

    def call(self, name: str, arguments: dict[str, Any], id: str, text: str | None = None) -> dict[str, Any]:
        """A function call in the form that the template expects.

        Args:
            text: the arguments as the model wrote them, used if the template expects a string.
        """
        given: Any = arguments
        if self.as_text:
            given = text if text is not None else json.dumps(arguments, ensure_ascii=False)
        elif self.values_as_text:
            given = {
                key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                for key, value in arguments.items()
            }
        return {"id": id, "type": "function", "function": {"name": name, "arguments": given}}

    def new_id(self) -> str:
        """An id for a call that the model has written."""
        if self.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(_SHORT))
        return f"call_{secrets.token_hex(12)}"

    def id_of(self, id: str, name: str | None = None, number: int = 0) -> str:
        """The call id `id`, changed if the template does not accept its form. Equal arguments give equal ids.

        Args:
            name: the function's name, if known.
            number: the call's index in its conversation.
        """
        if name is not None and self.format.ids is not None and not self.short_ids:
            return self.format.ids.of(name, id, number)
        if not self.short_ids or (len(id) == _SHORT and set(id) <= {*_LETTERS}):
            return id
        number = int.from_bytes(hashlib.sha256(id.encode(errors="surrogatepass")).digest())
        return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(_SHORT))


@dataclass(frozen=True)
class MessageStyle:
    """Which messages a template shows the model, and in which form.

    Attributes:
        parts: roles whose content is passed as a list of parts. The content of other roles is a string.
        unread: roles whose messages the template refuses or silently leaves out.
        needs_text: whether the template refuses an assistant's message without text, such as a thought alone.
    """

    parts: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    needs_text: bool = False

    def content(self, role: str, text: str) -> str | list[dict[str, str]]:
        """`text` as the content of a message of `role`."""
        return [{"type": "text", "text": text}] if role in self.parts else text

    def message(self, role: str, text: str, **more: Any) -> dict[str, Any]:
        """A message of `role`. more: further entries of the message."""
        return {"role": role, "content": self.content(role, text), **more}


def message_style(render: Render) -> MessageStyle:
    """The style of a template's messages. For each role, probes show if the template renders a string, a list of parts, or neither."""
    style = MessageStyle()
    for role in ("user", "assistant", "system", "tool"):
        forms = (style, MessageStyle(style.parts | {role}, style.unread))
        style = next(
            (form for form in forms if any(_TEXT in _rendered(render, each) for each in _conversations(role, form))),
            MessageStyle(style.parts, style.unread | {role}),
        )
    user, answers = style.message("user", "probe"), [style.message("assistant", text) for text in (_TEXT, "")]
    taken, taken_empty = (bool(_rendered(render, [user, answer, user], None, True)) for answer in answers)
    return replace(style, needs_text=taken and not taken_empty)


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any
) -> BatchEncoding:
    """Renders `messages` with the tokenizer's own template and generation prompt, and encodes the text. A string content
    becomes a list of parts if the template needs a list. options: further arguments of the tokenizer call.
    """

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ask: bool) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))

    style, given = message_style(render), [dict(message) for message in messages]
    for message in given:
        if isinstance(message.get("content"), str):
            message["content"] = style.content(message.get("role", ""), message["content"])
    # The template writes the special tokens itself.
    return tokenizer(render(given, None, True), add_special_tokens=False, **options)


#: Templates are probed with these styles of calls.
_STYLES = (
    CallStyle(reads_calls=True),
    CallStyle(reads_calls=True, as_text=True),
    CallStyle(reads_calls=True, values_as_text=True),
)
_ARGUMENTS = {_KEY: _VALUE}
#: Arguments that Python and JSON write differently (``True``, ``true``), and a pattern for the words of Python.
_FLAG = {"probe_flag": True}
_TELLING, _PYTHON = _ARGUMENTS | _FLAG | {"probe_list": [False, None]}, re.compile("True|False|None")


@dataclass(frozen=True)
class _CallProbe:
    """Probes a template with conversations in which a call answers a user's message.

    Attributes:
        render: renders conversations by the template.
        messages: which messages the template accepts.
        style: the form of calls that is tried.
        tools: the functions that conversations list; None: none.
    """

    render: Render
    messages: MessageStyle
    style: CallStyle
    tools: list[dict[str, Any]] | None = None

    def call(self, arguments: dict[str, Any] = _ARGUMENTS, id: str = _ID) -> dict[str, Any]:
        return self.style.call(_NAME, arguments, id)

    def rendered(self, arguments: dict[str, Any] = _ARGUMENTS) -> str:
        messages = self.messages
        answer = messages.message("assistant", "", tool_calls=[self.call(arguments)])
        return _rendered(self.render, [messages.message("user", "probe"), answer], self.tools)

    @property
    def rank(self) -> int:
        """How well `style` suits the template: 0 to 2 if the template then writes arguments as JSON (0 is best), 3 or 4 if not."""
        telling = self.rendered(_TELLING)
        if self.style.as_text:
            return 1 if json.dumps(_TELLING) in telling else 4
        if self.style.values_as_text:  # compares only the word True, because the quotes of strings may differ
            given = replace(self, style=_STYLES[0]).rendered(_FLAG)
            return 2 if self.rendered(_FLAG) == given.replace("True", "true") else 4
        return 0 if len(_PYTHON.findall(telling)) == len(_PYTHON.findall(self.rendered())) else 3

    def takes(self, *ids: str, text: str = "", **more: Any) -> bool:
        """Whether the template renders a message with `text`, `more` and calls with these `ids`, followed by the functions' results."""
        answer = self.messages.message("assistant", text, tool_calls=[self.call(id=id) for id in ids], **more)
        results = [self.messages.message("tool", _TEXT, tool_call_id=id, name=_NAME) for id in ids]
        told = results if "tool" not in self.messages.unread else []
        return bool(_rendered(self.render, [self.messages.message("user", "probe"), answer, *told], self.tools, True))

    @property
    def limited(self) -> CallStyle:
        """`style` with the template's restrictions, found by probing: on ids, number of calls, and text beside thoughts."""
        if not self.takes(_ID):
            return self.style
        return replace(
            self.style,
            short_ids=not self.takes(_LONG_ID),
            one_call=not self.takes(_ID, _OTHER_ID),
            one_text=not self.takes(_ID, text=_TEXT, reasoning_content=_TEXT, thinking=_TEXT),
        )


def call_style(render: Render, messages: MessageStyle, specials: Sequence[str], source: str = "") -> CallStyle:
    """Finds out how a template writes function calls.

    Args:
        specials: texts of the special tokens.
        source: the template's source text.
    """
    user = messages.message("user", "probe")
    reads_tools = _NAME in _rendered(render, [user], [_TOOL], True)
    # Some tokenizers have a second template, for conversations with functions, and only this template writes calls.
    probes = [_CallProbe(render, messages, style, tools) for tools in (None, [_TOOL]) for style in _STYLES]
    for probe in sorted(probes, key=lambda probe: (probe.tools is not None, probe.rank)):
        prompt = _rendered(render, [user], probe.tools, True)
        # The prompt is removed, because its list of functions may show how calls are written.
        answered = probe.rendered().removeprefix(_rendered(render, [user], probe.tools) if probe.tools else "")
        known = next((each for each in FORMATS if each.trigger and each.shows(answered, _NAME)), None)
        if known is not None and (known.notation is None or not probe.style.as_text):
            return replace(probe.limited, format=known, reads_tools=reads_tools)
        place = _find_call(answered := probe.rendered(), prompt) if prompt else None
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
    return replace(probe.limited, format=own, reads_tools=reads_tools)


@dataclass(frozen=True)
class ChatStyle:
    """Which messages a chat template accepts, and how its model writes function calls.

    Attributes:
        messages: the roles that the template renders, and the form of their messages.
        calls: how function calls are written.
    """

    messages: MessageStyle = MessageStyle()
    calls: CallStyle = CallStyle()

    @staticmethod
    def of(
        render: Render | None, special: Sequence[str], source: str = "", tool_format: str | None = None
    ) -> ChatStyle:
        """The style of a template, found by rendering probes.

        Args:
            render: renders messages by the template, see :data:`Render`. None: there is no template.
            special: texts of the special tokens.
            source: the template's source text.
            tool_format: name of a format of function calls; None: the format that the template shows.

        Raises:
            UnknownNameError: there is no format of this name.
        """
        messages, calls, special = MessageStyle(), CallStyle(), [name for name in special if name]
        if render is not None:
            messages = message_style(render)
            calls = call_style(render, messages, special, source)
        if tool_format is not None:
            calls = replace(calls, format=format_named(tool_format))
        marks = "".join(calls.format.texts)
        return ChatStyle(messages, replace(calls, special=any(token in marks for token in special)))


def _conversations(role: str, style: MessageStyle) -> Iterator[list[dict[str, Any]]]:
    """Yields conversations with the probe text in a message of `role`."""
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
                call = style.message("assistant", "", tool_calls=[calls.call(_NAME, _ARGUMENTS, _ID)])
                yield [user, call, text | {"tool_call_id": _ID, "name": _NAME}]


def _rendered(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, ask: bool = False
) -> str:  # fmt: skip
    """The rendered conversation; "" if the template refuses it."""
    try:
        return render(messages, tools, ask)
    except Exception:  # templates raise exceptions of any class
        return ""


def _find_call(text: str, prompt: str) -> tuple[int, int, str] | None:
    """Begin and end of the probe call's JSON after `prompt`, and the key of the call's arguments; None if `text` has no such call."""
    begin = text.find(_NAME, len(prompt)) if text.startswith(prompt) else -1
    while begin >= 0 and (begin := text.rfind("{", len(prompt), begin)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("name") == _NAME:
            key = next((key for key, given in value.items() if given == {_KEY: _VALUE}), None)
            return (begin, end, key) if key is not None and len(value) == 2 else None
    return None
