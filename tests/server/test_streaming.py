"""Events of an answer, without a server: what is sent when there is nothing to tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.server import answers


class Slow:
    """A generation that tells news when the test says so."""

    def __init__(self) -> None:
        self.tell: Callable[[], object] = lambda: None
        self.ended = False

    @contextmanager
    def telling(self, function: Callable[[], object]) -> Iterator[None]:
        self.tell = function
        yield

    def done(self) -> bool:
        return self.ended

    def __await__(self) -> Iterator[None]:
        return iter(())


def test_a_stream_with_nothing_to_send_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE", 0.05)
    generation = Slow()

    async def run(_: Any, function: Callable[[], bytes]) -> bytes:
        return function()

    choice = SimpleNamespace(index=0, generation=generation, needs_validation=False)
    answer: Any = SimpleNamespace(
        job=SimpleNamespace(choices=[choice], cancel=lambda: None),
        service=SimpleNamespace(threads=None, run=run),
        growing=lambda choice: None,
        first_events=lambda: b"",
        next_events=lambda growing, ended: b"data: all of it\n\n" if ended else b"",
        last_events=lambda: b"data: [DONE]\n\n",
    )

    async def read() -> list[bytes]:
        events = answers.events(answer)
        seen = [await anext(events)]

        async def chatter() -> None:  # news that bring no text are no reason to be silent
            for _ in range(20):
                await asyncio.sleep(0.01)
                generation.tell()

        talking = asyncio.ensure_future(chatter())
        seen.append(await anext(events))
        assert not talking.done()
        await talking
        generation.ended = True
        generation.tell()
        return seen + [event async for event in events if event != b": waiting\n\n"]

    seen = asyncio.run(asyncio.wait_for(read(), 20))
    assert seen == [b": waiting\n\n", b": waiting\n\n", b"data: all of it\n\n", b"data: [DONE]\n\n"]
