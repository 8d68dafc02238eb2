"""Converts function calls of earlier turns to a chat template's form: their arguments, ids, and the text and thoughts around them."""

from __future__ import annotations

import json
from itertools import groupby, takewhile
from typing import Any

from pydantic_core import from_json

from ..prompts.templates import CallStyle
from .refusals import wrong

#: Separator of several thoughts that are joined to one thought, or several texts that are joined to one text.
JOINT = "\n\n"


def call_of(call: dict[str, Any], place: int, number: int) -> tuple[str, dict[str, Any], str | None, Any]:
    """Parses a call in an assistant's message. Returns the function's name, the arguments, the arguments' JSON text (None if they were
    truncated or given as an object), and the call's id. place, number: the message's and the call's index, for errors.

    Calls that a model did not finish are accepted: truncated arguments lose their incomplete last member. Lone surrogates, which
    templates could not write again, are replaced.

    Raises:
        Refusal: a field is missing, or the arguments are no object.
    """
    function: Any = call.get("function")
    try:
        name, arguments, text = str(function["name"]), function.get("arguments") or "{}", None
        if isinstance(arguments, str):
            try:
                arguments, text = json.loads(arguments), arguments
            except json.JSONDecodeError:
                arguments = from_json(arguments, allow_partial=True)
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are no object")
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode("utf-16", "surrogatepass")
        return name, json.loads(written.decode("utf-16", "replace")), text, call.get("id")
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        param = f"messages.{place}.tool_calls.{number}"
        raise wrong(
            param, '{"function": {"name": …, "arguments": "{…}"}} is needed, the arguments an object'
        ) from error


class Links:
    """Converts the ids of calls to the template's form, and finds the call that each tool message answers.

    Each object serves one conversation, whose messages must be passed in order.

    Args:
        style: converts ids to the template's form.
    """

    def __init__(self, style: CallStyle) -> None:
        self.style = style
        self._own = dict[str, str]()  # the template's ids by the given ids
        self._names = dict[str, str]()  # names of the called functions, by the template's ids
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
    """Returns the conversation with at most one call per message, followed by the answer to the call."""
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
    """Returns the conversation with tool messages as user messages. Consecutive tool messages become one user message."""
    told = list[dict[str, Any]]()
    for role, group in groupby(messages, lambda message: message["role"]):
        if role == "tool":
            texts = [f"Result of the function call: {message['content']}" for message in group]
            told.append({"role": "user", "content": JOINT.join(texts)})
        else:
            told += group
    return told
