"""Parses an assistant's turn while it is generated: thoughts, text, and function calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..constraints import Call
from .answers import GrowingChoice, TextToken, joined
from .grammars import Calling
from .histories import JOINT
from .reasoning import Reasoning, TurnPart
from .texts import Span


@dataclass(frozen=True)
class Piece:
    """New text of a turn.

    Attributes:
        kind: whether the new text belongs to a thought, to text, or to the arguments of a call.
        text: the new text.
        number: for arguments, index of the call among the turn's calls; otherwise index of the thought or text among the turn's parts.
        first: whether the call, thought or text begins with this piece.
    """

    kind: Literal["thought", "text", "arguments"]
    text: str
    number: int = 0
    first: bool = False


@dataclass
class TurnCall:
    """A call in a turn.

    Attributes:
        name: the function's name.
        id: the call's id.
        arguments: the arguments so far.
        complete: whether the arguments are complete.
    """

    name: str
    id: str
    arguments: str = ""
    complete: bool = False


class Turn:
    """The assistant's turn in one choice of an answer.

    Args:
        reasoning: how thoughts (reasoning text) are separated from the answer; None if they are not separated.
        calling: the functions that may be called; None if there are none.

    Attributes:
        thoughts, texts: the thoughts and texts so far, by index among the turn's parts. Empty thoughts and texts are left out.
        calls: the calls so far.
        places: begin and end of each text within the turn's whole text, by index of the part.
    """

    def __init__(self, growing: GrowingChoice, reasoning: Reasoning | None, calling: Calling | None) -> None:
        self.growing, self._reasoning, self._calling = growing, reasoning, calling
        self.thoughts, self.texts, self.calls = dict[int, str](), dict[int, str](), list[TurnCall]()
        self.places, self._written = dict[int, tuple[int, int]](), ""
        self._known = dict[int, dict[int, Any]]()  # by index of the part: how far the arguments of its calls are parsed
        self._thinking = list[tuple[int, int]]()  # (begin, end) of each thought with its markers, in `_written`

    @property
    def thought(self) -> str:
        return JOINT.join(self.thoughts.values())

    @property
    def text(self) -> str:
        return JOINT.join(self.texts.values())

    @property
    def thought_tokens(self) -> int:
        """The number of tokens in thoughts and their markers."""
        places = self.growing.text.places
        return sum(any(first <= begin and end <= last for first, last in self._thinking) for begin, end in places)

    def read(self, ended: bool) -> tuple[list[Piece], Sequence[Span], Sequence[TextToken]]:
        """Returns what is new since the last call: pieces, spans (text per token), and tokens if log probabilities were requested.

        ended: whether the choice has ended.
        """
        spans, tokens = self.growing.read(ended)
        self._written += joined(spans)
        if self._reasoning is not None:
            parts = self._reasoning.parts(self._written, ended)
        else:
            parts = [TurnPart("answer", self._written, 0, 0)]
        pieces, calls = list[Piece](), list[Call]()
        for number, part in enumerate(parts):
            text = part.text
            if calls:  # an answer ends with its calls, so later parts are ignored
                break
            if part.kind == "thought":
                pieces += self._grown("thought", self.thoughts, number, text)
                continue
            if part.kind == "answer" and self._calling is not None:
                over = ended or number < len(parts) - 1
                written = self._calling.read(text, over, self._known.setdefault(number, {}))
                text, calls = written.text, [*written.calls]
            pieces += self._grown("text", self.texts, number, text)
            self.places[number] = part.begin, part.begin + len(text)
        ends = [*(part.first for part in parts[1:]), len(self._written)]
        self._thinking = [(part.first, end) for part, end in zip(parts, ends, strict=False) if part.kind == "thought"]
        for number, call in enumerate(calls):
            first = number >= len(self.calls)
            if first:
                assert self._calling is not None
                self.calls.append(TurnCall(call.name, call.id or self._calling.style.new_id()))
            own = self.calls[number]
            new, own.complete = call.arguments[len(own.arguments) :], call.complete
            own.arguments = call.arguments
            if new or first:
                pieces.append(Piece("arguments", new, number, first))
        return pieces, spans, tokens

    @staticmethod
    def _grown(kind: Literal["thought", "text"], known: dict[int, str], number: int, text: str) -> list[Piece]:
        before = known.get(number, "")
        if len(text) <= len(before):
            return []
        known[number] = text
        return [Piece(kind, text[len(before) :], number, not before)]

    def part_of(self, token: TextToken, ended: bool) -> int | None:
        """The index of the part whose text contains `token`, or None. Tokens without text at the end belong to the last text."""
        for number, (begin, end) in self.places.items():
            if begin <= token.begin < end or (ended and not self.calls and token.begin == token.end == end):
                return number
        return None

    @property
    def finish_reason(self) -> str:
        """OpenAI's ``finish_reason``: "tool_calls" after a complete call, but "stop" if the request named the function to call."""
        if not self.calls or self._calling is None or not self.calls[-1].complete:
            return self.growing.finish_reason
        return "stop" if self._calling.named else "tool_calls"
