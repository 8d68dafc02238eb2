"""Requests that take long to be prepared: the others do not wait for them, and whoever is gone or late costs no more."""

from __future__ import annotations

import dataclasses
import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("fastapi")

from decoders.scheduling.generation import Generation

ROUTE, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN = {"prompt": "a", "max_tokens": 2}


def slow(number: int = 0, **more: Any) -> dict[str, Any]:
    """A request whose grammar takes long."""
    return PLAIN | {"response_format": {"type": "regex", "regex": f"[ab]{{{number + 1}}}"}} | more


class Held:
    """Compiling that waits to be let go.

    Attributes:
        running: how many have begun and not ended.
        ended: how many were ended before they were done.
    """

    def __init__(self) -> None:
        self.running = self.ended = 0
        self.free = threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    from decoders.server import workshop

    state, done, name = Held(), workshop.Workshop._done, workshop._name

    def wait(self: Any, task: Any, check: Any, *seconds: Any) -> Any:
        state.running += 1
        try:
            while not state.free.wait(0.02):
                check()
        except Exception:
            state.ended += 1
            raise
        finally:
            state.running -= 1
        return done(self, task, check, *seconds)

    monkeypatch.setattr(workshop.Workshop, "_done", wait)
    unknown = uuid.uuid4()  # an object's id could return, and with it a grammar of an earlier test
    monkeypatch.setattr(workshop, "_name", lambda wanted: f"{unknown} {name(wanted)}")
    yield state
    state.free.set()


def test_plain_requests_do_not_wait_for_grammars(served: Any, service_of: Any, held: Held, wait_until: Any) -> None:
    service = service_of(constrained=1)
    with served(service) as client, ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(client.post, ROUTE, json=slow(number)) for number in range(3)]
        wait_until(lambda: held.running == 2 and service._long == 3)
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        assert all(client.post(ROUTE, json=PLAIN).status_code == 200 for _ in range(3))
        response = client.post(ROUTE, json=slow(5))
        assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
        held.free.set()
        assert [each.result(60).status_code for each in waiting] == [200] * 3
        wait_until(lambda: service._long == 0)
        service.limits = dataclasses.replace(service.limits, constrained=-2)  # what is known waits for nobody
        assert client.post(ROUTE, json=slow(2)).status_code == 200
        assert client.post(ROUTE, json=slow(3)).status_code == 429


def test_a_large_prompt_does_not_hold_up_small_ones(served: Any, service_of: Any, monkeypatch: Any) -> None:
    service, free, asked = service_of(prompt_tokens=100_000), threading.Event(), []
    read = type(service.tokenizer).__call__

    def slowly(self: Any, text: Any, *arguments: Any, **more: Any) -> Any:
        if isinstance(text, str) and len(text) > 30_000:
            asked.append(text)
            assert free.wait(60)
        return read(self, text, *arguments, **more)

    monkeypatch.setattr(type(service.tokenizer), "__call__", slowly)
    with served(service) as client, ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(client.post, ROUTE, json=PLAIN | {"prompt": "a" * 40_000}) for _ in range(6)]
        assert all(client.post(ROUTE, json=PLAIN).status_code == 200 for _ in range(3))
        assert len(asked) == 2
        free.set()
        assert [each.result(60).status_code for each in waiting] == [400] * 6


def test_prompts_that_are_too_long_are_not_tokenized(served: Any, service_of: Any, monkeypatch: Any) -> None:
    service, read = service_of(), []
    monkeypatch.setattr(type(service.tokenizer), "__call__", lambda self, text, **more: read.append(text))
    long = "a" * 4000
    with served(service) as client:
        for route, body in ((ROUTE, {"prompt": long}), (CHAT, {"messages": [{"role": "user", "content": long}]})):
            response = client.post(route, json=body)
            assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert not read


def test_a_deadline_counts_from_arrival(served: Any, service_of: Any, held: Held, wait_until: Any) -> None:
    with served(service_of()) as client:
        for number in range(4):
            response = client.post(ROUTE, json=slow(number, deadline=0.2))
            assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
        wait_until(lambda: not held.running)
        assert held.ended  # the others may not even have begun
        assert client.post(ROUTE, json=PLAIN).status_code == 200
        held.free.set()
        assert client.post(ROUTE, json=slow(7)).status_code == 200


