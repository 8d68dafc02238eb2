"""Many clients at once, some of whom leave, send rubbish or too much: nobody's answer is lost or somebody else's."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")

ROUTE = "/v1/completions"
STRATEGIES = ("autoregressive", "prompt_lookup", "ngram")


class Crowd:
    """What clients ask for, and what they were told.

    Attributes:
        alone: answers to those who asked by themselves.
    """

    def __init__(self, client: Any, kinds: int) -> None:
        self.client = client
        self.bodies = [
            {
                "prompt": "abc"[kind % 3] * (kind % 5 + 1) + "xy", "max_tokens": 5 + kind * 7 % 30, "temperature": kind % 3 / 2,
                "seed": kind, "strategy": STRATEGIES[kind % 3],
            }
            for kind in range(kinds)
        ]  # fmt: skip
        self.alone = [client.post(ROUTE, json=body).json()["choices"] for body in self.bodies]

    def ask(self, number: int) -> str:
        """One request; says what it was, or raises."""
        chance = random.Random(number)
        kind = chance.randrange(len(self.bodies))
        body, what = dict(self.bodies[kind]), chance.random()
        if what < 0.5:
            response = self.retried(body)
            assert response.json()["choices"] == self.alone[kind]
            return "whole"
        if what < 0.7:
            return self.streamed(body, kind, leave=False)
        if what < 0.85:
            return self.streamed(body | {"max_tokens": 150}, kind, leave=True)
        if what < 0.93:
            rubbish = [b"{", b'{"prompt": 1}', b'{"prompt": "a", "max_tokn": 1}', b"\xff"][number % 4]
            response = self.client.post(ROUTE, content=rubbish, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            return "malformed"
        assert self.client.post(ROUTE, json=body | {"prompt": "a" * 5000}).status_code == 400
        return "oversized"

    def retried(self, body: dict[str, Any]) -> Any:
        while True:
            response = self.client.post(ROUTE, json=body)
            if response.status_code != 429:
                assert response.status_code == 200, response.text
                return response
            assert "retry-after" in response.headers

    def streamed(self, body: dict[str, Any], kind: int, leave: bool) -> str:
        while True:
            text, reason = "", None
            with self.client.stream("POST", ROUTE, json=body | {"stream": True}) as response:
                if response.status_code == 429:
                    continue
                for line in response.iter_lines():
                    if leave and line:
                        return "left"
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
            assert [text, reason] == [self.alone[kind][0][name] for name in ("text", "finish_reason")]
            return "streamed"


def crowd(served: Any, service_of: Any, wait_until: Any, requests: int, clients: int) -> None:
    service = service_of(rows=4, queue=24)
    with served(service) as client:
        people = Crowd(client, 9)
        with ThreadPoolExecutor(clients) as pool:
            told = list(pool.map(people.ask, range(requests)))
        assert len(told) == requests and set(told) == {"whole", "streamed", "left", "malformed", "oversized"}
        wait_until(lambda: service.pool.outstanding == service.pool.running == service.pool.waiting == 0, 10)
        assert people.retried(people.bodies[0]).json()["choices"] == people.alone[0]
        assert 'outcome="failed"' not in client.get("/metrics").text


def test_a_crowd_is_served(served: Any, service_of: Any, wait_until: Any) -> None:
    crowd(served, service_of, wait_until, requests=40, clients=12)


@pytest.mark.slow
def test_a_large_crowd_is_served(served: Any, service_of: Any, wait_until: Any) -> None:
    crowd(served, service_of, wait_until, requests=3000, clients=64)
