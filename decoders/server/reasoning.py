"""What models think before they answer: told apart from the answer while both grow, and bounded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..constraints import ThinkingMarkers, begun, unfinished
from .bodies import EFFORTS, ChatBody
from .refusals import Refusal

if TYPE_CHECKING:
    from .prompts import Conversations
    from .texts import Spelling


@dataclass(frozen=True)
class Part:
    """A part of an assistant's turn.

    Attributes:
        kind: a thought, an answer that may have calls in it, or text without any.
        text: of it.
        begin: where it begins in what is written.
        first: where its marker does.
    """

    kind: Literal["thought", "answer", "text"]
    text: str
    begin: int
    first: int


@dataclass(frozen=True)
class Reasoning:
    """How the answer to a request begins with a thought.

    Attributes:
        markers: of thoughts.
        open: whether the prompt has begun one; None: the answer may.
        budget: tokens that it may have; None for any number.
    """

    markers: ThinkingMarkers
    open: bool | None
    budget: int | None = None

    @staticmethod
    def of(
        body: ChatBody, conversations: Conversations, prompt: list[int], spelling: Spelling, most: int
    ) -> Reasoning | None:
        """None where no markers are known, or the prompt has ended the thought.

        Args:
            most: new tokens, of which an effort is a share.

        Raises:
            Refusal: a budget is asked for, and no markers are known.
        """
        markers = conversations.thinking
        if markers is None:
            if body.thinking_budget is not None:
                message = "thinking_budget: neither the tokens nor the chat template of this model have known markers of thoughts"
                raise Refusal(400, message, param="thinking_budget", code="unsupported_value")
            return None
        open = begun(prompt, markers, spelling.vocabulary) if spelling.vocabulary is not None else None
        if open is False:
            return None
        budget = body.thinking_budget
        if budget is None and body.reasoning_effort is not None and not conversations.reads_effort:
            share = EFFORTS[body.reasoning_effort]
            budget = None if share is None else int(share * most)
        return Reasoning(markers, open, budget)

    @property
    def argument(self) -> dict[str, Any]:
        """``thinking=`` of the request."""
        return {"tokens": self.budget, "begin": self.markers.begin, "end": self.markers.end}

    def parts(self, text: str, ended: bool) -> list[Part]:
        """The thoughts and the answers in a growing text, in their order.

        What may become a marker is held back until `ended`.
        """
        begin, end = str(self.markers.begin), str(self.markers.end)
        if self.markers.closing is not None:
            given = len(begin) if self.open else 0
            parts = _messages(begin[:given] + text, ended)
            return [Part(each.kind, each.text, each.begin - given, max(each.first - given, 0)) for each in parts]
        head = text.lstrip() if self.open is None else text
        if self.open is None:
            if not ended and any(each.startswith(head) and each != head for each in (begin, end)):
                return []
            if not head.startswith(begin):
                return [Part("answer", text, 0, 0)]
            head = head[len(begin) :]
        place = head.find(end)
        until = place if place >= 0 else len(head) if ended else len(head) - unfinished(head, [end])
        thought = head[:until].lstrip("\n")
        parts = [Part("thought", thought, len(text) - len(head) + until - len(thought), 0)]
        if place >= 0:
            answer = head[place + len(end) :].lstrip("\n")
            parts.append(Part("answer", answer, len(text) - len(answer), len(text) - len(answer)))
        return parts


_FIRST, _HEAD_END, _ENDS = "<|start|>assistant", "<|message|>", ("<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))


def _messages(text: str, ended: bool) -> list[Part]:
    """The messages of harmony, each a head and a content; calls with their heads."""
    parts = list[Part]()
    if not ended and text in ("", "<"):
        return []
    if not text.startswith("<|"):  # it writes no messages
        return [Part("answer", text, 0, 0)]
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
        parts.append(Part(kind, text[begin:until], begin, first))
        if end is None:
            break
        first = end.end()
    return parts if parts or not ended else [Part("answer", text, 0, 0)]


def _kind(head: str) -> Literal["thought", "answer", "text"]:
    if "<|channel|>analysis" in head:
        return "thought"
    return "answer" if " to=" in head else "text"
