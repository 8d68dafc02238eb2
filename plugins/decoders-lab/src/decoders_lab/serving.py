"""Measures the time that a server adds to a request: equal requests to a scheduler and through HTTP, in turns."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Overhead:
    """Median seconds of requests to one HTTP route.

    Attributes:
        method: the route.
        scheduler: seconds without a server, from submission to the end.
        server: seconds with a server, as its client measures them.
        added: difference in seconds between a request with the server and the request without it that was sent just before.
    """

    method: str
    scheduler: float
    server: float
    added: float


def overhead(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, strategy: str, prompt: str, new_tokens: int, requests: int,
    compile: bool,
) -> list[Overhead]:  # fmt: skip
    """Sends `requests` equal requests with and without a server, in turns, one after the other. Returns the times of each route.

    The client runs in a separate process.
    """
    from decoders.server.app import make_app
    from decoders.server.bodies import Message
    from decoders.server.limits import Limits
    from decoders.server.running import Server
    from decoders.server.service import Service

    limits = Limits(slots=4096)
    service = Service(model, tokenizer, name="bench", strategy=strategy, limits=limits, config={"compile": compile})
    server = Server(make_app(service), service, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)

        def alone(ids: list[int]) -> float:
            told, begun = threading.Event(), time.perf_counter()
            service.pool.submit(None, None, ids, lambda _: told.set(), max_new_tokens=new_tokens, do_sample=False)
            told.wait()
            return time.perf_counter() - begun

        ids: list[int] = tokenizer(prompt).input_ids
        usual: dict[str, Any] = {"max_tokens": new_tokens, "temperature": 0}
        text = usual | {"prompt": prompt}
        routes: dict[str, tuple[list[int], str, dict[str, Any]]] = {
            "completions": (ids, "/v1/completions", text),
            "completions, streamed": (ids, "/v1/completions", text | {"stream": True}),
        }
        if service.conversations.has_template:
            message = Message(role="user", content=prompt)
            rendered = service.conversations.ids(service.conversations.prompt([message], (), {}))
            messages = [message.model_dump(include={"role", "content"})]
            routes["chat"] = rendered, "/v1/chat/completions", usual | {"messages": messages}
        results = []
        with client(*server.bound) as request_seconds:
            for name, (tokens, path, body) in routes.items():
                pairs = [(alone(tokens), request_seconds(path, body)) for _ in range(requests + 3)]
                pairs = pairs[3:]  # the first requests prepare the model and start threads
                own, whole = [a for a, _ in pairs], [b for _, b in pairs]
                results.append(Overhead(name, median(own), median(whole), median(b - a for a, b in pairs)))
    finally:
        server.should_exit = True
        thread.join()
    return results


@contextmanager
def client(host: str, port: int) -> Iterator[Callable[[str, dict[str, Any]], float]]:
    """Starts a client process for a server. Yields a function that posts a body to a path and returns the seconds until the answer."""
    file = Path(__file__).with_name("http_client.py")
    command = [sys.executable, "-I", str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        sent, received = process.stdin, process.stdout
        assert sent is not None and received is not None
        print(json.dumps([host, port]), file=sent, flush=True)

        def request_seconds(path: str, body: dict[str, Any]) -> float:
            print(json.dumps([path, json.dumps(body)]), file=sent, flush=True)
            told = json.loads(received.readline() or '"it has ended"')
            if not isinstance(told, float):
                raise RuntimeError(f"the client could not ask for {path}: {told}")
            return told

        try:
            yield request_seconds
        finally:
            sent.close()
