"""What a server adds to a request: the same requests to a scheduler and through HTTP, in turns."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Overhead:
    """Seconds of one kind of request, medians.

    Attributes:
        method: the route.
        scheduler: of the request without a server: submitted, and told that it is done.
        server: of the request as a client sees it.
        added: of the differences between two that were made one after the other.
    """

    method: str
    scheduler: float
    server: float
    added: float


def overhead(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, strategy: str, prompt: str, new_tokens: int, requests: int,
    compile: bool,
) -> list[Overhead]:  # fmt: skip
    """Asks `requests` times with and without a server, in turns, one request after the other, all for the same text."""
    from ..server.app import make_app
    from ..server.bodies import Message
    from ..server.limits import Limits
    from ..server.running import Server
    from ..server.service import Service

    limits = Limits(slots=4096)
    service = Service(model, tokenizer, name="bench", strategy=strategy, limits=limits, config={"compile": compile})
    server = Server(make_app(service), service, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        connection = http.client.HTTPConnection(*server.bound)

        def alone(ids: list[int]) -> None:
            told = threading.Event()
            service.pool.submit(None, None, ids, lambda _: told.set(), max_new_tokens=new_tokens, do_sample=False)
            told.wait()

        def asked(path: str, **body: Any) -> None:
            content = json.dumps({"max_tokens": new_tokens, "temperature": 0, **body})
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, text

        ids: list[int] = tokenizer(prompt).input_ids
        ways: dict[str, tuple[list[int], Callable[[], None]]] = {
            "completions": (ids, partial(asked, "/v1/completions", prompt=prompt)),
            "completions, streamed": (ids, partial(asked, "/v1/completions", prompt=prompt, stream=True)),
        }
        if service.conversations.has_template:
            message = Message(role="user", content=prompt)
            rendered = service.conversations.ids(service.conversations.prompt([message], (), {}))
            messages = [message.model_dump(include={"role", "content"})]
            ways["chat"] = rendered, partial(asked, "/v1/chat/completions", messages=messages)
        results = []
        for name, (tokens, ask) in ways.items():
            own: list[float] = []
            whole: list[float] = []
            for _ in range(requests + 3):
                for ways_seconds, way in ((own, partial(alone, tokens)), (whole, ask)):
                    begun = time.perf_counter()
                    way()
                    ways_seconds.append(time.perf_counter() - begun)
            own, whole = own[3:], whole[3:]  # the first ones pack weights and start threads
            added = [b - a for a, b in zip(own, whole, strict=True)]
            results.append(Overhead(name, median(own), median(whole), median(added)))
        connection.close()
    finally:
        server.should_exit = True
        thread.join()
    return results
