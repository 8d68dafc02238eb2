"""What models think before they answer: told apart from the answer while both grow, and bounded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..constraints import ThinkingMarkers, begun, unfinished
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
        if self.markers.closing is not None:
            return _messages(begin + text if self.open else text, ended)
        head = text.lstrip() if self.open is None else text
        if self.open is None:
            if not ended and any(each.startswith(head) and each != head for each in (begin, end)):
                return "", None
            if not head.startswith(begin):
                return "", text
            head = head[len(begin) :]
        if (place := head.find(end)) >= 0:
            return head[:place].lstrip("\n"), head[place + len(end) :].lstrip("\n")
        return head[: len(head) if ended else len(head) - unfinished(head, [end])].lstrip("\n"), None


#: A message of harmony: its head, and its text up to what ends it.
_MESSAGE = re.compile(
    r"((?:(?!<\|message\|>).)*)<\|message\|>((?:(?!<\|(?:end|call|return)\|>).)*)(<\|\w+\|>)?", re.DOTALL
)


_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def _messages(text: str, ended: bool) -> tuple[str, str | None]:
    """The thoughts in messages of harmony, and what the others say, calls with their heads; None while there are no others."""
    thoughts, answers = list[str](), list[tuple[str, bool]]()  # with whether it is a call
    if not ended and text in ("", "<"):
        return "", None
    if not text.startswith("<|"):  # it writes no messages
        return "", text
    for message in _MESSAGE.finditer(text):
        head, content, end = message.groups()
        if not (ended or end):
            content = content[: len(content) - unfinished(content, _ENDS)]
        if "<|channel|>analysis" in head:
            thoughts.append(content)
        else:
            if " to=" in head:
                content = f"{head.replace('<|start|>assistant<', '<')}<|message|>{content}"
            answers.append((content, " to=" in head))
    if ended and not thoughts and not answers:
        return "", text
    answer, spoken = "", False
    for content, call in answers:
        answer += f"\n\n{content}" if spoken and content and not call else content
        spoken = not call and (spoken or content != "")
    return "\n\n".join(thoughts), answer if answers else None


def special_ids(spelling: Spelling, *texts: str) -> frozenset[int]:
    """The special tokens that are named in `texts`: they are looked for in what is written, where others are left out."""
    special = spelling.vocabulary.special if spelling.vocabulary is not None else {}
    return frozenset(token for name, token in special.items() if any(name in text for text in texts))
