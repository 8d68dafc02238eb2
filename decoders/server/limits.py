"""The limits of a server (sizes, times, keys, hosts), checked before a request is processed, and facts about a request's arrival."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import CancelledError, DeadlineError
from .refusals import Refusal, log

#: Names of this server's entries in an ASGI scope: the digest of the request's key, a function that returns the request's token
#: counts, and the seconds that threads spent on preparing the request.
CLIENT, TOKENS, SPENT = "decoders.client", "decoders.tokens", "decoders.spent"
#: While requests are decoded, answers without new tokens (see :class:`Pace`) may take the share IDLE_SHARE of the server's time. They
#: are delayed once they have taken BURST seconds more than this share.
IDLE_SHARE, BURST = 0.1, 0.02
#: Longest delays in seconds: LONGEST_LOOK for answers to GET requests, LONGEST_HOLD for refusals and for answers to large bodies.
LONGEST_LOOK, LONGEST_HOLD = 0.1, 2.0
#: Number of bodies of the largest allowed size that may be in memory at once.
BODIES = 64
#: Number of commas and opening brackets that a body may have in addition to the number that the longest prompt needs.
VALUES = 40_000
CLOSE = {"Connection": "close"}
#: Assumed number of seconds that the event loop spends on a request, and on each byte of its body.
HANDLING, BYTE = 4e-4, 4e-9


@dataclass(eq=False)
class Arrival:
    """What is known about a request before its body arrives.

    Attributes:
        client: digest of the request's key; an empty string without a key.
        moment: when the request arrived, by ``time.monotonic()``.
        gone: whether the client has disconnected or has been answered, or the server cancels its requests. Threads then stop preparing
            the request.
    """

    client: str = ""
    moment: float = field(default_factory=time.monotonic)
    gone: bool = False

    def left(self, seconds: float) -> float:
        """The remaining seconds of a limit of `seconds` that began with the arrival; negative once the limit has passed."""
        return seconds - (time.monotonic() - self.moment)

    def check(self, seconds: float) -> None:
        """Raises CancelledError if the client is `gone`, and DeadlineError if `seconds` have passed since the arrival."""
        if self.gone:
            raise CancelledError("the request was cancelled")
        if self.left(seconds) <= 0:
            raise self.late(seconds)

    def late(self, seconds: float) -> DeadlineError:
        """The error for a request that took longer than `seconds`."""
        return DeadlineError(f"the request was not finished within its {seconds:.3g} s")

    def salt(self, given: str | None) -> str:
        """The cache salt of the request. Requests share caches only if their API keys and their fields ``cache_salt`` are equal. given:
        the request's field ``cache_salt``.
        """
        if not self.client and given is None:
            return ""
        return digest(f"{self.client}\0{given or ''}")


def digest(text: str) -> str:
    """A digest of `text` that does not reveal `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Pace:
    """Computes delays of answers without new tokens (refusals, /health, …), so that a flood of them does not slow down decoding.

    A client waits for its answer before it asks again, so delayed answers bound how much of the server's time a client can use.

    Args:
        longest: longest delay in seconds.
    """

    def __init__(self, longest: float) -> None:
        self.longest, self._until = longest, 0.0

    def delay(self, seconds: float) -> float:
        """Counts an answer that took `seconds` to compute, and returns the number of seconds by which to delay it."""
        now = time.monotonic()
        self._until = min(max(self._until, now - BURST / IDLE_SHARE) + seconds / IDLE_SHARE, now + self.longest)
        return max(self._until - now, 0.0)


#: Paths that need no key: the health check, and the page, which holds no data.
OPEN = ("/", "/health")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    """Limits of one request and of all requests together.

    Attributes:
        body: greatest number of bytes of a body.
        prompt_tokens: greatest number of tokens of a prompt.
        new_tokens: greatest number of new tokens per choice.
        choices: greatest number of choices of a request (number of prompts times n).
        deadline: seconds that a request may take, including its time in the queue; a request may ask for less.
        rows: greatest number of requests decoded at once, per strategy.
        slots: greatest number of tokens of a row, prompt and new tokens together.
        queue: greatest number of waiting requests, per strategy.
        schedulers: greatest number of strategies that have a scheduler at once, in addition to the default strategy.
        constrained: greatest number of slow requests (large, with images or with new grammars) that wait to be prepared.
        connections: greatest number of connections at once.
        read: seconds within which a request has to arrive.
        sharing: whether requests with the same API key and ``cache_salt`` share the KV cache of common prompt beginnings, and what
            strategies have learned.
        client_settings: the strategies' settings that a request may set, see
            :class:`~decoders.server.client_settings.ClientSettings`.
    """

    body: int = 1 << 20
    prompt_tokens: int = 3072
    new_tokens: int = 1024
    choices: int = 8
    deadline: float = 600.0
    rows: int = 8
    slots: int = 4096
    queue: int = 64
    schedulers: int = 4
    constrained: int = 16
    connections: int = 512
    read: float = 20.0
    sharing: bool = True
    client_settings: tuple[str, ...] = ("bounded",)

    def check_values(self, content: bytes) -> None:
        """Raises Refusal for a body with more values than any request needs, since a megabyte of brackets takes long to parse."""
        count, most = sum(map(content.count, (b",", b"[", b"{"))), VALUES + 8 * self.prompt_tokens
        if count > most:
            message = f"the body has more commas and brackets ({count:,}) than a request needs; the limit is {most:,}"
            raise Refusal(400, message, code="too_many_values")

    def too_long(self, tokens: str, slots: int) -> Refusal:
        """The refusal of a prompt that is too long. tokens: its number of tokens, as text; slots: limit of prompt and new tokens."""
        message = f"the prompt has {tokens} tokens; the limit is {min(self.prompt_tokens, slots - 1)}"
        return Refusal(400, message, param="prompt", code="context_length_exceeded")


class Gate:
    """Refuses requests without a valid key, for a foreign host, or with too large a body. Refuses POST requests with a content type
    other than JSON, too: web pages of other origins may send other types without permission (CORS).

    While other requests are decoded, answers without new tokens (refusals, /health, …) are delayed, so that a flood of them does not
    slow down decoding (:class:`Pace`).

    Args:
        app: answers the requests that pass.
        keys: valid keys. A client sends one of them as ``Authorization: Bearer …``. Empty if no key is needed.
        hosts: names by which clients may address the server; None for any name. On a loopback address, the names keep out web pages
            with a domain that resolves to that address (DNS rebinding).
        body: greatest number of bytes of a body.
        refused: called with every refusal.
        busy: returns whether requests are being decoded; answers are delayed only in this case.
    """

    def __init__(
        self, app: ASGIApp, keys: str | Collection[str] | None, hosts: Collection[str] | None, body: int,
        refused: Callable[[Scope, Refusal], None], busy: Callable[[], bool] = bool,
    ) -> None:  # fmt: skip
        self.app, self.body, self.refused, self.busy = app, body, refused, busy
        self._refusals, self._looks = Pace(LONGEST_HOLD), Pace(LONGEST_LOOK)
        self._bytes = 0  # total size of the bodies whose answers have not begun
        every = [keys] if isinstance(keys, str) else keys or ()
        self.keys = {key.encode(): digest(key) for key in every}
        self.hosts = {host.lower() for host in hosts} if hosts is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, status, size, kept = time.monotonic(), 0, 0, 0  # kept: this body's share of `_bytes`

        async def counted() -> Message:
            nonlocal size, kept
            message = await receive()
            count = len(message.get("body", b""))
            size += count
            if message["type"] == "http.request" and not status:
                kept, self._bytes = kept + count, self._bytes + count
                if kept > self.body:
                    raise self._too_large()
                if self._bytes > BODIES * self.body:
                    reason = "too many large bodies arrive at the same time: try again later"
                    raise Refusal(429, reason, code="too_many_bodies", headers={"Retry-After": "2", **CLOSE})
            return message

        async def noted(message: Message) -> None:
            nonlocal status, kept
            if message["type"] == "http.response.start":
                status = message["status"]
                self._bytes, kept = self._bytes - kept, 0
                await self._hold(scope, status, scope.get(SPENT, 0.0) + HANDLING + BYTE * size)
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, counted, noted)
        except Refusal as error:
            if status:
                raise
            self.refused(scope, error)
            await error.response(scope, receive, noted)
        finally:
            self._bytes -= kept
            if log.isEnabledFor(logging.INFO):
                read, written = scope[TOKENS]() if TOKENS in scope else (0, 0)
                path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:200]
                seconds = time.monotonic() - begun
                log.info(
                    "%s %s %s, %d + %d tokens, %.3f s", scope["method"], path, status or "gone", read, written, seconds
                )

    async def _hold(self, scope: Scope, status: int, seconds: float) -> None:
        """Delays an answer without new tokens, in proportion to the `seconds` that the server took to compute it."""
        if status < 400 and scope["method"] == "POST":
            return
        delay = (self._looks if status < 400 else self._refusals).delay(seconds)
        if delay and self.busy():
            await asyncio.sleep(delay)

    def _check(self, scope: Scope) -> None:
        """Raises Refusal for a request that must not pass, as its path and headers show."""
        headers = Headers(scope=scope)
        host = _name_of(headers.get("host", ""))
        if self.hosts is not None and host not in self.hosts:
            known = ", ".join(sorted(self.hosts))
            raise Refusal(403, f"unknown host {host!r}: use one of this server's names: {known}", code="unknown_host")
        if self.keys and scope["path"] not in OPEN:
            kind, _, bearer = headers.get("authorization", "").partition(" ")
            given = bearer.strip(" \t").encode("latin-1") if kind.lower() == "bearer" else b""
            # Compares with all keys, so that the time of the comparison does not reveal which key matched.
            matching = [name for key, name in self.keys.items() if hmac.compare_digest(given, key)]
            if not matching:
                wrong = "the API key is wrong" if given else "Authorization: Bearer KEY is missing"
                raise Refusal(401, wrong, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            scope[CLIENT] = matching[0]
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refusal(415, "send Content-Type: application/json", code="unsupported_media_type")
            length = headers.get("content-length", "0")
            if len(length) > 18 or (length.isdecimal() and int(length) > self.body):
                raise self._too_large()

    def _too_large(self) -> Refusal:
        message = f"the body has more than {self.body:,} bytes, the limit of this server"
        return Refusal(413, message, code="body_too_large", headers=CLOSE)


def hosts_of(host: str, more: Collection[str]) -> frozenset[str] | None:
    """The names by which clients may address a server at `host`; None for any name.

    For a loopback address: the loopback names and `more`. For another address: `host` and `more`, or any name if `more` is empty.
    """
    if host in LOOPBACK:
        return frozenset((*LOOPBACK, *more))
    return frozenset((host, *more)) if more else None


def _name_of(host: str) -> str:
    """The name in a ``Host`` header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
