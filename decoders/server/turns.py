"""An assistant's turn while it is written: a thought, text, and calls of functions, told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..constraints import Call, Progress
from .answers import Growing, TextToken, joined
from .grammars import Calling
from .histories import JOINT
from .reasoning import Part, Reasoning
from .texts import Span


@dataclass(frozen=True)
class Piece:
    """More of a turn.

    Attributes:
        kind: of a thought, of text, or of the arguments of a call.
        text: what is new of it.
        number: of the call, or of the part that is a thought or text.
        first: whether the call or the part begins here.
    """

    kind: Literal["thought", "text", "arguments"]
    text: str
    number: int = 0
    first: bool = False


@dataclass
class TurnCall:
    """A call of a turn.

    Attributes:
        name: of the function.
        id: of the call.
        arguments: so far.
        complete: whether that is all of them.
    """

    name: str
    id: str
    arguments: str = ""
    complete: bool = False


class Turn:
    """A choice of a conversation.

    Args:
        reasoning: how it begins with a thought; None if it does not.
        calling: what may be called; None if nothing.

    Attributes:
        thoughts, texts: so far, by the numbers of their parts; none are empty.
        calls: so far.
        places: where the texts are in what is written, by the same numbers.
    """

    def __init__(self, growing: Growing, reasoning: Reasoning | None, calling: Calling | None) -> None:
        self.growing, self._reasoning, self._calling = growing, reasoning, calling
        self.thoughts, self.texts, self.calls = dict[int, str](), dict[int, str](), list[TurnCall]()
        self.places, self._written = dict[int, tuple[int, int]](), ""
        self._known = dict[int, dict[int, Progress]]()  # how far arguments are read in each part
        self._thinking = list[tuple[int, int]]()  # where thoughts and their markers are

    @property
    def thought(self) -> str:
        return JOINT.join(self.thoughts.values())

    @property
    def text(self) -> str:
        return JOINT.join(self.texts.values())

    @property
    def thought_tokens(self) -> int:
        """Tokens of thoughts and their markers."""
        places = self.growing.text.places
        return sum(any(first <= begin and end <= last for first, last in self._thinking) for begin, end in places)

    def read(self, ended: bool) -> tuple[list[Piece], Sequence[Span], Sequence[TextToken]]:
        """What is new since the last call, its spans, and its tokens if log probabilities are asked for."""
        spans, tokens = self.growing.read(ended)
        self._written += joined(spans)
        if self._reasoning is not None:
            parts = self._reasoning.parts(self._written, ended)
        else:
            parts = [Part("answer", self._written, 0, 0)]
        pieces, calls = list[Piece](), list[Call]()
        for number, part in enumerate(parts):
            text = part.text
            if calls:  # behind which the answer ends
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
        """The number of the text so far to which a token belongs; at the end empty ones behind it do."""
        for number, (begin, end) in self.places.items():
            if begin <= token.begin < end or (ended and not self.calls and token.begin == token.end == end):
                return number
        return None

    @property
    def finish_reason(self) -> str:
        """Why it ended; a function that was named ends it as text does, as OpenAI has it."""
        if not self.calls or self._calling is None or not self.calls[-1].complete:
            return self.growing.finish_reason
        return "stop" if self._calling.named else "tool_calls"
