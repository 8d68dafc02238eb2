"""What a client is told when a request is refused or fails: OpenAI's error form, with a status that says whose fault it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import (
    CacheMemoryError,
    CancelledError,
    ContextLengthError,
    DeadlineError,
    DecodersError,
    GrammarError,
    QueueFull,
    UnknownNameError,
)

log = logging.getLogger("decoders.server")

#: ``type`` of an error by its status; 4xx otherwise is a request that cannot be answered as it stands.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of the response.
        message: what was wrong, what is allowed, what comes nearest.
        param: the field that is to blame, as a path with dots.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer, as OpenAI has it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def outcome(self) -> str:
        """How the request is counted."""
        named = {429: "queue_full", 504: "deadline", 503: "unavailable", 499: "cancelled"}
        return named.get(self.status, "failed" if self.status >= 500 else "refused")


def refusal(error: BaseException, retry_after: int = 1) -> Refusal:
    """What a client is told of `error`. Of an unexpected one it learns nothing but that it happened; the log has the rest.

    Args:
        retry_after: seconds after which a request that found the queue full may come again.
    """
    if isinstance(error, Refusal):
        return error
    text = str(error)
    if isinstance(error, QueueFull):
        return Refusal(429, text, code="queue_full", headers={"Retry-After": str(retry_after)})
    if isinstance(error, DeadlineError):
        return Refusal(504, text, param="deadline", code="deadline_exceeded")
    if isinstance(error, CancelledError):
        return Refusal(503, f"{text}: the server is shutting down", code="cancelled", headers={"Retry-After": "5"})
    if isinstance(error, CacheMemoryError):
        return Refusal(503, text, code="out_of_memory", headers={"Retry-After": "5"})
    if isinstance(error, ContextLengthError):
        return Refusal(400, text, code="context_length_exceeded")
    if isinstance(error, GrammarError):
        param = "tools" if text.startswith(("tools:", "calls of functions:")) else "response_format"
        return Refusal(400, text, param=param, code="invalid_grammar")
    if isinstance(error, UnknownNameError):
        named = "strategy" if error.kind == "strategy" else None
        return Refusal(400, text, param=named, code=f"unknown_{error.kind.replace(' ', '_')}")
    if isinstance(error, DecodersError) and isinstance(error, ValueError):
        return Refusal(400, text, code="invalid_value")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the request failed on the server; its log says why", code="internal_error")
