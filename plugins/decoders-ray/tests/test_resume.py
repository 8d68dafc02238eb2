"""Streams that continue after a replica was lost, without lost or repeated tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from decoders_ray import Delivered, ResumeError, resumed

TEXT = list(range(20))


class Lost(Exception):
    """A replica is gone."""


def replica(text: list[int], chunk: int, dies_after: int | None) -> Callable[[], AsyncIterator[list[int]]]:
    async def stream() -> AsyncIterator[list[int]]:
        for at in range(0, len(text), chunk):
            if dies_after is not None and at + chunk > dies_after:
                raise Lost
            yield text[at : at + chunk]
        if dies_after is not None:
            raise Lost

    return stream


def run(*replicas: Callable[[], AsyncIterator[list[int]]], attempts: int = 3) -> tuple[list[int], Delivered]:
    line, delivered = iter(replicas), Delivered()

    async def collect() -> list[int]:
        stream = resumed(lambda: next(line)(), lost=(Lost,), attempts=attempts, delivered=delivered)
        return [token async for tokens in stream for token in tokens]

    return asyncio.run(collect()), delivered


@pytest.mark.parametrize("chunks", [(1, 7), (3, 5), (7, 1), (4, 4)])
@pytest.mark.parametrize("dies_after", [0, 1, 9, 19, 20])
def test_another_replica_goes_on_where_the_first_one_died(chunks: tuple[int, int], dies_after: int) -> None:
    tokens, delivered = run(replica(TEXT, chunks[0], dies_after), replica(TEXT, chunks[1], None))
    assert tokens == TEXT
    assert (delivered.attempts == 2 and delivered.repeated == dies_after // chunks[0] * chunks[0]) or chunks[0] == 7


def test_two_replicas_may_die() -> None:
    tokens, delivered = run(replica(TEXT, 3, 10), replica(TEXT, 2, 5), replica(TEXT, 20, None))
    assert tokens == TEXT and delivered.attempts == 3


def test_the_last_attempt_says_what_happened() -> None:
    with pytest.raises(Lost):
        run(replica(TEXT, 3, 10), replica(TEXT, 3, 10), attempts=2)


def test_another_text_is_not_passed_off_as_the_rest() -> None:
    with pytest.raises(ResumeError, match="another one writes other tokens from token 3"):
        run(replica(TEXT, 3, 6), replica([0, 1, 2, 99, *TEXT[4:]], 3, None))
    with pytest.raises(ResumeError, match="ended after 3 of 6"):
        run(replica(TEXT, 3, 6), replica(TEXT[:3], 3, None))


def test_errors_of_the_request_are_raised_at_once() -> None:
    async def refuses() -> AsyncIterator[list[int]]:
        raise ValueError("no such strategy")
        yield []

    with pytest.raises(ValueError, match="no such strategy"):
        run(refuses, replica(TEXT, 1, None))
