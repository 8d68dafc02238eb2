"""A server that ends in peace: nothing new, what runs is finished within a time, the rest is cancelled and told so."""

from __future__ import annotations

import asyncio
import math
import socket

import uvicorn

from .connections import BACKLOG, HEAD_BYTES, protocol, quiet
from .limits import App
from .service import Service

#: Seconds that cancelled requests have to send their last words.
LAST_WORDS = 5


class Server(uvicorn.Server):
    """uvicorn's server around a service.

    Args:
        app: of :func:`~decoders.server.app.make_app`.
        grace: seconds that running requests have after SIGTERM or SIGINT.
        port: 0 takes a free one.
    """

    def __init__(
        self, app: App, service: Service, *, host: str = "127.0.0.1", port: int = 8000, grace: float = 30.0,
        log_level: str = "warning",
    ) -> None:  # fmt: skip
        self.service, self.grace = service, grace
        super().__init__(
            uvicorn.Config(
                app, host=host, port=port, log_level=log_level, access_log=log_level in ("info", "debug"), lifespan="on",
                timeout_graceful_shutdown=math.ceil(grace) + LAST_WORDS, server_header=False, ws="none",
                http=protocol(service.limits), backlog=BACKLOG, h11_max_incomplete_event_size=HEAD_BYTES,
            )  # type: ignore[arg-type,unused-ignore]
        )  # fmt: skip

    @property
    def bound(self) -> tuple[str, int]:
        """Address and port, once it has started."""
        address = self.servers[0].sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with quiet():
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        end = asyncio.ensure_future(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _end(self) -> None:
        await asyncio.sleep(self.grace)
        self.service.cancel()
