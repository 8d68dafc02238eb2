"""Requests that take long to be prepared: the others do not wait for them, and whoever is gone or late costs no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")

ROUTE = "/v1/completions"
PLAIN = {"prompt": "a", "max_tokens": 2}


def slow(number: int = 0, **more: Any) -> dict[str, Any]:
    """A request whose grammar takes long."""
    return PLAIN | {"response_format": {"type": "regex", "regex": f"[ab]{{{number + 1}}}"}} | more


class Held:
    """Compiling that waits to be let go.

    Attributes:
        begun: how many have begun.
    """

    def __init__(self) -> None:
        self.begun, self.free = 0, threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    from decoders.constraints import compiling

    made, state = compiling._made, Held()

    def wait(*arguments: Any) -> Any:
        state.begun += 1
        assert state.free.wait(60)
        return made(*arguments)

    monkeypatch.setattr(compiling, "_made", wait)
    compiling.forget()
    yield state
    state.free.set()
    compiling.forget()


def test_plain_requests_do_not_wait_for_grammars(served: Any, service_of: Any, held: Held, wait_until: Any) -> None:
    service = service_of(constrained=1)
    with served(service) as client, ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(client.post, ROUTE, json=slow(number)) for number in range(3)]
        wait_until(lambda: held.begun == 2 and service._compiles == 3)
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        assert all(client.post(ROUTE, json=PLAIN).status_code == 200 for _ in range(3))
        response = client.post(ROUTE, json=slow(5))
        assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
        held.free.set()
        assert [each.result(60).status_code for each in waiting] == [200] * 3
        wait_until(lambda: service._compiles == 0)


def test_a_deadline_counts_from_arrival(served: Any, service_of: Any, held: Held, wait_until: Any) -> None:
    def late(number: int) -> None:
        response = client.post(ROUTE, json=slow(number, deadline=0.2))
        assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"

    with served(service_of()) as client, ThreadPoolExecutor(2) as threads:
        late(0)  # however far it has come
        waiting = [threads.submit(client.post, ROUTE, json=slow(number)) for number in (1, 2)]
        wait_until(lambda: held.begun == 2)  # that is all that are compiled at a time: the later ones do not even begin
        late(3), late(4)
        assert held.begun == 2
        assert client.post(ROUTE, json=PLAIN).status_code == 200
        held.free.set()
        assert [each.result(60).status_code for each in waiting] == [200] * 2
        assert client.post(ROUTE, json=slow(7)).status_code == 200


def test_whoever_is_gone_is_not_compiled_for(
    served: Any, service_of: Any, held: Held, wait_until: Any, leave: Any
) -> None:
    service = service_of()
    with served(service) as client:
        for number in range(5):
            leave(client, ROUTE, slow(number), lambda n=number: service._compiles and held.begun == min(n + 1, 2))
            wait_until(lambda: service._compiles == 0)
        assert held.begun == 2
        held.free.set()
        assert client.post(ROUTE, json=slow(6)).status_code == 200
        assert held.begun == 3 and service.pool.outstanding == 0
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


def test_metrics_do_not_grow_with_the_ways_to_merge(service_of: Any) -> None:
    from decoders.server.metrics import NAMED, Metrics

    metrics: Metrics = service_of().metrics
    names = {metrics._name(f"strategy_{number % 100}") for number in range(300)}
    assert len(names) == NAMED + 1 and "other" in names


def test_a_server_that_ends_waits_for_no_grammar(served: Any, service_of: Any, held: Held, wait_until: Any) -> None:
    with served(service_of(), grace=0.2) as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.post, ROUTE, json=slow())
        wait_until(lambda: held.begun == 1)
        client.server.should_exit = True
        assert waiting.result(60).status_code == 503
