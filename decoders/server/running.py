"""uvicorn with limits for untrusted connections, and with a shutdown that lets running requests finish.

The number of connections, the time in which a request must arrive and the size of its head are limited before any key is checked.
During shutdown new requests are refused; running requests have some time to finish and are then cancelled, with an error for their
clients.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from .service import Service

#: Greatest size in bytes of a request's line and headers.
HEAD_BYTES = 32 << 10
#: Length of the system's accept queue. asyncio accepts up to this many connections at once; each needs a file descriptor.
BACKLOG = 64
#: Number of file descriptors reserved for everything but connections.
SPARE_DESCRIPTORS = 32
#: Seconds between two logs of the same message, for messages that unknown clients can cause.
SELDOM = 60.0

log = logging.getLogger("decoders.server")


def most_connections(wanted: int) -> int:
    """The number of connections to allow: `wanted`, or fewer if the process has too few file descriptors for them. Without a free
    descriptor, the server would try to accept a connection in a busy loop.
    """
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else SPARE_DESCRIPTORS
    except ImportError:  # Windows
        return wanted
    if limit == resource.RLIM_INFINITY:
        return wanted
    most = max(min(wanted, limit - used - BACKLOG - SPARE_DESCRIPTORS), 1)
    if most < wanted:
        log.warning("ulimit -n is %d: this allows %d connections, not %d. Raise it", limit, most, wanted)
    return most


class _Bounded(H11Protocol):
    """uvicorn's h11 protocol with limits. h11 itself bounds the size of a request's head.

    Attributes:
        most: greatest number of connections.
        seconds: time within which a request has to arrive.
    """

    most: int
    seconds: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._end(b"503 Service Unavailable", "there are too many connections")
        else:
            self._timer = self.loop.call_later(self.seconds, self._late)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.is_closing() or not self._arriving:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._late)

    @property
    def _arriving(self) -> bool:
        """Whether a part of a request has arrived, and more of it has yet to arrive."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._arriving and not self.transport.is_closing():
            self._end(b"408 Request Timeout", f"the request did not arrive within {self.seconds:g} s")
        else:
            self.transport.close()

    def _end(self, status: bytes, message: str) -> None:
        """Sends an error, unless an answer has begun, and closes the connection."""
        self._stop()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            content = message.encode()
            head = b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(content)) + content)
        self.transport.close()


class Seldom(logging.Filter):
    """A log filter that passes the same message at most once in :data:`SELDOM` seconds, for messages that unknown clients can cause."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError):  # errors such as "no descriptor left" need no traceback
            record.msg, record.args, record.exc_info = f"{str(record.msg).partition(chr(10))[0]}: {error}", (), None
        message, now = str(record.msg)[:100], time.monotonic()
        if now - self._shown.get(message, -SELDOM) < SELDOM:
            return False
        if len(self._shown) > 100:
            self._shown.clear()
        self._shown[message] = now
        return True


@contextmanager
def quiet() -> Iterator[None]:
    """While the context is open, :class:`Seldom` filters the log of uvicorn and asyncio, which unknown clients can fill."""
    seldom = Seldom()
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for each in loggers:
        each.addFilter(seldom)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(seldom)


#: Seconds in which cancelled requests may send their last events.
LAST_WORDS = 5


def logging_of(level: str) -> dict[str, Any]:
    """uvicorn's logging config, extended by this server's logger, which at level "info" logs a line per request."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"][log.name] = {"handlers": ["default"], "level": level.upper()}
    return config


class Server(uvicorn.Server):
    """uvicorn's server for a :class:`~decoders.server.service.Service`.

    Args:
        app: the application that :func:`~decoders.server.app.make_app` returned for `service`.
        grace: seconds after SIGTERM or SIGINT in which running requests may finish.
        port: the port; 0 for a free one.

    Attributes:
        announce: called with the server's URL once it has started.
    """

    announce: Callable[[str], object] = staticmethod(lambda place: None)

    def __init__(
        self, app: ASGIApp, service: Service, *, host: str = "127.0.0.1", port: int = 8000, grace: float = 30.0,
        log_level: str = "warning",
    ) -> None:  # fmt: skip
        self.service, self.grace, self.hurried = service, grace, False
        bounds = {"most": most_connections(service.limits.connections), "seconds": service.limits.read}
        super().__init__(
            uvicorn.Config(
                app, host=host, port=port, log_level=log_level, access_log=False, lifespan="on", log_config=logging_of(log_level),
                timeout_graceful_shutdown=math.ceil(grace) + LAST_WORDS, server_header=False, ws="none",
                http=type("BoundedProtocol", (_Bounded,), bounds), backlog=BACKLOG, h11_max_incomplete_event_size=HEAD_BYTES,
            )  # type: ignore[arg-type,unused-ignore]
        )  # fmt: skip

    @property
    def bound(self) -> tuple[str, int]:
        """Address and port, known once the server has started."""
        address = self.servers[0].sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with quiet():
            await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second Ctrl-C ends the grace period: clients receive an error. Only the third Ctrl-C closes connections at once."""
        if self.should_exit and sig == signal.SIGINT and not self.hurried:
            self.hurried = True
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.bound
            self.announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        if self.service.pool.outstanding:
            log.warning("running requests have %g seconds to finish; Ctrl-C ends them now", self.grace)
        end = asyncio.ensure_future(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _end(self) -> None:
        end = time.monotonic() + self.grace
        while time.monotonic() < end and not self.hurried:
            await asyncio.sleep(0.1)
        self.service.cancel()
