"""Servers in a thread, on a tiny model with a chat template and on the demo model, and clients of them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.testing.models import ARCHITECTURES, Architecture

EAGER = {"compile": False}
SIZE = 288
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</call>'
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """A token for each byte, and an end."""
    fast = byte_tokenizer(["<pad>", "</s>", "<unk>"], unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def llama(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    design = Architecture("llama", MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": SIZE}))
    return decoders.enable(design(0), tokenizer=tokenizer)


@contextmanager
def running(service: Any, **options: Any) -> Iterator[Any]:
    """A server of `service` in a thread; ended afterwards."""
    from decoders.server.app import make_app
    from decoders.server.running import Server

    app = make_app(service, options.pop("keys", ()), options.pop("hosts", None))
    server = Server(app, service, port=0, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def until(true: Callable[[], Any], seconds: float = 60) -> None:
    """Waits until it is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    return until


@pytest.fixture(scope="session")
def leave() -> Callable[..., None]:
    """Sends a request, and leaves without the answer once something is true."""

    def send(client: Any, route: str, body: dict[str, Any], once: Callable[[], Any]) -> None:
        content = json.dumps(body).encode()
        head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(client.server.bound, timeout=60) as connection:
            connection.sendall(head.encode() + content)
            until(once)

    return send


@pytest.fixture(scope="session")
def served() -> Any:
    """Runs a service; a context manager that gives a client of httpx."""
    httpx = pytest.importorskip("httpx")

    @contextmanager
    def client_of(service: Any, **options: Any) -> Iterator[Any]:
        with running(service, **options) as server:
            host, port = server.bound
            # verify: the certificates of all authorities, which it would read each time, are for https.
            with httpx.Client(base_url=f"http://{host}:{port}", timeout=60, trust_env=False, verify=False) as client:
                client.server = server
                yield client

    return client_of


@pytest.fixture(scope="session")
def service_of(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """A service around the tiny model."""
    pytest.importorskip("prometheus_client")
    from decoders.server.limits import Limits
    from decoders.server.service import Service

    def make(strategy: str = "autoregressive", **options: Any) -> Any:
        names = Limits.__dataclass_fields__.keys() & options.keys()
        limits = Limits(**{"slots": 400, "prompt_tokens": 300, "new_tokens": 200} | {n: options.pop(n) for n in names})
        own = options.pop("tokenizer", tokenizer)
        return Service(llama, own, name="tiny", strategy=strategy, limits=limits, config=EAGER, **options)

    return make


@pytest.fixture(scope="module")
def client(served: Any, service_of: Any) -> Iterator[Any]:
    """A client of a server of the tiny model, with ``client.service``."""
    service = service_of("prompt_lookup")
    with served(service) as client:
        client.service = service
        yield client


@pytest.fixture(scope="session")
def write_alone(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Callable[..., list[int]]:
    """What a call of ``generate`` writes after a text."""

    def write(text: str, **arguments: Any) -> list[int]:
        ids = torch.tensor([tokenizer(text).input_ids])
        arguments = {
            "strategy": "autoregressive",
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoders_config": EAGER,
        } | arguments
        return llama.generate(ids, **arguments)[0, ids.shape[1] :].tolist()

    return write


def events_of(response: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; it must end as streams do."""
    blocks = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


@pytest.fixture(scope="session")
def stream() -> Callable[..., list[dict[str, Any]]]:
    """The chunks of a streamed answer."""

    def chunks(client: Any, route: str, **body: Any) -> list[dict[str, Any]]:
        with client.stream("POST", route, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            return events_of(response)

    return chunks


@pytest.fixture(autouse=True)
def pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are cut as they are for users."""
    monkeypatch.delenv("DECODERS_PRUNE")
