"""A server under attack, in a process of its own on loopback: innocent requests are answered, in time, and memory stays bounded.

Each attack runs for some seconds beside requests of others; `pytest -m slow -s tests/server/test_attacks.py` prints what they took.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from . import attacks
from .attacks import ATTACKS, COMPLETE, INNOCENT
from .conftest import TEMPLATE

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="figures are read from /proc"),
]
#: Seconds of requests between the attacks, which say how long they take usually.
USUAL = 0.5


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

    def client(self, timeout: float = 60) -> Any:
        return httpx.Client(base_url=f"http://{self.host}:{self.port}", timeout=timeout, trust_env=False)

    @property
    def resident(self) -> int:
        """Memory in use, MiB."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    @property
    def seconds(self) -> float:
        """Of processors."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connected(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=5)


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


@contextlib.contextmanager
def attackers(server: Attacked, name: str, clients: int = 4) -> Iterator[subprocess.Popen[str]]:
    """Clients, in a process of their own, that ask for the same kind of thing until the process ends. It says what they were told."""
    command = [sys.executable, attacks.__file__, f"http://{server.host}:{server.port}", name, str(clients)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


def innocent(server: Attacked, going_on: Callable[[], bool]) -> tuple[list[float], list[float]]:
    """The seconds that requests and health checks of others take, one of each at least."""
    requests: list[float] = []
    checks: list[float] = []

    def check() -> None:
        with server.client() as client:
            while not checks or going_on():
                begin = time.monotonic()
                assert client.get("/health").status_code == 200
                checks.append(time.monotonic() - begin)
                time.sleep(0.05)

    with ThreadPoolExecutor(1) as threads, server.client() as client:
        checking = threads.submit(check)
        while not requests or going_on():
            begin = time.monotonic()
            response = client.post(COMPLETE, json=INNOCENT)
            assert response.status_code == 200, response.text
            requests.append(time.monotonic() - begin)
        checking.result()
    return requests, checks


def usual(server: Attacked) -> list[float]:
    """The seconds that requests take without an attack."""
    until = time.monotonic() + USUAL
    return innocent(server, lambda: time.monotonic() < until)[0]


def test_innocent_requests_are_answered_during_every_attack(tmp_path: Path) -> None:
    """Within twice their usual time, in one of two tries: a machine may have other work for a while."""
    template = tmp_path / "template"
    template.write_text(TEMPLATE)
    broken = list[str]()
    with attacked(tmp_path, "--grace", "2", "--chat-template", str(template)) as server:
        after = usual(server)
        for name in ATTACKS:
            for _ in range(2):
                before = after
                with attackers(server, name) as others:
                    time.sleep(0.2)
                    requests, checks = innocent(server, lambda others=others: others.poll() is None)
                    told, after = Counter(json.loads(others.communicate()[0])), usual(server)
                ratio = median(requests) / median(before + after)
                figures = (
                    f"{name:36} {ratio:.1f} times as long: {median(requests):.3f} s, longest {max(requests):.2f} s; "
                    f"/health {median(checks):.3f} s, longest {max(checks):.3f} s; {dict(told)}; {server.resident} MiB"
                )
                print(figures, flush=True)
                # 504: the deadline of an attacker's own request.
                assert not [status for status in told if status.isdigit() and int(status) >= 500 and status != "504"]
                if ratio <= 2 and max(checks) < 0.2:
                    break
            else:
                broken.append(figures)
        with attackers(server, "many patterns of names"):
            time.sleep(1)
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            ended = time.monotonic() - begin
        print(f"SIGTERM ended it in {ended:.2f} s")
    assert not broken, "\n".join(broken)
    assert ended <= 5


def test_connections_that_say_nothing_cost_nothing(tmp_path: Path) -> None:
    with attacked(tmp_path, "--read-timeout", "2", descriptors=256) as server, contextlib.ExitStack() as stack:
        size, begun = server.said.stat().st_size, server.seconds
        for number in range(500):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(server.connected())
                if number % 2:
                    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(5)
        assert server.seconds - begun < 3 and server.said.stat().st_size - size < 10_000
        with server.client() as client:
            assert client.get("/health").status_code == 200
            assert client.post(COMPLETE, json=INNOCENT).status_code == 200


def test_headers_without_end_are_not_kept(tmp_path: Path) -> None:
    with attacked(tmp_path, "--api-key", "key") as server:
        before = server.resident

        def send(number: int) -> None:
            with contextlib.suppress(OSError), server.connected() as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
                for each in range(2000):
                    connection.sendall(b"a%d: %b\r\n" % (each, b"x" * 10_000))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(send, range(64)))
        assert server.resident - before < 50


def varied(number: int) -> dict[str, Any]:
    """Requests of which no two ask for the same."""
    chance = random.Random(number)
    body: dict[str, Any] = {
        "prompt": f"def f{number}(a, b):" + " a" * chance.randrange(20), "cache_salt": f"s{number}", "seed": number, "max_tokens": 2,
    }  # fmt: skip
    kind = number % 6
    if kind == 0:
        body |= {"strategy": "suffix", "strategy_config": {"alpha": 1 + chance.random()}}
    elif kind == 1:
        body |= {"strategy": "token_recycling", "strategy_config": {"nodes": chance.randrange(4, 60)}}
    elif kind == 2:
        body |= {"temperature": chance.random(), "top_p": 1 - chance.random() / 2, "top_k": chance.randrange(1, 1000)}
    elif kind == 3:
        body |= {"response_format": {"type": "choice", "choices": [f"a{number}", f"b{number}"]}}
    elif kind == 4:
        content = {"type": "object", "properties": {f"p{number}": {"type": "integer", "minimum": number}}}
        body |= {"response_format": {"type": "json_schema", "json_schema": {"schema": content, "strict": False}}}
    else:
        body |= {
            "strategy": "+".join(chance.sample(["prompt_lookup", "suffix", "ngram", "lookahead"], 3)),
            "temperature": number / 1e4,
        }
    return body


def test_varied_requests_do_not_fill_the_memory(tmp_path: Path) -> None:
    with attacked(tmp_path) as server, server.client() as client, ThreadPoolExecutor(8) as threads:

        def ask(number: int) -> int:
            while (status := client.post(COMPLETE, json=varied(number)).status_code) == 429:  # all strategies are busy
                time.sleep(0.05)
            return int(status)

        sizes = []
        for begin in range(0, 5000, 500):
            assert set(threads.map(ask, range(begin, begin + 500))) == {200}
            sizes.append(server.resident)
            print(f"{begin + 500} varied requests: {sizes[-1]} MiB", flush=True)
        assert sizes[-1] - sizes[1] < 64, sizes  # the first thousand fill what is kept
