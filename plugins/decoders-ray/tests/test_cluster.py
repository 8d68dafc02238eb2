"""A local cluster of two replicas: streams, routing, one replica killed under load, and batches that are resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LONG = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that has a token for each byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers import decoders as token_decoders
    from transformers import PreTrainedTokenizerFast

    from decoders.testing.models import ARCHITECTURES, Architecture

    path = tmp_path_factory.mktemp("model")
    names = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = token_decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>").save_pretrained(path)
    design = Architecture("llama", dict(ARCHITECTURES["llama"].options) | {"vocab_size": 288})
    design(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """A function that returns the tokens that a call of ``generate`` for one prompt writes."""
    import torch
    from decoders_ray.serving import load

    import decoders

    model, tokenizer = load(str(folder))
    decoders.enable(model, tokenizer=tokenizer)

    def write(prompt: str, **arguments: Any) -> list[int]:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        out = model.generate(
            ids, strategy="autoregressive", pad_token_id=0, decoders_config={"compile": False}, **arguments
        )
        return out[0, ids.shape[1] :].tolist()

    return write


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(
        num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def front(cluster: None, folder: Path) -> Iterator[Any]:
    from decoders_ray import application
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = application(
        str(folder), rows=4, min_replicas=2, max_replicas=2, strategy="prompt_lookup", pad_token_id=0,
        decoders_config={"compile": False}, actor_options={"num_cpus": 0.5},
    )  # fmt: skip
    handle = serve.run(app, name="app", route_prefix="/")
    yield SimpleNamespace(handle=handle, address=f"http://127.0.0.1:{port}/")
    serve.shutdown()


def stream(front: Any, prompt: str, **arguments: Any) -> list[dict[str, Any]]:
    return list(front.handle.options(method_name="stream", stream=True).remote(prompt, **arguments))


def tokens_of(parts: list[dict[str, Any]]) -> list[int]:
    return [token for part in parts for token in part["tokens"]]


def figures() -> dict[int, dict[str, int]]:
    """The figures of both replicas, by process."""
    from ray import serve
    from ray.exceptions import RayActorError

    replicas, found, asked = serve.get_deployment_handle("replicas", "app"), {}, 0
    while len(found) < 2 and asked < 200:
        # A request without a prompt goes to any replica.
        asked += 1
        try:
            one = replicas.options(method_name="figures").remote().result(timeout_s=60)
        except RayActorError:  # a replica that was killed, which Serve has not noticed yet
            time.sleep(0.1)
            continue
        found[one["process"]] = one
    return found


def test_a_stream_has_the_tokens_and_the_text_of_a_call_of_its_own(front: Any, alone: Any) -> None:
    for arguments in ({"max_new_tokens": 40}, {"max_new_tokens": 40, "do_sample": True, "seed": 5, "top_k": 20}):
        parts = stream(front, "def add(a, b):", **arguments)
        assert tokens_of(parts) == alone("def add(a, b):", **arguments)
        assert len(parts) > 3 and parts[-1]["done"] and parts[-1]["attempts"] == 1


def post(front: Any, body: Any) -> tuple[int, bytes]:
    request = urllib.request.Request(front.address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_clients_ask_over_http(front: Any, alone: Any) -> None:
    expected = alone("for i in", max_new_tokens=12)
    status, answer = post(front, {"prompt": "for i in", "max_new_tokens": 12})
    assert status == 200 and json.loads(answer)["tokens"] == expected
    status, answer = post(front, {"prompt": "for i in", "max_new_tokens": 12, "stream": True})
    parts = [json.loads(line) for line in answer.decode().splitlines()]
    assert tokens_of(parts) == expected and parts[-1]["done"]
    for wrong in (
        {"max_new_tokens": 3},
        [1],
        {"prompt": 5},
        {"prompt": ["x"]},
        {"prompt": "x", "colour": 1},
        {"prompt": "x", "strategy": "nonsense"},
    ):
        status, answer = post(front, wrong)
        assert status == 400 and "error" in json.loads(answer), (wrong, answer)


def test_prompts_with_a_common_beginning_go_to_one_replica(front: Any) -> None:
    before = {process: one["requests"] for process, one in figures().items()}
    for n in range(8):
        stream(front, "You are a helpful assistant who answers in one word. " + str(n) * 20, max_new_tokens=2)
    more = sorted(one["requests"] - before[process] for process, one in figures().items())
    assert more == [0, 8]


def test_a_replica_that_is_killed_under_load_loses_and_repeats_nothing(front: Any, alone: Any) -> None:
    prompts = [f"{n} " * (3 + n % 5) for n in range(10)]
    arguments = [
        dict(max_new_tokens=LONG) | (dict(do_sample=True, seed=n, top_k=30) if n % 2 else {}) for n in range(10)
    ]
    written: dict[int, Any] = {}

    def ask(n: int) -> None:
        try:
            written[n] = stream(front, prompts[n], **arguments[n])
        except Exception as error:
            written[n] = error

    expected = [alone(prompt, **own) for prompt, own in zip(prompts, arguments, strict=True)]
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(10)]
    processes = set(figures())
    for thread in threads:
        thread.start()
    victim = None
    until = time.monotonic() + 60
    while victim is None and time.monotonic() < until:
        victim = next((process for process, one in figures().items() if one["running"] >= 2 and one["steps"] > 0), None)
    assert victim is not None
    time.sleep(0.2)  # the replica delivers some tokens
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=120)
    errors = {n: parts for n, parts in written.items() if isinstance(parts, Exception)}
    assert not errors and len(written) == 10, errors
    assert [tokens_of(written[n]) for n in range(10)] == expected
    ends = [written[n][-1] for n in range(10)]
    assert max(end["attempts"] for end in ends) >= 2, "nothing was running on the replica that was killed"
    assert sum(end["repeated"] for end in ends) > 0
    until = time.monotonic() + 90
    while time.monotonic() < until and len(set(figures()) - {victim}) < 2:
        time.sleep(0.5)
    assert len(set(figures()) - processes) == 1  # a new replica has replaced it


def workers(name: str) -> list[int]:
    """The processes of this test's cluster that run the class `name`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and name in (entry / "cmdline").read_text() and _is_ours(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _is_ours(process: int) -> bool:
    while process > 1:
        if process == os.getpid():
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_a_run_over_many_prompts_goes_on_where_it_was_and_survives_a_dead_actor(
    cluster: None, folder: Path, tmp_path: Path, alone: Any
) -> None:
    from decoders_ray import complete
    from decoders_ray.batches import written

    prompts = [
        {"id": f"p{n}", "prompt": f"{n} and {n}", "max_new_tokens": 20 + 30 * (n % 3)} | ({"seed": n} if n % 2 else {})
        for n in range(24)
    ]
    options = dict(
        model=str(folder), actors=2, batch=3, rows=3, actor_options={"num_cpus": 0.5}, pad_token_id=0,
        decoders_config={"compile": False},
    )  # fmt: skip
    first = complete([*prompts[:6], {"id": "wrong", "prompt": "x", "strategy": "nonsense"}], tmp_path, **options)
    assert first == {"prompts": 7, "earlier": 0, "written": 7, "failed": 1}
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("part-*")}
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not killed:
            if len(list(tmp_path.glob("part-*"))) > len(kept) and (running := workers("Completer")):
                os.kill(running[0], signal.SIGKILL)
                killed.append(running[0])
            time.sleep(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    second = complete(prompts, tmp_path, **options)
    killer.join()
    assert killed and second == {"prompts": 24, "earlier": 6, "written": 18, "failed": 0}
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
    texts = written(tmp_path)
    for prompt in prompts:
        arguments = {name: value for name, value in prompt.items() if name not in ("id", "prompt")}
        assert texts[prompt["id"]]["tokens"] == alone(prompt["prompt"], **arguments)
    lines = [line for path in tmp_path.glob("part-*") for line in path.read_text().splitlines()]
    assert len(lines) == 25 == len(texts)
    assert complete(prompts, tmp_path, **options)["written"] == 0
