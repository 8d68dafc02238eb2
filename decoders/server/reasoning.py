"""What models think before they answer: told apart from the answer while both grow, and bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..constraints import ThinkingMarkers, begun
from .bodies import EFFORTS, ChatBody
from .refusals import Refusal

if TYPE_CHECKING:
    from .prompts import Conversations
    from .texts import Spelling


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

    def split(self, text: str, ended: bool) -> tuple[str, str | None]:
        """The thought, and the answer behind it, of a growing text; None while there is no answer yet.

        What may become a marker is held back until `ended`.
        """
        begin, end = str(self.markers.begin), str(self.markers.end)
        closings = [end] if self.markers.closing is None else [self.markers.closing, end]
        head = text.lstrip() if self.open is None else text
        if self.open is None:
            if not ended and any(each.startswith(head) and each != head for each in (begin, end)):
                return "", None
            if not head.startswith(begin):
                # The head of an answer may stand by itself, as that of harmony does.
                return "", head.removeprefix(end) if head.startswith(end) else text
            head = head[len(begin) :]
        places = [(place, len(closing)) for closing in closings if (place := head.find(closing)) >= 0]
        if places:
            place, size = min(places)
            return head[:place].lstrip("\n"), head[place + size :].lstrip("\n")
        return head[: len(head) if ended else len(head) - _open(head, closings)].lstrip("\n"), None


def _open(text: str, markers: list[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `markers`."""
    longest = min(max(map(len, markers)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


def special_ids(spelling: Spelling, *texts: str) -> frozenset[int]:
    """The special tokens that are named in `texts`: they are looked for in what is written, where others are left out."""
    special = spelling.vocabulary.special if spelling.vocabulary is not None else {}
    return frozenset(token for name, token in special.items() if any(name in text for text in texts))
