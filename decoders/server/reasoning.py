"""Separates a model's thoughts from its answer while the text grows, and bounds the length of thoughts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from ..constraints import ThinkingMarkers
from ..scheduling import unfinished
from .bodies import EFFORTS, ChatBody
from .prompts import Conversations
from .refusals import wrong
from .texts import Spelling


@dataclass(frozen=True)
class TurnPart:
    """A part of the text of an assistant's turn.

    Attributes:
        kind: a thought, an answer that may contain function calls, or text without calls.
        text: the part's text.
        begin: offset in the turn's text at which `text` begins.
        first: offset in the turn's text at which the part begins, including its begin marker.
    """

    kind: Literal["thought", "answer", "text"]
    text: str
    begin: int
    first: int


@dataclass(frozen=True)
class Reasoning:
    """How thoughts are separated from the answer to a request.

    Attributes:
        markers: the begin and end markers of thoughts.
        open: True if the prompt already begins a thought; None if the answer may begin with a thought.
        budget: greatest number of tokens in the thought; None: unlimited.
    """

    markers: ThinkingMarkers
    open: bool | None
    budget: int | None = None

    @staticmethod
    def of(
        body: ChatBody, conversations: Conversations, prompt: list[int], spelling: Spelling, most: int
    ) -> Reasoning | None:
        """How to separate the thoughts in the answer to a request; None if no markers are known, or if the prompt ended the thought.

        Args:
            most: greatest number of new tokens. If the template does not use the requested reasoning effort, the thought may take a
                share of these tokens, see :data:`~decoders.server.bodies.EFFORTS`.

        Raises:
            Refusal: the request has a budget, but no markers are known.
        """
        markers = conversations.thinking
        if markers is None:
            if body.thinking_budget is not None:
                message = "neither the tokens nor the chat template of this model have known markers of thoughts"
                raise wrong("thinking_budget", message, "unsupported_value")
            return None
        open = markers.begun(prompt, spelling.vocabulary) if spelling.vocabulary is not None else None
        if open is False:
            return None
        budget = body.thinking_budget
        if budget is None and body.reasoning_effort is not None and not conversations.reads_effort:
            share = EFFORTS[body.reasoning_effort]
            budget = None if share is None else int(share * most)
        return Reasoning(markers, open, budget)

    @property
    def argument(self) -> dict[str, Any]:
        """The value of ``thinking=`` in calls of ``generate``: the markers, and the budget of tokens."""
        return {"tokens": self.budget, "begin": self.markers.begin, "end": self.markers.end}

    def parts(self, text: str, ended: bool) -> list[TurnPart]:
        """The thoughts and answers in a growing text, in order.

        Text that may become a marker is left out until the text has `ended`.
        """
        begin, end = str(self.markers.begin), str(self.markers.end)
        if self.markers.closing is not None:
            given = len(begin) if self.open else 0
            parts = _messages(begin[:given] + text, ended)
            return [TurnPart(each.kind, each.text, each.begin - given, max(each.first - given, 0)) for each in parts]
        head = text.lstrip() if self.open is None else text
        if self.open is None:
            if not ended and any(each.startswith(head) and each != head for each in (begin, end)):
                return []
            if not head.startswith(begin):
                return [TurnPart("answer", text, 0, 0)]
            head = head[len(begin) :]
        place = head.find(end)
        until = place if place >= 0 else len(head) if ended else len(head) - unfinished(head, [end])
        thought = head[:until].lstrip("\n")
        parts = [TurnPart("thought", thought, len(text) - len(head) + until - len(thought), 0)]
        if place >= 0:
            answer = head[place + len(end) :].lstrip("\n")
            parts.append(TurnPart("answer", answer, len(text) - len(answer), len(text) - len(answer)))
        return parts


_FIRST, _HEAD_END, _ENDS = "<|start|>assistant", "<|message|>", ("<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))


def _messages(text: str, ended: bool) -> list[TurnPart]:
    """The messages of a text in the harmony format, as parts. A part that is a call also contains the message's header."""
    parts = list[TurnPart]()
    if not ended and text in ("", "<"):
        return []
    if not text.startswith("<|"):  # the text has no harmony messages
        return [TurnPart("answer", text, 0, 0)]
    first = 0
    while (place := text.find(_HEAD_END, first)) >= 0:
        head, begin = text[first:place], place + len(_HEAD_END)
        end, kind = _END.search(text, begin), _kind(head)
        if end is not None:
            until = end.start()
        else:
            until = len(text) if ended else len(text) - unfinished(text[begin:], _ENDS)
        if kind == "answer":
            marker = head.find(f"{_FIRST}<")
            begin = first + (marker + len(_FIRST) if marker >= 0 else 0)
        parts.append(TurnPart(kind, text[begin:until], begin, first))
        if end is None:
            break
        first = end.end()
    return parts if parts or not ended else [TurnPart("answer", text, 0, 0)]


def _kind(head: str) -> Literal["thought", "answer", "text"]:
    if "<|channel|>analysis" in head:
        return "thought"
    return "answer" if " to=" in head else "text"
