"""Answers as server-sent events, and clients that go away: their requests end with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.responses import Response

from .answers import Answer, Growing
from .limits import Receive, Scope, Send
from .refusals import Refusal

#: Seconds without an event after which a comment is sent, so that no proxy takes the connection for dead.
KEEP_ALIVE = 15.0
_DONE = b"data: [DONE]\n\n"


async def gone(receive: Receive) -> None:
    """Returns once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def settled(answer: Answer, receive: Receive) -> None:
    """Waits until all of an answer is written. A client that goes away ends it.

    Raises:
        Refusal: the client is gone. What a request raises.
    """
    results: asyncio.Future[Any] = asyncio.gather(*(choice.generation for choice in answer.job.choices))
    # When the client is gone nobody asks for the error, and asyncio would log that.
    results.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    watch: asyncio.Future[Any] = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({results, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise Refusal(499, "the client closed the connection", code="client_gone")
        await results
    finally:
        watch.cancel()
        results.cancel()
        answer.job.cancel()


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def events(answer: Answer) -> AsyncGenerator[bytes]:
    """An answer in events, as it is written.

    Raises:
        what a request raises.
    """
    news, choices = asyncio.Event(), answer.job.choices
    growing: dict[int, Growing] = {choice.index: answer.growing(choice) for choice in choices}
    running, clock = list(choices), asyncio.get_running_loop().time
    sent = clock()
    try:
        with ExitStack() as stack:
            for choice in choices:
                stack.enter_context(choice.generation.telling(news.set))
            for choice in choices:
                for part in answer.opening(choice):
                    yield event(answer.chunk([part]))
            while True:
                news.clear()
                content = b""
                for choice in list(running):
                    ended = choice.generation.done()  # before the tokens are looked at: then these are all
                    if ended:
                        running.remove(choice)
                        if (error := choice.generation.exception()) is not None:
                            raise error
                    parts = answer.pieces(growing[choice.index], ended)
                    content += b"".join(event(answer.chunk([part])) for part in parts)
                if content:
                    sent = clock()
                    yield content
                if not running:
                    break
                try:
                    async with asyncio.timeout_at(sent + KEEP_ALIVE):
                        await news.wait()
                except TimeoutError:  # nothing has been sent for so long, whatever came in
                    sent = clock()
                    yield b": waiting\n\n"
        if answer.body.includes_usage:
            yield event(answer.last_chunk())
        yield _DONE
    finally:
        answer.job.cancel()


class EventStream(Response):
    """A stream of events that ends its requests when the client goes away.

    Args:
        answer: what is streamed.
        told: called at its end with the error that ended it or None; returns what the client is told.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, told: Callable[[BaseException | None], Refusal | None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.answer, self.told = answer, told
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        watch = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({writing, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self.told(Refusal(499, "the client closed the connection", code="client_gone"))
        finally:
            watch.cancel()
            writing.cancel()
            self.answer.job.cancel()
            await asyncio.gather(writing, watch, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        async def body(content: bytes, more: bool = True) -> None:
            try:
                await send({"type": "http.response.body", "body": content, "more_body": more})
            except OSError as error:  # the connection broke
                raise Refusal(499, "the client closed the connection", code="client_gone") from error

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(events(self.answer)) as stream:
                async for content in stream:
                    await body(content)
        except Exception as error:
            refusal = self.told(error)
            if refusal is not None and refusal.status == 499:
                return
            await body(event(refusal.body if refusal is not None else {}))
        else:
            self.told(None)
        await body(b"", more=False)
