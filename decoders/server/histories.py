"""Converts function calls of earlier turns, and the messages that answer the calls, to the form that a chat template reads."""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby, takewhile
from typing import Any

from ..prompts.templates import CallStyle
from .refusals import wrong

#: Separates thoughts that are joined to one thought, and texts that are joined to one text.
JOINT = "\n\n"


def call_of(call: dict[str, Any], place: int, number: int) -> tuple[str, dict[str, Any], str | None, Any]:
    """Parses a call in an assistant's message. Returns the function's name, the arguments, the arguments' JSON text (None if they were
    given as an object), and the call's id. place, number: indices of message and call, for errors.

    Imperfect calls that a model wrote are accepted: truncated arguments lose their incomplete last member, numbers too large for
    JSON parsers are clamped, and lone surrogates are replaced.

    Raises:
        Refusal: a field is missing, or the arguments are not an object.
    """
    function: Any = call.get("function")
    try:
        name, arguments, text = str(function["name"]), function.get("arguments") or "{}", None
        if isinstance(arguments, str):
            arguments, text = _read(arguments)
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are not an object")
        return name, _encodable(arguments), text, call.get("id")
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        param = f"messages.{place}.tool_calls.{number}"
        raise wrong(
            param, 'must be {"function": {"name": …, "arguments": "{…}"}}, with an object as arguments'
        ) from error


def _read(text: str) -> tuple[Any, str]:
    """The value of a JSON text, and the text itself. A truncated text is first closed after its last complete member. Raises
    ValueError.
    """
    text.encode()
    try:
        return json.loads(text, parse_float=_number, parse_int=_number), text
    except json.JSONDecodeError:
        text = _closed(text)
        return json.loads(text, parse_float=_number, parse_int=_number), text


def _number(text: str) -> int | float:
    if len(text) < 300 and text.lstrip("-").isdigit():
        return int(text)
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


#: A JSON string, possibly truncated by the end of the text, or a punctuation mark of an object or list.
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.DOTALL)


def _closed(text: str) -> str:
    """A truncated JSON object or list, closed after its last complete member."""
    open, end = list[str](), 0
    for found in _MARKS.finditer(text):
        mark = found[0]
        if mark.startswith('"'):
            continue
        if mark in "{[":
            open.append("}" if mark == "{" else "]")
        elif mark in "}]" and open:
            open.pop()
        end = found.start() if mark == "," else found.end()
    return text[:end] + "".join(reversed(open))


def _encodable(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns `arguments` without lone surrogates, which templates could not serialize again. Raises ValueError for NaN."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        whole: dict[str, Any] = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return whole
    return arguments


class Links:
    """Converts the ids of calls to the template's form, and finds the call that each tool message answers.

    Each object serves one conversation, whose messages must be passed in order.

    Args:
        style: converts ids to the template's form.
    """

    def __init__(self, style: CallStyle) -> None:
        self.style = style
        self._own = dict[str, str]()  # maps given ids of calls to ids in the template's form
        self._names = dict[str, str]()  # maps ids in the template's form to names of functions
        self._waiting = dict[str, None]()  # calls without an answer

    def called(self, name: str, id: Any) -> str:
        """Adds a call of function `name` and returns its id in the template's form: `id` converted, or a new id if `id` is None."""
        number = len(self._names)
        given = f"call_{number}" if id is None else str(id)
        own = self._own[given] = self.style.id_of(given, name, number)
        self._names[own] = name
        self._waiting[own] = None
        return own

    def answered(self, id: str | None) -> dict[str, str]:
        """The fields of a tool message that identify the answered call: the call's id and, if known, the function's name.

        A message without an `id` answers the oldest unanswered call. Returns an empty dict if all calls are answered.
        """
        own = next(iter(self._waiting), None) if id is None else self._own.get(id) or self.style.id_of(id)
        if own is None:
            return {}
        self._waiting.pop(own, None)
        return {"tool_call_id": own} | ({"name": self._names[own]} if own in self._names else {})


def one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with a message for every call, each followed by the answer to the call."""
    split, place = list[dict[str, Any]](), 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            split.append(message)
            continue
        answers = [*takewhile(lambda each: each["role"] == "tool", messages[place:])]
        place += len(answers)
        for number, call in enumerate(calls):
            head = {"role": "assistant", "content": ""} if number else message
            own = [answer for answer in answers if answer.get("tool_call_id") == call["id"]]
            answers = [answer for answer in answers if answer not in own]
            split += [head | {"tool_calls": [call]}, *own]
        split += answers
    return split


def answers_as_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with tool messages turned into user messages. Consecutive tool messages become one user message."""
    told = list[dict[str, Any]]()
    for role, group in groupby(messages, lambda message: message["role"]):
        if role == "tool":
            texts = [f"Result of the function call: {message['content']}" for message in group]
            told.append({"role": "user", "content": JOINT.join(texts)})
        else:
            told += group
    return told