def test_whoever_is_gone_is_not_compiled_for(
    served: Any, service_of: Any, held: Held, wait_until: Any, leave: Any
) -> None:
    service = service_of()
    with served(service) as client:
        for number in range(5):
            leave(client, ROUTE, slow(number), lambda: held.running == 1)
            wait_until(lambda: service._long == held.running == 0)
        assert held.ended == 5
        held.free.set()
        assert client.post(ROUTE, json=slow(6)).status_code == 200
        assert held.ended == 5 and service.pool.outstanding == 0
        assert 'outcome="cancelled"} 5.0' in client.get("/metrics").text


def test_texts_are_counted_before_prompts_are_read(served: Any, service_of: Any, monkeypatch: Any) -> None:
    service, read = service_of(queue=2, rows=2, choices=100), []
    tokenizer = service.tokenizer
    monkeypatch.setattr(type(tokenizer), "__call__", lambda self, text, **more: read.append(text))
    with served(service) as client:
        for body in ({"prompt": ["a"] * 101}, {"prompt": "a", "n": 5}):  # more than ever fit, however often it is tried
            response = client.post(ROUTE, json=PLAIN | body)
            assert response.status_code == 400 and response.json()["error"]["code"] == "too_many_choices"
    assert not read


def test_values_are_counted_before_a_body_is_parsed(client: Any) -> None:
    response = client.post(ROUTE, json={"prompt": "a", "metadata": {"a": [[]] * 30_000}})
    assert response.status_code == 400 and response.json()["error"]["code"] == "too_many_values"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [{}] * 1000}, "prompt.0: Input should be a valid string"),
        ({"prompt": ["a", *[1] * 1000]}, "prompt.1: Input should be a valid string"),
        ({"prompt": [[1], *["a"] * 1000]}, "prompt.1"),
        (
            {"prompt": "a", **{f"f{number}": 1 for number in range(1000)}},
            "an object has 1001 fields; the limit is 200",
        ),
        (
            {"prompt": "a", "stream_options": {f"f{n}": 1 for n in range(1000)}},
            "an object has 1000 fields; the limit is 200",
        ),
    ],
)
def test_a_body_is_given_up_at_its_first_mistake(body: dict[str, Any], words: str) -> None:
    from decoders.server.bodies import CompletionBody
    from decoders.server.refusals import Refusal, parsed

    with pytest.raises(Refusal, match=words) as caught:
        parsed(CompletionBody, json.dumps(body).encode())
    assert isinstance(caught.value.__cause__, ValidationError) and caught.value.__cause__.error_count() <= 4


def test_metrics_do_not_grow_with_the_ways_to_merge(client: Any) -> None:
    for strategy in ("prompt_lookup+ngram", "ngram+prompt_lookup"):
        assert client.post(ROUTE, json=PLAIN | {"strategy": strategy}).status_code == 200
    shown = client.get("/metrics").text
    assert 'decoders_generated_tokens_total{strategy="merged"} 4.0' in shown and "lookup+ngram" not in shown


def test_a_server_that_ends_waits_for_no_grammar(served: Any, service_of: Any, held: Held, wait_until: Any) -> None:
    with served(service_of(), grace=0.2) as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.post, ROUTE, json=slow())
        wait_until(lambda: held.running == 1)
        client.server.should_exit = True
        assert waiting.result(60).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_judged_in_threads_that_nobody_waits_for(client: Any, monkeypatch: Any, stream: bool) -> None:
    threads, judge = list[str](), Generation._judge

    def noted(self: Generation) -> None:
        if self._unjudged:
            threads.append(threading.current_thread().name)
        judge(self)

    monkeypatch.setattr(Generation, "_judge", noted)
    assert client.post(ROUTE, json=slow(3, stream=stream, max_tokens=9)).status_code == 200
    assert len(threads) == 1 and threads[0].startswith(("asyncio_", "uvloop_"))  # the event loop's own, by its kind
