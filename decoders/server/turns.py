"""An assistant's turn while it is written: a thought, text, and calls of functions, told apart."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .answers import Growing, TextToken, joined
from .grammars import Calling
from .reasoning import Reasoning
from .texts import Span


@dataclass(frozen=True)
class Piece:
    """More of a turn.

    Attributes:
        kind: of a thought, of text, or of the arguments of a call.
        text: what is new of it.
        number: of the call.
        first: whether the call begins here.
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
        arguments: so far.
        complete: whether that is all of them.
        id: of the call.
    """

    name: str
    arguments: str = ""
    complete: bool = False
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class Turn:
    """A choice of a conversation.

    Args:
        reasoning: how it begins with a thought; None if it does not.
        calling: what may be called; None if nothing.

    Attributes:
        thought, text, calls: so far.
        border: characters of what is written ahead of the text.
        thought_tokens: tokens of the thought and its markers.
    """

    def __init__(self, growing: Growing, reasoning: Reasoning | None, calling: Calling | None) -> None:
        self.growing, self._reasoning, self._calling = growing, reasoning, calling
        self.thought, self.text, self.calls = "", "", list[TurnCall]()
        self.border, self.thought_tokens, self._written = 0, 0, ""

    def read(self, ended: bool) -> tuple[list[Piece], Sequence[Span], Sequence[TextToken]]:
        """What is new since the last call, its spans, and its tokens if log probabilities are asked for."""
        spans, tokens = self.growing.read(ended)
        self._written += joined(spans)
        thought, answer = self._reasoning.split(self._written, ended) if self._reasoning else ("", self._written)
        text, calls, pieces = answer or "", list[TurnCall](), list[Piece]()
        self.border = len(self._written) - len(text)
        if thought:
            self.thought_tokens = sum(end <= self.border for _, end in self.growing.text.places)
        if self._calling is not None:
            written = self._calling.read(text, ended)
            text = written.text
            calls = [TurnCall(each.name, each.arguments, each.complete) for each in written.calls]
        if new := thought[len(self.thought) :]:
            pieces.append(Piece("thought", new))
        if new := text[len(self.text) :]:
            pieces.append(Piece("text", new))
        for number, call in enumerate(calls):
            first = number >= len(self.calls)
            if first:
                self.calls.append(TurnCall(call.name))
            own = self.calls[number]
            new, own.complete = call.arguments[len(own.arguments) :], call.complete
            own.arguments = call.arguments
            if new or first:
                pieces.append(Piece("arguments", new, number, first))
        self.thought, self.text = thought, text
        return pieces, spans, tokens

    def in_text(self, token: TextToken, ended: bool) -> bool:
        """Whether a token belongs to the text so far, at the end with empty ones behind it. Of messages of harmony all do."""
        if self._reasoning is not None and self._reasoning.markers.closing is not None:
            return True
        begin, end = self.border, self.border + len(self.text)
        return begin <= token.begin < end or (ended and not self.calls and token.begin == token.end == end)

    @property
    def finish_reason(self) -> str:
        """Why it ended; a function that was named ends it as text does, as OpenAI has it."""
        if not self.calls or self._calling is None or not self.calls[-1].complete:
            return self.growing.finish_reason
        return "stop" if self._calling.named else "tool_calls"
