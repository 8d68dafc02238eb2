"""Clients of several keys, or with several ``cache_salt``: none learns what another one sends."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders

pytest.importorskip("fastapi")

ROUTE = "/v1/completions"
SECRET = "the code of the door is 4711, tell nobody of it"
#: A strategy that keeps what earlier requests wrote.
LEARNING = {"strategy": "suffix"}


def cached(client: Any, key: str | None = None, **more: Any) -> int:
    """How many tokens of the secret prompt a request finds read already."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = client.post(ROUTE, json={"prompt": SECRET, "max_tokens": 4} | more, headers=headers)
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.parametrize("strategy", ["prompt_lookup", "suffix"])
def test_two_keys_share_no_prompts(served: Any, service_of: Any, strategy: str) -> None:
    with served(service_of(), keys=["one", "two"]) as client:
        assert cached(client, "one", strategy=strategy) == 0
        assert cached(client, "one", strategy=strategy) == len(SECRET) - 1
        assert cached(client, "two", strategy=strategy) == 0
        assert cached(client, "two", strategy=strategy) == len(SECRET) - 1
        assert cached(client, "one", strategy=strategy) == len(SECRET) - 1


def test_two_salts_share_no_prompts(served: Any, service_of: Any) -> None:
    with served(service_of()) as client:
        assert [cached(client), cached(client, cache_salt="a"), cached(client, cache_salt="b")] == [0, 0, 0]
        assert cached(client, cache_salt="a") == cached(client) == len(SECRET) - 1
        assert client.post(ROUTE, json={"prompt": "a", "cache_salt": ""}).status_code == 400


def test_nobody_shares_prompts_where_the_operator_says_so(served: Any, service_of: Any) -> None:
    with served(service_of(sharing=False)) as client:
        assert [cached(client), cached(client), cached(client, cache_salt="a")] == [0, 0, 0]


def test_what_a_strategy_learns_is_the_learners_own(
    served: Any, service_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that was written before is drafted whole; for whoever has not written it, it is not."""
    monkeypatch.setenv("DECODERS_PRUNE", "0")  # or it depends on what a step costs at the moment
    body = {"prompt": "xyz", "max_tokens": 60, "temperature": 1.0, "seed": 5} | LEARNING

    def accepted(client: Any, key: str) -> int:
        response = client.post(ROUTE, json=body, headers={"Authorization": f"Bearer {key}"})
        count: int = response.json()["usage"]["decoders"]["accepted"]
        return count

    with served(service_of(), keys=["one", "two"]) as client:
        first, again, other = accepted(client, "one"), accepted(client, "one"), accepted(client, "two")
        assert again > first and other == first
        assert accepted(client, "two") > other


def test_salts_are_kept_apart_in_one_batch(served: Any, service_of: Any) -> None:
    """Rows of several salts share steps where the strategy learns nothing from texts, and places of the pool all the same."""
    from concurrent.futures import ThreadPoolExecutor

    with served(service_of("prompt_lookup", rows=4), keys=["one", "two"]) as client:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda key: cached(client, key), ["one", "two"] * 8))
        assert cached(client, "one", prompt=SECRET[:10] + "other") in (0, 10)  # of its own texts, if at all
        for number in range(6):
            assert cached(client, "two", prompt=f"{number} {SECRET}") <= 1


def test_clients_take_turns_however_much_each_of_them_asks_for(service_of: Any) -> None:
    def submit(client: str, tokens: int = 2) -> Any:
        return service.pool.submit(None, None, [5, 6, 7], lambda _: None, client, max_new_tokens=tokens)

    service = service_of(rows=1)
    try:
        many = [submit("many", 150), *(submit("many") for _ in range(6))]
        several = [submit("several") for _ in range(3)]
        one = submit("one")
        for each in (*many, *several, one):
            each.result(60)
        begun = {each: each.submitted + each.waited for each in (*many, *several, one)}
        order = sorted(begun, key=begun.__getitem__)
        # Of each its first one, in the order in which they came, then its second, and so on.
        assert order[0] is many[0] and set(order[1:4]) == {many[1], several[0], one}
        assert set(order[4:6]) == {many[2], several[1]} and order[-3:] == many[4:]
        later = submit("many", 150), submit("many"), submit("new")
        for each in later:  # what was served counts no more
            each.result(60)
        assert later[0].waited < later[1].waited and later[2].waited is not None
    finally:
        service.close()


def test_a_corpus_is_drafted_from_for_all_clients(
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    write_alone: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: Any,
) -> None:
    from typer.testing import CliRunner

    from decoders.cli import app, models, serve

    written = tokenizer.decode(write_alone("one two", max_new_tokens=24, do_sample=False))
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"text": "one two" + written}) + "\n", encoding="utf-8")
    monkeypatch.setattr(models, "load", lambda *_: (copy.deepcopy(llama), tokenizer))
    # Steps of a scheduler go without drafts where clocks say that they do not pay.
    monkeypatch.setenv("DECODERS_PRUNE", "false")
    services = list[Any]()
    options = {
        "strategy": "suffix",
        "suffix-corpus": path,
        "slots": 400,
        "max-prompt-tokens": 300,
        "max-tokens": 200,
        "port": 0,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with monkeypatch.context() as patched:
        patched.setattr(
            "decoders.server.running.Server",
            lambda _, service, **options: SimpleNamespace(startup=None, run=lambda: services.append(service)),
        )
        patched.setattr(serve, "set_aside", lambda: None)
        patched.setattr(serve.signal, "signal", lambda *_: None)
        done = CliRunner().invoke(app, ["serve", "demo", "--no-compile", "--no-sharing", *arguments])
    assert done.exit_code == 0, done.output
    (service,) = services
    (kept,) = (kept for key, kept in decoders.memories(service.model).items() if key[0] == "")
    assert kept.texts == 1 and kept.index.tokens.tolist()[:-1] == tokenizer("one two" + written)["input_ids"]
    body = {"prompt": "one two", "max_tokens": 24, "temperature": 0}
    with served(service) as client:
        first, second = (client.post("/v1/completions", json=body | {"cache_salt": salt}).json() for salt in "ab")
    assert first["usage"]["decoders"]["steps"] == second["usage"]["decoders"]["steps"] < 24


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "x"}\n', "neither text nor JSON lines"), (b"", "there is no text in it"),
        (b"\xff" * 1000, "'utf-8' codec can't decode byte 0xff"),
    ],
)  # fmt: skip
def test_a_corpus_that_is_none_is_told_before_a_model_is_loaded(content: bytes, said: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from decoders.cli import app

    (tmp_path / "c.jsonl").write_bytes(content)
    done = CliRunner().invoke(app, ["serve", "no/model", "--suffix-corpus", str(tmp_path / "c.jsonl")])
    assert done.exit_code == 2 and said in " ".join(done.output.split()) and r"\xff\xff" not in done.output
