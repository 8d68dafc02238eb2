"""Calls of earlier turns as a chat template takes them: their arguments, their ids, and what stands beside them."""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby, takewhile
from typing import Any

from .refusals import Refusal
from .templates import CallStyle

#: Between thoughts, and between texts, where they are told as one.
JOINT = "\n\n"


def call_of(call: dict[str, Any], place: int, number: int) -> tuple[str, dict[str, Any], str | None, Any]:
    """Name, arguments, their text in JSON if that was given, and id of a call in an assistant's message.

    What a model wrote can come back: arguments that the end of an answer has cut lose the member that is not complete, and numbers
    too large for JSON's readers, or halves of characters, become the nearest that there is.

    Raises:
        Refusal: something is missing, or the arguments are no object.
    """
    function: Any = call.get("function")
    try:
        name, arguments, text = str(function["name"]), function.get("arguments") or "{}", None
        if isinstance(arguments, str):
            arguments, text = _read(arguments)
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are no object")
        return name, _encodable(arguments), text, call.get("id")
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        param = f"messages.{place}.tool_calls.{number}"
        message = f'{param}: {{"function": {{"name": …, "arguments": "{{…}}"}}}} is needed, the arguments an object'
        raise Refusal(400, message, param=param, code="invalid_value") from error


def _read(text: str) -> tuple[Any, str]:
    """The value of a text in JSON, which may be cut, and that text. Raises ValueError."""
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


#: Strings, the last of which may be cut, and what begins, divides and ends objects and lists.
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.DOTALL)


def _closed(text: str) -> str:
    """The beginning of an object or list in JSON, ended where its last complete member ends."""
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
    """`arguments` with nothing that UTF-8 or JSON do not have, since templates write them again. Raises ValueError: NaN."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        whole: dict[str, Any] = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return whole
    return arguments


class Links:
    """Ids of calls as the template takes them, and what their answers belong to. For one conversation, in its order.

    Args:
        style: what the template takes.
    """

    def __init__(self, style: CallStyle) -> None:
        self.style = style
        self._own = dict[str, str]()  # ids for the template, by those that were given
        self._names = dict[str, str]()  # of the functions called, by the ids for the template
        self._waiting = dict[str, None]()  # calls without an answer

    def called(self, name: str, id: Any) -> str:
        """The id of a call. One that has none gets one."""
        number = len(self._names)
        given = f"call_{number}" if id is None else str(id)
        own = self._own[given] = self.style.id_of(given, name, number)
        self._names[own] = name
        self._waiting[own] = None
        return own

    def answered(self, id: str | None) -> dict[str, str]:
        """Id and function of a message with an answer; one without an id answers the oldest call that waits."""
        own = next(iter(self._waiting), None) if id is None else self._own.get(id) or self.style.id_of(id)
        if own is None:
            return {}
        self._waiting.pop(own, None)
        return {"tool_call_id": own} | ({"name": self._names[own]} if own in self._names else {})


def one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with each call in a message of its own, and behind it what answers it."""
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
    """The conversation with what functions answered as messages of the user, one for all answers in a row."""
    told = list[dict[str, Any]]()
    for role, group in groupby(messages, lambda message: message["role"]):
        if role == "tool":
            texts = [f"Result of the function call: {message['content']}" for message in group]
            told.append({"role": "user", "content": JOINT.join(texts)})
        else:
            told += group
    return told
