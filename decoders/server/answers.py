"""Builds the answers of all routes: text, log probabilities and usage, as one JSON object or as server-sent events.

A client's request asks for one or more texts (choices). Each choice is a request to a scheduler. If the client disconnects, its choices
are cancelled.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from ..scheduling import TokenLogprobs
from .arguments import Stops
from .bodies import Body
from .refusals import Refusal, client_gone
from .service import Service
from .texts import Choice, ChoiceText, Job, Span, Spelling

T = TypeVar("T")


@dataclass(frozen=True)
class TextToken:
    """A token of a generated text.

    Attributes:
        data: the token's bytes or, if a stop string begins within the token, the token's bytes before the stop string.
        begin, end: the token's range of characters in the text. Two tokens may share a character.
        logprobs: log probabilities of the token and of the likeliest tokens.
    """

    data: bytes
    begin: int
    end: int
    logprobs: TokenLogprobs


class GrowingChoice:
    """A choice (one text of an answer) that is being decoded, with its text so far.

    Attributes:
        choice: the choice, which holds the tokens.
        text: converts the choice's tokens to text.
        seen: number of the choice's tokens that :meth:`read` has processed.
    """

    def __init__(
        self, choice: Choice, tokenizer: PreTrainedTokenizerBase, stops: Stops, spelling: Spelling | None,
        special: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.choice, self.text, self.seen = choice, ChoiceText(tokenizer, stops, choice.prompt, special), 0
        self._spelling = spelling
        # _tokens: tokens that `read` has not returned yet. _settled: number of the choice's tokens that `_new_tokens` has processed.
        self._tokens, self._settled = list[TextToken](), 0

    def read(self, ended: bool = False) -> tuple[list[Span], list[TextToken]]:
        """Returns the new text that may be sent to the client, as spans (pieces of text, one per token), and the tokens of this text.
        The list of tokens is empty if log probabilities were not requested. ended: whether the choice has ended, so that no text is
        held back.
        """
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
        stops, tokens = generation.call.request.stopping.tokens, []
        for each, (first, last) in zip(generation.logprobs[begin:], text.places[begin:], strict=False):
            if each.token not in stops:
                data = self._spelling.within(each.token, text.written[first:last])
                tokens.append(TextToken(data, first, last, each))
        return tokens

    def _count(self, ended: bool) -> int:
        """How many tokens to return now: those whose text has been shown and, once `ended` without a stop string, all others."""
        text, length = self.text, len(self.text.shown)
        if text.stopped:
            return sum(token.begin < length for token in self._tokens)
        whole = (place for place, token in enumerate(self._tokens, 1) if token.begin < token.end <= length)
        return len(self._tokens) if ended else max(whole, default=0)

    def _cut(self, tokens: list[TextToken]) -> list[TextToken]:
        """Returns `tokens`. If a stop string begins within the last token, the token's bytes are cut where the stop string begins."""
        length = len(self.text.shown)
        if not tokens or tokens[-1].end <= length:
            return tokens
        *others, last = tokens
        kept = self.text.written[last.begin : length].encode()
        # The token's bytes may begin in the middle of a character, whose first bytes are in earlier tokens.
        sizes = (size for size in range(len(last.data), 0, -1) if kept.endswith(last.data[:size]))
        return [*others, replace(last, data=last.data[: next(sizes, len(last.data))])]

    @property
    def finish_reason(self) -> str:
        """OpenAI's ``finish_reason``: "length" if the text reached its greatest number of tokens, else "stop"."""
        return "length" if self.choice.stopped_by_length and not self.text.stopped else "stop"


