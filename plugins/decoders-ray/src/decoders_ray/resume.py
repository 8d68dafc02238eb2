"""A stream of tokens that goes on where it stood when a replica dies: nothing is lost, nothing comes twice.

A request has one text, that of its seed. Another replica writes the same one from the beginning, and what has been delivered is
left out. That it is the same is checked, token by token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field


class ResumeError(RuntimeError):
    """Another replica has written another text than the one that was delivered in part, so the stream cannot go on.

    Attributes:
        delivered: the tokens that were.
    """

    def __init__(self, message: str, delivered: list[int]) -> None:
        super().__init__(message)
        self.delivered = delivered


@dataclass
class Delivered:
    """What has come of a request.

    Attributes:
        tokens: delivered so far.
        attempts: replicas that were asked.
        repeated: tokens that were written again and left out.
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
    """The tokens of a request in order, each once.

    Args:
        open_stream: asks a replica, for the text from its beginning, some tokens at a time.
        lost: what is raised where a replica is gone; anything else is the request's own error and is raised.
        attempts: most replicas to ask.
        delivered: is told what has come.

    Raises:
        ResumeError: the texts of two replicas differ. One of `lost`: from the last attempt.
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
                            f"after {len(known.tokens)} tokens a replica was lost, and another one writes something else from token "
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
