"""A server under attack, in a process of its own on loopback: bounded in memory, work and words, and innocent requests are answered."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="figures are read from /proc"),
]
ROUTE = "/v1/completions"
INNOCENT = {"prompt": "def add(a, b):", "max_tokens": 4}


@dataclass
class Attacked:
    """A server's process.

    Attributes:
        said: the file with what it has said.
    """

    process: subprocess.Popen[bytes]
    host: str
    port: int
    said: Path

    @property
    def client(self) -> Any:
        return httpx.Client(base_url=f"http://{self.host}:{self.port}", timeout=60, trust_env=False)

    @property
    def resident(self) -> int:
        """Memory in use, MiB."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    @property
    def seconds(self) -> float:
        """Of processors."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def attacked(folder: Path, *options: str, descriptors: int = 1024) -> Iterator[Attacked]:
    import resource

    said = folder / "said"
    command = [
        sys.executable,
        "-m",
        "decoders",
        "serve",
        "demo",
        "--port",
        "0",
        "--no-compile",
        "--threads",
        "1",
        *options,
    ]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with said.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, preexec_fn=limited)
    try:
        until = time.monotonic() + 120
        while " at http://" not in said.read_text():
            assert time.monotonic() < until and process.poll() is None, said.read_text()
            time.sleep(0.1)
        host, port = said.read_text().split(" at http://")[1].split("/")[0].split(":")
        yield Attacked(process, host, int(port), said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in said.read_text()
    finally:
        process.kill()
        process.wait()


def test_connections_that_say_nothing_cost_nothing(tmp_path: Path) -> None:
    with attacked(tmp_path, "--read-timeout", "2", descriptors=256) as server, contextlib.ExitStack() as stack:
        size, begun = server.said.stat().st_size, server.seconds
        for number in range(500):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.create_connection((server.host, server.port), timeout=5))
                if number % 2:
                    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(5)
        assert server.seconds - begun < 3 and server.said.stat().st_size - size < 10_000
        with server.client as client:
            assert client.get("/health").status_code == 200
            assert client.post(ROUTE, json=INNOCENT).status_code == 200


def test_headers_without_end_are_not_kept(tmp_path: Path) -> None:
    with attacked(tmp_path, "--api-key", "key") as server:
        before = server.resident

        def send(number: int) -> None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((server.host, server.port), timeout=5) as connection,
            ):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
                for each in range(2000):
                    connection.sendall(b"a%d: %b\r\n" % (each, b"x" * 10_000))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(send, range(64)))
        assert server.resident - before < 50


def varied(number: int) -> dict[str, Any]:
    """Requests of which no two ask for the same."""
    chance = random.Random(number)
    body: dict[str, Any] = INNOCENT | {"prompt": f"def f{number}(a, b):", "cache_salt": f"s{number}", "seed": number}
    kind = number % 5
    if kind == 0:
        body |= {"strategy": "suffix", "strategy_config": {"alpha": 1 + chance.random()}}
    elif kind == 1:
        body |= {"strategy": "token_recycling", "strategy_config": {"nodes": chance.randrange(4, 60)}}
    elif kind == 2:
        body |= {"temperature": chance.random(), "top_p": 1 - chance.random() / 2, "top_k": chance.randrange(1, 1000)}
    elif kind == 3:
        body |= {"response_format": {"type": "choice", "choices": [f"a{number}", f"b{number}"]}}
    else:
        body |= {
            "strategy": "+".join(chance.sample(["prompt_lookup", "suffix", "ngram", "lookahead"], 3)),
            "temperature": number / 1e4,
        }
    return body


def test_varied_requests_do_not_fill_the_memory(tmp_path: Path) -> None:
    with attacked(tmp_path) as server, server.client as client, ThreadPoolExecutor(4) as threads:
        kinds: set[int] = set()

        def ask(number: int) -> None:
            kinds.add(client.post(ROUTE, json=varied(number)).status_code)

        list(threads.map(ask, range(200)))
        first = server.resident
        list(threads.map(ask, range(200, 1000)))
        assert server.resident - first < 300, f"{first} MiB, then {server.resident}"
        assert kinds <= {200, 429}


def test_grammars_and_strategies_of_others_do_not_hold_up_the_innocent(tmp_path: Path) -> None:
    """Clients that ask for costly grammars and leave, and others that keep all strategies busy."""
    over = threading.Event()
    costly = {f"^.*{letter}.*$": {"type": "string"} for letter in "abcd"}
    format = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "patternProperties": costly}}}
    with attacked(tmp_path) as server, server.client as client:

        def compile_and_leave() -> None:
            while not over.is_set():
                with contextlib.suppress(httpx.HTTPError), server.client as own:
                    own.post(ROUTE, json=INNOCENT | {"response_format": format, "cache_salt": "x"}, timeout=0.3)

        def keep_busy(ngram: int) -> None:
            body = INNOCENT | {"max_tokens": 200, "strategy": "prompt_lookup", "strategy_config": {"max_ngram": ngram}}
            while not over.is_set():
                with contextlib.suppress(httpx.HTTPError), server.client as own:
                    own.post(ROUTE, json=body)

        attackers = [threading.Thread(target=compile_and_leave) for _ in range(3)]
        attackers += [threading.Thread(target=keep_busy, args=(ngram,)) for ngram in (4, 5, 6, 7)]
        for each in attackers:
            each.start()
        try:
            answers = [client.post(ROUTE, json=INNOCENT | {"deadline": 30.0}).status_code for _ in range(20)]
            assert answers == [200] * 20
            assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        finally:
            over.set()
            for each in attackers:
                each.join(60)