class Answer(ABC):
    """The answer to a client's request, built while its choices are decoded.

    Attributes:
        job: the client's request.
        special: ids of special tokens whose names are written into the text: markers of thoughts or function calls contain these names.
    """

    special: frozenset[int] = frozenset()

    def __init__(self, service: Service, body: Body, job: Job) -> None:
        self.service, self.body, self.job = service, body, job
        self.tokenizer = service.tokenizer
        self._spelling = service.spelling if body.listed is not None else None

    def growing(self, choice: Choice) -> GrowingChoice:
        """A new :class:`GrowingChoice` for `choice`."""
        return GrowingChoice(choice, self.tokenizer, self.job.stops, self._spelling, self.special)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer as a JSON object; called after every choice has ended."""

    @abstractmethod
    def first_events(self) -> bytes:
        """The encoded server-sent events to send before any text."""

    @abstractmethod
    def next_events(self, growing: GrowingChoice, ended: bool) -> bytes:
        """The encoded events for the new text of a choice; empty if there is no new text. ended: whether the choice has ended."""

    @abstractmethod
    def last_events(self) -> bytes:
        """The encoded events to send after every choice has ended."""

    def error_event(self, refusal: Refusal) -> bytes:
        """The encoded event that ends a stream after an error."""
        return event(refusal.body)

    def usage(self) -> dict[str, Any]:
        """The field ``usage``: OpenAI's numbers of prompt tokens and new tokens, and this package's figures under ``decoders``."""
        return self.job.usage()

    def warnings(self, choice: Choice) -> dict[str, Any]:
        """``{"warnings": […]}`` for a choice that has ended: the rules that its grammar could not enforce, and a message if its text
        breaks such a rule. An empty dict if there are no warnings.
        """
        said = [*choice.use.left_out] if choice.use else []
        said += [choice.invalid] if choice.invalid is not None else []
        return {"warnings": said} if said else {}

    def details(self, spans: Sequence[Span]) -> dict[str, Any]:
        """``{"decoders": …}`` with the text of each span, and whether its token was drafted. Empty unless the body sets ``drafted``."""
        if not self.body.drafted:
            return {}
        return {"decoders": {"tokens": [{"text": span.text, "drafted": span.drafted} for span in spans]}}


class ChoicesAnswer(Answer):
    """An answer whose JSON object has OpenAI's list ``choices``. A stream consists of chunks: objects of the same form with new text.

    Attributes:
        kind: value of the field ``object`` in a whole answer.
        chunk_kind: value of the field ``object`` in a chunk.
    """

    kind: str
    chunk_kind: str

    @abstractmethod
    def complete(self, choice: Choice) -> dict[str, Any]:
        """The JSON object of a choice that has ended."""

    @abstractmethod
    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """The chunks to send before a choice's text: a list of one chunk, or empty."""

    @abstractmethod
    def pieces(self, growing: GrowingChoice, ended: bool) -> list[dict[str, Any]]:
        """The chunks for new text of a choice. If the choice has `ended`, the last chunk contains the ``finish_reason``."""

    def whole(self) -> dict[str, Any]:
        choices = [self.complete(choice) for choice in self.job.choices]
        return self._frame(self.kind, choices) | {"usage": self.usage()} | self.job.metrics()

    def first_events(self) -> bytes:
        return self._events([part for choice in self.job.choices for part in self.opening(choice)])

    def next_events(self, growing: GrowingChoice, ended: bool) -> bytes:
        return self._events(self.pieces(growing, ended))

    def last_events(self) -> bytes:
        if not self.body.includes_usage:
            return _DONE
        return event(self._frame(self.chunk_kind, []) | {"usage": self.usage()} | self.job.metrics()) + _DONE

    def _events(self, parts: list[dict[str, Any]]) -> bytes:
        more = {"usage": None} if self.body.includes_usage else {}
        return b"".join(event(self._frame(self.chunk_kind, [part]) | more) for part in parts)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        return {"id": job.id, "object": kind, "created": job.created, "model": self.service.name, "choices": choices}


def joined(spans: Sequence[Span]) -> str:
    """The text of all `spans` together."""
    return "".join(span.text for span in spans)


#: Seconds without an event after which a stream sends a comment, so that proxies keep the connection open.
KEEP_ALIVE = 15.0
_DONE = b"data: [DONE]\n\n"


async def gone(receive: Receive) -> None:
    """Returns once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises the refusal :func:`client_gone`."""
    working, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise client_gone()
        return await working
    finally:
        watch.cancel()
        working.cancel()
        await asyncio.gather(working, watch, return_exceptions=True)


async def settled(answer: Answer) -> None:
    """Waits until all choices of an answer have ended, and validates their texts where necessary. Raises the errors of the choices."""
    try:
        await asyncio.gather(*(choice.generation for choice in answer.job.choices))
        for choice in answer.job.choices:
            if choice.needs_validation:
                await answer.service.validate(answer.job, choice)
    finally:
        answer.job.cancel()


def event(content: dict[str, Any], name: str | None = None) -> bytes:
    """The encoded server-sent event whose data is `content` as JSON. name: the event's type; None for an event without a type."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def events(answer: Answer) -> AsyncGenerator[bytes]:
    """Yields an answer's encoded events while its choices are decoded, and keep-alive comments. Raises the errors of the choices."""
    news, choices = asyncio.Event(), answer.job.choices
    growing: dict[int, GrowingChoice] = {choice.index: answer.growing(choice) for choice in choices}
    running, clock = list(choices), asyncio.get_running_loop().time
    sent = clock()
    try:
        with ExitStack() as stack:
            for choice in choices:
                stack.enter_context(choice.generation.telling(news.set))
            if first := answer.first_events():
                yield first
            while True:
                news.clear()
                content = b""
                for choice in list(running):
                    # `done` is called before the tokens are read: if it returns True, all tokens of the choice are there.
                    ended = choice.generation.done()
                    if ended:
                        running.remove(choice)
                        await choice.generation  # raises the request's error
                        if choice.needs_validation:
                            await answer.service.validate(answer.job, choice)
                    content += answer.next_events(growing[choice.index], ended)
                if content:
                    sent = clock()
                    yield content
                if not running:
                    break
                try:
                    async with asyncio.timeout_at(sent + KEEP_ALIVE):
                        await news.wait()
                except TimeoutError:  # no event was sent for KEEP_ALIVE seconds; text of new tokens may be held back
                    sent = clock()
                    yield b": waiting\n\n"
        # In a thread, because `last_events` serializes the whole conversation if the response is kept.
        yield await answer.service.run(answer.service.threads, answer.last_events)
    finally:
        answer.job.cancel()


class EventStream(StreamingResponse):
    """The HTTP response that streams an answer's events. If the client disconnects, the answer's choices are cancelled.

    Args:
        answer: the answer that is streamed.
        on_end: called once the answer has ended, with its error or None; returns the refusal to send to the client, or None.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, on_end: Callable[[BaseException | None], Refusal | None]) -> None:
        self.answer, self.on_end, self.content = answer, on_end, self._content()
        super().__init__(self.content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.content):
                await while_connected(receive, self.stream_response(send))
        except Refusal as error:  # the client is gone
            self.on_end(error)
        finally:
            self.answer.job.cancel()

    async def _content(self) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(events(self.answer)) as stream:
                async for content in stream:
                    yield content
        except Exception as error:
            refusal = self.on_end(error)
            yield self.answer.error_event(refusal) if refusal is not None else event({})
        else:
            self.on_end(None)
