"""How models write calls of functions: a description of each format, and the way back from text to calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn


@dataclass(frozen=True)
class CallFormat:
    """``begin``, then for every call ``opening NAME middle ARGUMENTS closing``, ``between`` two of them, and ``end``.

    Attributes:
        name: what ``--tool-format`` calls it.
        opening: in front of a function's name.
        middle: between the name and the arguments, which are a JSON object.
        closing: behind the arguments.
        begin: in front of all calls.
        end: behind all calls.
        between: two calls; None: an answer has one call.
        message: what begins a message, where thoughts, calls and answers have messages of their own.
        message_end: what ends one.
        answer: what begins the text of an answer behind `message`: what tells it from calls, and the rest.
        also: other pairs of `opening` and `middle` that are in use.
        source: what a chat template has that writes it but takes no calls as they are given to it.
        shown: what a chat template's rendering of a call has; None: `begin`, `opening`, the name and `middle`.
    """

    name: str
    opening: str = '{"name": "'
    middle: str = '", "arguments": '
    closing: str = "}"
    begin: str = ""
    end: str = ""
    between: str | None = "\n"
    message: str = ""
    message_end: str = ""
    answer: tuple[str, str] = ("", "")
    also: tuple[tuple[str, str], ...] = ()
    shown: str | None = None
    source: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """The part of `opening` in front of JSON that holds the name, without white space at its end."""
        return self.opening.partition('{"name"')[0].rstrip()

    @property
    def trigger(self) -> str:
        """What tells calls from text; empty where calls are bare JSON."""
        return self.begin or self.mark

    @property
    def texts(self) -> tuple[str, ...]:
        """All that may hold names of special tokens."""
        also = [text for pair in self.also for text in pair]
        return (self.opening, self.middle, self.closing, self.begin, self.end, self.between or "", self.message, *also)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls of functions, given as their names and arguments in JSON."""
        each = (f"{self.opening}{name}{self.middle}{arguments}{self.closing}" for name, arguments in calls)
        return self.begin + (self.between or "").join(each) + self.end

    def shows(self, rendered: str, name: str) -> bool:
        """Whether a template that has rendered a call of the function `name` writes it so."""
        shown = self.shown if self.shown is not None else f"{self.begin}{self.opening}{name}{self.middle}"
        return shown in rendered

    @cached_property
    def _head(self) -> re.Pattern[str]:
        """A call up to its arguments; what stands in front of JSON is not looked for."""
        pairs = ((self.opening, self.middle), *self.also)
        heads = (rf"{_loose(opening[len(self.mark) :] or opening)}(?P<n{i}>[\w.-]+){_loose(middle)}(?=\{{)"
                 for i, (opening, middle) in enumerate(pairs))  # fmt: skip
        return re.compile("|".join(heads))

    def read(self, text: str, names: Collection[str], ended: bool = True) -> Written:
        """Text and calls of a text that grows until it has `ended`.

        Args:
            names: of functions that there are. Other calls are text.
        """
        trigger, head = self.trigger, text.lstrip()
        place = self._begins(text)
        if place is None:
            if ended:
                return Written(text)
            if not trigger:
                return Written("" if head[:1] in ("", "{") else text)
            triggers = [trigger, *(opening.rstrip() for opening, _ in self.also)]
            return Written(text[: len(text) - unfinished(text, triggers)].rstrip())
        before, calls = text[:place].rstrip(), list[Call]()
        while (found := self._head.search(text, place)) is not None:
            name = next(name for name in found.groups() if name is not None)
            if name not in names:
                break
            end = _object_end(text, found.end())
            arguments = text[found.end() : end]
            if end is not None and not _is_json(arguments):
                break
            calls.append(Call(name, arguments, end is not None))
            if end is None or self.between is None:
                break
            place = end
        return Written(text if ended and not calls else before, tuple(calls))

    def _begins(self, text: str) -> int | None:
        """Where calls begin in `text`; None if there are none yet."""
        if not self.trigger:
            return 0 if re.match(rf"\s*{self._head.pattern}", text) else None
        triggers = [self.trigger, *(opening for opening, _ in self.also)]
        places = [place for trigger in triggers if (place := text.find(trigger)) >= 0]
        return min(places, default=None)


@dataclass(frozen=True)
class Call:
    """A call in a text.

    Attributes:
        name: of the function.
        arguments: as they are written, so far.
        complete: whether that is all of them.
    """

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True)
class Written:
    """What stands in a text.

    Attributes:
        text: what is no part of calls, whatever comes.
        calls: behind it.
    """

    text: str
    calls: tuple[Call, ...] = ()


def _loose(text: str) -> str:
    """An expression of `text` with any white space in the place of its own."""
    return r"\s*".join(map(re.escape, re.split(r"\s+|(?<=[{:,])(?=\")|(?<=\{)|(?<=:)", text)))


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `markers`."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)


def _object_end(text: str, begin: int) -> int | None:
    """The place behind the JSON object at `begin`; None if it is not complete."""
    depth = 0
    for part in _PARTS.finditer(text, begin):
        depth += (part[0] in "{[") - (part[0] in "}]")
        if not depth:
            return part.end()
    return None


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"JSON has no {constant}")

    try:  # numbers of any size are JSON
        json.loads(text, parse_constant=refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


#: In the order in which a template's rendering is compared with them.
FORMATS = (
    CallFormat("hermes", '<tool_call>\n{"name": "', closing="}\n</tool_call>"),
    CallFormat("mistral", begin="[TOOL_CALLS] [", between=", ", end="]"),
    CallFormat("mistral-tekken", begin="[TOOL_CALLS][", between=", ", end="]"),
    CallFormat("mistral-args", "[TOOL_CALLS]", "[ARGS]", "", between=""),
    CallFormat(
        "deepseek-v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        source=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    CallFormat(
        "deepseek-v3.1", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "",
        source=("<｜tool▁calls▁begin｜>",),
    ),
    CallFormat(
        "harmony", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", between=None,
        message="<|start|>assistant", message_end="<|end|>", answer=("<|channel|>final", "<|message|>"), shown="<|channel|>commentary",
        also=(
            ("<|channel|>commentary to=functions.", "<|message|>"),
            ("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>"),
        ),
    ),
    CallFormat("llama3", middle='", "parameters": ', between=None),
    CallFormat("json", between=None),
)  # fmt: skip
