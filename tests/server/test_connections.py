"""Connections of strangers: bounded in number, in time and in what they may send before a key is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.server import limits
from decoders.server.running import HEAD_BYTES, Seldom, most_connections, quiet

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connected(client: Any) -> Iterator[socket.socket]:
    with socket.create_connection(client.server.bound, timeout=20) as connection:
        yield connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            content += piece
    return content


def sent(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it may be closed before all of it is sent
        connection.sendall(content)


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"".join(b"a%d: %b\r\n" % (number, b"x" * 1000) for number in range(200)) + b"\r\n",
        HEAD + b"a: " + b"x" * 10 * HEAD_BYTES,
        b"GET /" + b"x" * 10 * HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"x" * 10 * HEAD_BYTES,
    ],
    ids=["headers", "header", "url", "method"],
)
def test_a_large_head_is_refused(served: Any, service_of: Any, head: bytes) -> None:
    with served(service_of(), keys=["key"]) as client:
        with connected(client) as connection:
            sent(connection, head)
            assert answer(connection)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
        with connected(client) as connection:  # in many pieces
            for begin in range(0, len(head), 5000):
                sent(connection, head[begin : begin + 5000])
            assert answer(connection)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
        assert client.get("/health").status_code == 200


def test_a_head_of_usual_size_is_read(served: Any, service_of: Any) -> None:
    with served(service_of()) as client:
        for _ in range(3):  # on one connection
            assert client.get("/health", headers={"More": "x" * 8000}).status_code == 200
            body = {"prompt": "a" * 300, "max_tokens": 2, "metadata": {"a": "x" * 200_000}}
            assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"GET /health HT", HEAD + b"a: b\r\n", HEAD + b"Content-Length: 50\r\n\r\n{"],
    ids=["nothing", "line", "headers", "body"],
)
def test_a_request_that_does_not_arrive_is_given_up(served: Any, service_of: Any, content: bytes) -> None:
    with served(service_of(read=0.3)) as client, connected(client) as connection:
        sent(connection, content)
        assert answer(connection)[:12] == (b"HTTP/1.1 408" if content else b"")


def test_a_request_that_is_answered_for_long_is_not_given_up(served: Any, service_of: Any, monkeypatch: Any) -> None:
    service, timers = service_of(), []
    start = service.start

    def noted(*arguments: Any, **more: Any) -> Any:
        timers.extend(connection._timer for connection in client.server.server_state.connections)
        return start(*arguments, **more)

    monkeypatch.setattr(service, "start", noted)
    with served(service) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert timers == [None, None]


def test_too_many_connections_are_turned_away(served: Any, service_of: Any, wait_until: Any) -> None:
    with served(service_of(connections=4)) as client, contextlib.ExitStack() as stack:
        assert client.get("/health").status_code == 200
        every = [stack.enter_context(connected(client)) for _ in range(8)]
        for connection in every[4:]:
            assert answer(connection)[:12] == b"HTTP/1.1 503"
        for connection in every:
            connection.close()
        wait_until(lambda: len(client.server.server_state.connections) < 4)
        assert client.get("/health").status_code == 200


def test_there_are_no_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    assert 1 <= most_connections(512) <= 300 - 64
    assert "ulimit -n is 300" in caplog.text
    assert most_connections(3) == 3


def test_what_strangers_bring_about_is_logged_once(served: Any, service_of: Any, caplog: Any) -> None:
    with served(service_of()) as client:
        for _ in range(20):
            with connected(client) as connection:
                sent(connection, b"\x00\x01\r\n\r\n")
                assert answer(connection)[:12] == b"HTTP/1.1 400"
    assert len([record for record in caplog.records if "Invalid HTTP" in record.getMessage()]) <= 1
    assert not any(isinstance(each, Seldom) for each in logging.getLogger("uvicorn.error").filters)


def test_running_out_of_descriptors_is_a_line(caplog: Any) -> None:
    with quiet(), contextlib.closing(asyncio.new_event_loop()) as loop:
        for _ in range(3):
            error = OSError(24, "Too many open files")
            context = {"message": "socket.accept() out of system resource", "exception": error, "socket": "s"}
            loop.call_exception_handler(context)
    (record,) = caplog.records
    assert record.getMessage() == "socket.accept() out of system resource: [Errno 24] Too many open files"
    assert not record.exc_info


def test_answers_without_tokens_are_held_back_while_others_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 3))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": scope["status"], "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None: ...

    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(limits.asyncio, "sleep", sleep)

    def asked(method: str, status: int, times: int = 1, spent: float = 0.0, busy: bool = True) -> list[float]:
        gate.busy = lambda: busy
        slept.clear()
        head = {"type": "http", "path": "/", "method": method, "headers": [(b"content-type", b"application/json")]}
        for _ in range(times):
            asyncio.run(gate(head | {"status": status, limits.SPENT: spent}, receive, send))
        return list(slept)

    gate = limits.Gate(app, None, None, 100, lambda scope, error: None)
    assert asked("POST", 200, 1000, spent=1) == []  # it brings tokens
    usual = int(limits.BURST / limits.HANDLING)
    assert (
        asked("POST", 400, usual, busy=False) == asked("GET", 200, usual - 1) == []
    )  # some at once cost nobody anything
    delays = asked("POST", 400, 1000)
    assert delays[9] == pytest.approx(10 * limits.HANDLING / limits.IDLE_SHARE, abs=0.002)  # a tenth of the time
    assert delays == sorted(delays) and delays[-1] == limits.LONGEST_HOLD
    assert asked("GET", 200, 100)[-1] == limits.LONGEST_LOOK  # whoever asks whether it lives waits for no refusals
    clock[0] += 60
    assert asked("POST", 400) == []
    assert asked("POST", 400, 2, spent=0.05) == [
        pytest.approx(0.3, abs=0.02),
        pytest.approx(0.8, abs=0.02),
    ]  # dear ones wait longer


def test_bodies_in_memory_are_bounded_together(served: Any, service_of: Any, wait_until: Any) -> None:
    head = HEAD + b"Content-Length: 1000\r\n\r\n"
    with served(service_of(body=1000)) as client, contextlib.ExitStack() as stack:
        gate = client.server.config.app
        several = [stack.enter_context(connected(client)) for _ in range(limits.BODIES + 1)]
        for each in several[:-1]:
            each.sendall(head + b"x" * 999)
        wait_until(lambda: gate._bytes == limits.BODIES * 999)
        several[-1].sendall(head + b"x" * 999)
        assert b"429" in answer(several[-1])
        for each in several[:-1]:
            each.close()
        wait_until(lambda: gate._bytes == 0)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
