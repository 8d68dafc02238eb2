"""What the answers of both routes share: the frame, texts, log probabilities and usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..constraints import LEFT_OUT
from ..engine.decode.request_output import TokenLogprobs
from .bodies import Body
from .service import Service
from .texts import Choice, ChoiceText, Job, Span, Spelling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextToken:
    """A token of a text.

    Attributes:
        data: its bytes, as far as the text has them: a stop string may cut the last token.
        begin, end: its characters in the text; tokens may share a character.
        logprobs: its log probability, and those of the likeliest tokens.
    """

    data: bytes
    begin: int
    end: int
    logprobs: TokenLogprobs


class Growing:
    """A choice whose text is being sent.

    Attributes:
        choice: the choice.
        text: its text so far.
        seen: tokens that were looked at.
    """

    def __init__(
        self, choice: Choice, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], spelling: Spelling | None
    ) -> None:  # fmt: skip
        self.choice, self.text, self.seen = choice, ChoiceText(tokenizer, stops, choice.prompt), 0
        self._spelling, self._tokens, self._settled = (
            spelling,
            list[TextToken](),
            0,
        )  # not shown yet, and how many were made

    def read(self, ended: bool = False) -> tuple[list[Span], list[TextToken]]:
        """New since the last call: text that may be shown, and its tokens if log probabilities are asked for."""
        generation = self.choice.generation
        tokens, begin = generation.tokens, self.seen
        self.seen = len(tokens)
        spans = self.text.add(tokens[begin:], generation.drafted[begin : self.seen], ended)
        if self._spelling is None:
            return spans, []
        self._tokens += self._new_tokens()
        count = self._count(ended)
        shown, self._tokens = self._tokens[:count], self._tokens[count:]
        return spans, self._cut(shown) if self.text.stopped else shown

    def _new_tokens(self) -> list[TextToken]:
        assert self._spelling is not None
        generation, text, begin = self.choice.generation, self.text, self._settled
        self._settled = len(text.places)
        stops, tokens = generation.call.request.stop_tokens, []
        for each, (first, last) in zip(generation.logprobs[begin:], text.places[begin:], strict=False):
            if each.token not in stops:
                data = self._spelling.within(each.token, text.written[first:last])
                tokens.append(TextToken(data, first, last, each))
        return tokens

    def _count(self, ended: bool) -> int:
        """How many of the tokens that are still held back lie in the text shown so far."""
        text, length = self.text, len(self.text.shown)
        if text.stopped:
            return sum(token.begin < length for token in self._tokens)
        whole = (place for place, token in enumerate(self._tokens, 1) if token.begin < token.end <= length)
        return len(self._tokens) if ended else max(whole, default=0)

    def _cut(self, tokens: list[TextToken]) -> list[TextToken]:
        """`tokens` without the bytes behind the end of the text."""
        length = len(self.text.shown)
        if not tokens or tokens[-1].end <= length:
            return tokens
        *others, last = tokens
        kept = self.text.written[last.begin : length].encode()
        # It may have the end of a character that others began.
        sizes = (size for size in range(len(last.data), 0, -1) if kept.endswith(last.data[:size]))
        return [*others, replace(last, data=last.data[: next(sizes, len(last.data))])]

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
        self._spelling = service.spelling if body.listed is not None else None

    def growing(self, choice: Choice) -> Growing:
        """`choice` from its beginning."""
        return Growing(choice, self.tokenizer, self.job.stops, self._spelling)

    def whole(self) -> dict[str, Any]:
        """The whole answer, once every choice has ended."""
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

    def warnings(self, choice: Choice) -> dict[str, Any]:
        """Under ``warnings``: what the grammar of an ended text could not honour, and what the text breaks; empty if nothing."""
        report = choice.generation.report
        said: list[str] = []
        for use in report.grammars if report is not None else ():
            if use is not None:
                said += [warning for warning in use.warnings if warning.endswith(LEFT_OUT)]
                said += [use.invalid] if use.invalid is not None else []
        return {"warnings": said} if said else {}

    def details(self, spans: Sequence[Span]) -> dict[str, Any]:
        """Which tokens were drafted, if that was asked for."""
        if not self.body.drafted:
            return {}
        return {"decoders": {"tokens": [{"text": span.text, "drafted": span.drafted} for span in spans]}}


def joined(spans: Sequence[Span]) -> str:
    """The text of spans."""
    return "".join(span.text for span in spans)
