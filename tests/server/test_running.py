"""A server among its clients: those that leave, come too often, wait too long, and the signal that ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")

ROUTE = "/v1/completions"
#: A request that does not end by itself within a test.
LONG = {"prompt": "one two", "max_tokens": 200, "temperature": 1.0, "seed": 1, "logit_bias": {"1": -100}}


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take 50 ms."""
    from decoders.engine.decode.lane import Lane

    advance = Lane.advance

    def slow(self: Lane, pause: float) -> Any:
        time.sleep(0.05)
        return advance(self, pause)

    monkeypatch.setattr(Lane, "advance", slow)


def in_thread(function: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def begun(response: Any) -> Any:
    """The lines of a stream behind the first; a client that lets go of them closes the connection."""
    lines = response.iter_lines()
    next(lines)
    return lines


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_rows(
    served: Any, service_of: Any, wait_until: Any, leave: Any, caplog: Any, streamed: bool
) -> None:
    import gc

    service = service_of(rows=2)
    with served(service) as client:
        if streamed:
            with client.stream("POST", ROUTE, json=LONG | {"stream": True, "n": 2}) as response:
                lines = begun(response)
                wait_until(lambda: service.pool.running == 2)
                assert next(lines) is not None
        else:
            leave(client, ROUTE, LONG | {"n": 2}, lambda: service.pool.running == 2)
        wait_until(lambda: service.pool.running == service.pool.outstanding == 0)
        counts = client.get("/metrics").text
        assert 'decoders_requests_total{endpoint="completions",outcome="cancelled"} 1.0' in counts
        assert client.post(ROUTE, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.usefixtures("slowed")
def test_a_full_queue_says_when_to_come_again(served: Any, service_of: Any, wait_until: Any) -> None:
    service = service_of(rows=1, queue=1)
    with served(service) as client:
        with client.stream("POST", ROUTE, json=LONG | {"stream": True}) as running:
            lines = begun(running)
            waiting, _ = in_thread(lambda: client.post(ROUTE, json=LONG | {"max_tokens": 1}))
            wait_until(lambda: service.pool.waiting == 1)
            response = client.post(ROUTE, json=LONG)
            assert response.status_code == 429 and response.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            health = client.get("/health").json()
            assert (health["waiting"], health["running"]) == (1, 1)
            several = client.post(ROUTE, json=LONG | {"n": 2})  # all of a request or nothing of it
            assert several.status_code == 429 and service.pool.outstanding == 2
            # Of its two texts one was in the queue for a moment; its prompt was never read.
            assert "decoders_prompt_tokens_total 0.0" in client.get("/metrics").text
            assert next(lines) is not None
        waiting.join(30)


@pytest.mark.usefixtures("slowed")
def test_a_deadline_ends_a_request(served: Any, service_of: Any) -> None:
    with served(service_of(deadline=0.3)) as client:
        response = client.post(ROUTE, json=LONG)
        assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
        assert client.post(ROUTE, json=LONG | {"deadline": 0.1}).status_code == 504
        # A deadline that passes while the request is prepared is named, not the limit of preparing.
        assert "1e-06 s" in client.post(ROUTE, json=LONG | {"deadline": 1e-6}).json()["error"]["message"]
        with client.stream("POST", ROUTE, json=LONG | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_strategies_have_schedulers_of_their_own_and_resting_ones_are_closed(
    served: Any, service_of: Any, wait_until: Any
) -> None:
    service = service_of(schedulers=2)
    with served(service) as client:
        for strategy in ("prompt_lookup", "ngram", "prompt-lookup"):
            body = {"prompt": "abab", "max_tokens": 4, "strategy": strategy}
            assert client.post(ROUTE, json=body).status_code == 200
            wait_until(lambda: service.pool.outstanding == 0)
        assert service.pool.strategies == ["ngram", "prompt_lookup"]
        config = {"strategy": "prompt_lookup", "strategy_config": {"max_ngram": 2}}
        assert client.post(ROUTE, json={"prompt": "abab", "max_tokens": 4, **config}).status_code == 200
        assert service.pool.strategies == ["prompt_lookup", "prompt_lookup"]


@pytest.mark.usefixtures("slowed")
def test_strategies_that_are_all_busy_are_not_closed(served: Any, service_of: Any) -> None:
    with (
        served(service_of(schedulers=1)) as client,
        client.stream("POST", ROUTE, json=LONG | {"stream": True, "strategy": "prompt_lookup"}) as stream,
    ):
        lines = begun(stream)
        for config in ({"strategy": "ngram"}, {"strategy": "prompt_lookup", "strategy_config": {"max_ngram": 4}}):
            response = client.post(ROUTE, json={"prompt": "a", "max_tokens": 2} | config)
            assert response.status_code == 429 and "prompt_lookup" in response.json()["error"]["message"]
        assert client.post(ROUTE, json={"prompt": "a", "max_tokens": 2}).status_code == 200  # the default has its own
        assert next(lines) is not None


@pytest.mark.usefixtures("slowed")
def test_what_runs_is_finished_and_nothing_new_is_taken(served: Any, service_of: Any, wait_until: Any) -> None:
    import httpx

    service = service_of()
    with served(service, grace=20.0) as client:
        thread, results = in_thread(lambda: client.post(ROUTE, json=LONG | {"max_tokens": 20}))
        wait_until(lambda: service.pool.running == 1)
        client.server.should_exit = True
        wait_until(lambda: service.draining)
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{client.base_url}{ROUTE}", json=LONG, trust_env=False)
        thread.join(30)
        assert results[0].status_code == 200 and results[0].json()["usage"]["completion_tokens"] == 20


@pytest.mark.usefixtures("slowed")
def test_what_is_not_finished_in_time_is_cancelled_and_told_so(served: Any, service_of: Any, wait_until: Any) -> None:
    service = service_of()
    with served(service, grace=0.2) as client:
        thread, results = in_thread(lambda: client.post(ROUTE, json=LONG))
        with client.stream("POST", ROUTE, json=LONG | {"stream": True}) as stream:
            wait_until(lambda: service.pool.running == 2)
            client.server.should_exit = True
            lines = [line for line in stream.iter_lines() if line]
        thread.join(30)
    assert results[0].status_code == 503 and "shutting down" in results[0].json()["error"]["message"]
    assert "shutting down" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]


@pytest.mark.usefixtures("slowed")
def test_a_second_ctrl_c_ends_requests_with_an_error(served: Any, service_of: Any, wait_until: Any, capfd: Any) -> None:
    service = service_of()
    with served(service, grace=50.0) as client:
        thread, results = in_thread(lambda: client.post(ROUTE, json=LONG))
        wait_until(lambda: service.pool.running == 1)
        client.server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: service.draining)
        client.server.handle_exit(signal.SIGINT, None)
        thread.join(30)
        assert not client.server.force_exit
    assert results[0].status_code == 503 and "shutting down" in results[0].json()["error"]["message"]
    shown = capfd.readouterr().err
    assert "running requests have 50 seconds to finish; Ctrl-C ends them now" in shown and "Traceback" not in shown


def test_metrics_count_what_happened(served: Any, service_of: Any, wait_until: Any) -> None:
    service = service_of("prompt_lookup")
    with served(service) as client:
        usage = client.post(ROUTE, json={"prompt": "abcabcabc", "max_tokens": 30}).json()["usage"]
        client.post(ROUTE, json={"prompt": "a", "max_token": 3})
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 3})
        wait_until(lambda: service.pool.outstanding == 0)
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {name: float(value) for name, value in re.findall(r"^(\w[^\s#]*) (\S+)$", response.text, re.MULTILINE)}
    assert found['decoders_requests_total{endpoint="completions",outcome="completed"}'] == 1
    assert found['decoders_requests_total{endpoint="completions",outcome="refused"}'] == 1
    assert found['decoders_requests_total{endpoint="chat/completions",outcome="completed"}'] == 1
    assert found['decoders_generated_tokens_total{strategy="prompt_lookup"}'] == 33
    accepted = found['decoders_accepted_tokens_total{strategy="prompt_lookup"}']
    assert accepted >= usage["decoders"]["accepted"]
    assert accepted + found['decoders_row_steps_total{strategy="prompt_lookup"}'] >= 33 - 2
    spec = {
        name: found[f'vllm:spec_decode_num_{name}_total{{model_name="tiny"}}']
        for name in ("draft_tokens", "accepted_tokens")
    }
    assert (
        spec["draft_tokens"] == found['decoders_draft_tokens_total{strategy="prompt_lookup"}']
        and spec["accepted_tokens"] == accepted
    )
    positions = [
        value for name, value in found.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
    ]
    assert accepted - 2 <= sum(positions) <= accepted and positions == sorted(positions, reverse=True)
    assert found["decoders_time_to_first_token_seconds_count"] == 2
    assert found["decoders_time_between_tokens_seconds_count"] > 0
    assert found["decoders_queue_length"] == found["decoders_rows_in_use"] == 0
    assert found["decoders_tokens_per_second"] == pytest.approx(3.3)


