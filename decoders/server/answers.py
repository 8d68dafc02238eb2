"""What both routes answer with: the frame of an answer, its texts, log probabilities and usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..engine.request_output import TokenLogprobs
from .bodies import Body
from .jobs import Choice, Job
from .service import Service
from .texts import ChoiceText, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Growing:
    """A choice whose text is being sent.

    Attributes:
        choice: the choice.
        text: its text so far.
        seen: tokens that were looked at.
    """

    def __init__(self, choice: Choice, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.choice, self.text, self.seen = choice, ChoiceText(tokenizer, stops), 0
        self._logprobs: list[TokenLogprobs] = []

    def read(self, ended: bool = False) -> tuple[list[Span], list[TokenLogprobs]]:
        """What came since it was last asked: text that may be shown, and its tokens' log probabilities."""
        generation = self.choice.generation
        tokens, begin = generation.tokens, self.seen
        self.seen = len(tokens)
        spans = self.text.add(tokens[begin:], generation.drafted[begin : self.seen], ended)
        stops = generation.call.request.stop_tokens
        self._logprobs += [each for each in generation.logprobs[begin : self.seen] if each.token not in stops]
        if not spans and not ended:
            return [], []
        logprobs, self._logprobs = self._logprobs, []
        return spans, logprobs

    @property
    def finish_reason(self) -> str:
        """Why the text ended, in OpenAI's words."""
        return "length" if self.choice.stopped_by_length and not self.text.stopped else "stop"


class Answer(ABC):
    """The answer to a request that is being decoded.

    Attributes:
        job: what is decoded.
    """

    kind: str
    chunk_kind: str

    def __init__(self, service: Service, body: Body, job: Job) -> None:
        self.service, self.body, self.job = service, body, job
        self.tokenizer = service.tokenizer

    def growing(self, choice: Choice) -> Growing:
        """`choice` from its beginning."""
        return Growing(choice, self.tokenizer, self.job.stops)

    def whole(self) -> dict[str, Any]:
        """All of it; everything has come to its end."""
        return self._frame(self.kind, [self.complete(choice) for choice in self.job.choices]) | {
            "usage": self.job.usage()
        }

    @abstractmethod
    def complete(self, choice: Choice) -> dict[str, Any]:
        """A choice that has ended, as a part of the answer."""

    @abstractmethod
    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """What a stream says of a choice before there is text."""

    @abstractmethod
    def pieces(self, growing: Growing, ended: bool) -> list[dict[str, Any]]:
        """What a stream says of a choice when there may be more text; the last one has its ``finish_reason``."""

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._frame(self.chunk_kind, choices) | ({"usage": None} if self.body.includes_usage else {})

    def last_chunk(self) -> dict[str, Any]:
        """The chunk with the usage."""
        return self._frame(self.chunk_kind, []) | {"usage": self.job.usage()}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        return {"id": job.id, "object": kind, "created": job.created, "model": self.service.name, "choices": choices}

    def details(self, spans: Sequence[Span]) -> dict[str, Any]:
        """Which tokens were drafted, if that was asked for."""
        if not self.body.drafted:
            return {}
        return {"decoders": {"tokens": [{"text": span.text, "drafted": span.drafted} for span in spans]}}

    def token_text(self, token: int) -> str:
        """A token by itself. Of one that is a part of a character, a replacement character."""
        text: str = self.tokenizer.decode([token])  # type: ignore[assignment]
        return text


def joined(spans: Sequence[Span]) -> str:
    """The text of spans."""
    return "".join(span.text for span in spans)
