"""A stream of tokens that continues when a replica dies, without lost or repeated tokens.

A request's seed determines its text, so another replica writes the same text from the beginning. The new replica's first tokens are
compared with the tokens that were already delivered, and are not delivered again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field


class ResumeError(RuntimeError):
    """The stream cannot continue, because another replica's text differs from the delivered tokens.

    Attributes:
        delivered: the delivered tokens.
    """

    def __init__(self, message: str, delivered: list[int]) -> None:
        super().__init__(message)
        self.delivered = delivered


@dataclass
class Delivered:
    """The progress of a request.

    Attributes:
        tokens: the tokens delivered so far.
        attempts: number of replicas that were asked.
        repeated: number of tokens that were decoded again and left out.
    """

    tokens: list[int] = field(default_factory=list)
    attempts: int = 0
    repeated: int = 0


async def resumed(
    open_stream: Callable[[], AsyncIterator[list[int]]],
    *,
    lost: tuple[type[BaseException], ...],
    attempts: int = 3,
    delivered: Delivered | None = None,
) -> AsyncIterator[list[int]]:
    """Yields the tokens of a request in order, each once.

    Args:
        open_stream: requests the whole text from a replica, and yields some tokens at a time.
        lost: the exceptions that mean a lost replica; other exceptions are errors of the request and are raised.
        attempts: greatest number of replicas to ask.
        delivered: is updated with the progress.

    Raises:
        ResumeError: the texts of two replicas differ. An exception of `lost`: the last attempt failed.
    """
    known = delivered if delivered is not None else Delivered()
    while True:
        known.attempts += 1
        seen = 0
        try:
            async for tokens in open_stream():
                again = min(len(known.tokens) - seen, len(tokens))
                if again > 0:
                    if tokens[:again] != known.tokens[seen : seen + again]:
                        raise ResumeError(
                            f"after {len(known.tokens)} tokens a replica was lost, and another one writes other tokens from token "
                            f"{seen} on: take float32 weights and the same kind of machine for all replicas, and give sampled "
                            "requests a seed",
                            known.tokens,
                        )
                    known.repeated += again
                seen += len(tokens)
                if new := tokens[max(again, 0) :]:
                    known.tokens += new
                    yield new
        except lost:
            if known.attempts >= attempts:
                raise
            continue
        if seen < len(known.tokens):
            raise ResumeError(f"another replica ended after {seen} of {len(known.tokens)} tokens", known.tokens)
        return