def test_the_event_loop_is_not_held_up_by_long_preparation(served: Any, service_of: Any, monkeypatch: Any) -> None:
    service = service_of()
    start, entered, go_on = service.start, threading.Event(), threading.Event()

    def held(*arguments: Any, **more: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        return start(*arguments, **more)

    monkeypatch.setattr(service, "start", held)
    with served(service) as client:
        thread, results = in_thread(lambda: client.post(ROUTE, json={"prompt": "a", "max_tokens": 2}))
        assert entered.wait(30)
        assert client.get("/health").status_code == 200 and not results
        go_on.set()
        thread.join(30)
        assert results[0].status_code == 200


def test_an_address_that_cannot_be_had_is_told_before_a_model_is_loaded() -> None:
    from typer.testing import CliRunner

    from decoders.cli import app

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        taken = CliRunner().invoke(app, ["serve", "no/model", "--port", port])
    assert taken.exit_code == 2, taken.output
    assert f"cannot listen at 127.0.0.1, port {port}" in taken.stderr and "--port 0 takes a free port" in taken.stderr
    unknown = CliRunner().invoke(app, ["serve", "no/model", "--host", "a" * 70, "--port", "0"])
    assert unknown.exit_code == 2 and "cannot listen at aaa" in unknown.stderr


@pytest.mark.slow
def test_sigterm_ends_the_command_in_peace() -> None:
    command = [sys.executable, "-m", "decoders", "serve", "demo", "--port", "0", "--no-compile", "--grace", "20"]
    environment = {**os.environ, "DECODERS_API_KEY": "key"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        import httpx

        assert process.stderr is not None
        line = next(line for line in process.stderr if "http://" in line)
        address = line.split(" at ")[1].split("/v1")[0]
        headers = {"Authorization": "Bearer key"}
        body = {"prompt": "def add(a, b):", "max_tokens": 300, "stream": True, "logit_bias": {"0": -100}}
        with httpx.stream(
            "POST", f"{address}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60
        ) as response:
            assert response.status_code == 200
            lines = iter(response.iter_lines())
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("level", ["info", "warning"])
def test_a_line_in_the_log_says_what_became_of_a_request(served: Any, service_of: Any, capfd: Any, level: str) -> None:
    with served(service_of(), log_level=level) as client:
        client.post(ROUTE, json={"prompt": "abc", "max_tokens": 4})
        client.post(ROUTE, json={"prompt": "a", "n": 2, "max_tokens": 3, "stream": True})
        client.post(ROUTE, json={"prompt": ""})
        client.get("/he%0Aalth")
    lines = [line for line in capfd.readouterr().err.splitlines() if " tokens, " in line]
    told = [re.sub(r"\x1b\[\d+m|^INFO:\s+|, [\d.]+ s$", "", line) for line in lines]
    wanted = [
        "POST /v1/completions 200, 3 + 4 tokens", "POST /v1/completions 200, 1 + 6 tokens",
        "POST /v1/completions 400, 0 + 0 tokens", "GET /he%0Aalth 404, 0 + 0 tokens",
    ]  # fmt: skip
    assert told == (wanted if level == "info" else [])
