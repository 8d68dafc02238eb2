"""``/v1/completions`` writes what ``generate`` writes, whole or in pieces."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import jsonschema
import pytest

pytest.importorskip("fastapi")

PROMPT = "one two one two one"
ROUTE = "/v1/completions"


def post(client: Any, **body: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json={"prompt": PROMPT, "max_tokens": 20, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_greedy_text_is_that_of_generate(
    client: Any, tokenizer: Any, write_alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODERS_PRUNE", "0")  # by the clock nothing may be drafted
    answer = post(client)
    expected = write_alone(PROMPT, max_new_tokens=20)
    assert answer["choices"][0] == {
        "index": 0, "text": tokenizer.decode(expected, skip_special_tokens=True), "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        len(PROMPT),
        20,
        len(PROMPT) + 20,
    )
    own = usage["decoders"]
    assert own["strategy"] == "prompt_lookup"
    assert sum((n + 1) * count for n, count in enumerate(own["accepted_lengths"])) == 20
    details = {"reasoning_tokens": 0, "accepted_prediction_tokens": own["accepted"]}
    details["rejected_prediction_tokens"] = own["drafted"] - own["accepted"]
    assert usage["completion_tokens_details"] == details
    figures, steps = answer["metrics"]["speculative_decoding"], own["steps"]  # as vLLM has them
    assert figures["acceptance_histogram"] == own["accepted_lengths"] and figures["num_spec_steps"] == steps
    assert figures["num_draft_tokens"] == own["drafted"] and figures["num_accepted_draft_tokens"] == 20 - steps
    assert figures["mean_acceptance_length"] == pytest.approx(20 / steps)
    assert figures["draft_acceptance_rate"] == pytest.approx((20 - steps) / own["drafted"])
    assert "metrics" not in post(client, strategy="autoregressive") and "metrics" not in post(client, n=2)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup+ngram"])
def test_same_seed_same_text_under_every_strategy(client: Any, tokenizer: Any, write_alone: Any, strategy: str) -> None:
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 5}
    answer = post(client, strategy=strategy, n=2, **sampled)
    for index, choice in enumerate(answer["choices"]):
        expected = write_alone(PROMPT, max_new_tokens=20, do_sample=True, **sampled | {"seed": 5 + index})
        assert choice["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["usage"]["decoders"]["seeds"] == [5, 6]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 9e-6])
def test_a_very_small_temperature_is_greedy(client: Any, temperature: float) -> None:
    def text(temperature: float, **more: Any) -> str:
        body = {"prompt": "def add(a, b):", "max_tokens": 5, "temperature": temperature, "seed": 1} | more
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    assert text(temperature) == text(0)
    assert text(temperature, presence_penalty=0.1) == text(0, presence_penalty=0.1)


def test_a_seed_that_was_drawn_is_told(client: Any) -> None:
    answer = post(client, temperature=1.5)
    (seed,) = answer["usage"]["decoders"]["seeds"]
    assert post(client, temperature=1.5, seed=seed)["choices"] == answer["choices"]


def test_a_stream_is_the_whole_text_in_pieces(client: Any, stream: Any) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 1.2, "seed": 3, "n": 2}
    whole = client.post(ROUTE, json=body).json()
    chunks = stream(client, ROUTE, **body, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["choices"][index]["text"]
        assert [part["finish_reason"] for part in parts][:-1] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
    assert (
        chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    )
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_stream_says_which_tokens_were_drafted(client: Any, stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_PRUNE", "0")  # or it depends on what a step costs at the moment
    body: dict[str, Any] = {"prompt": "abcabcabcabc", "max_tokens": 80, "strategy": "suffix"}
    whole = client.post(ROUTE, json=body).json()
    chunks = stream(client, ROUTE, **body, drafted=True, stream_options={"include_usage": True})
    spans = [span for chunk in chunks for c in chunk["choices"] for span in c["decoders"]["tokens"]]
    assert "".join(span["text"] for span in spans) == whole["choices"][0]["text"]
    own = chunks[-1]["usage"]["decoders"]
    assert own["accepted"] > 0
    # A character of several tokens is one span.
    assert 0 < sum(span["drafted"] for span in spans) <= own["accepted"]
    assert "decoders" not in whole["choices"][0]


def test_text_ends_before_the_first_stop_string(client: Any, stream: Any) -> None:
    whole = post(client, max_tokens=60)["choices"][0]["text"]
    assert len(whole) > 12
    stop = whole[7:9]
    expected = whole[: whole.find(stop)]
    answer = post(client, max_tokens=60, stop=[stop, "never there"])
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (expected, "stop")
    assert answer["usage"]["completion_tokens"] < 60
    chunks = stream(client, ROUTE, prompt=PROMPT, max_tokens=60, stop=stop)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_are_the_models_own(client: Any, tokenizer: Any, llama: Any, stream: Any) -> None:
    answer = post(client, logprobs=3, temperature=0.5, seed=1)
    given = answer["choices"][0]["logprobs"]
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert len(given["tokens"]) == answer["usage"]["completion_tokens"]
    first = llama(ids).logits[0, -1].log_softmax(-1)
    best = first.topk(3)
    assert list(given["top_logprobs"][0].values())[:3] == pytest.approx(best.values.tolist(), abs=1e-3)
    for token, value, likeliest in zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True):
        assert likeliest[token] == value and len(likeliest) <= 4
    offsets, text = given["text_offset"], answer["choices"][0]["text"]
    for offset, token in zip(offsets, given["tokens"], strict=True):
        assert token.startswith("bytes:") or token in (*tokenizer.all_special_tokens, "") or token in text[offset:]
    chunks = stream(client, ROUTE, prompt=PROMPT, max_tokens=20, logprobs=3, temperature=0.5, seed=1)
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
    assert [token for part in parts for token in part["tokens"]] == given["tokens"]
    assert [o for part in parts for o in part["text_offset"]] == offsets
    assert [v for part in parts for v in part["token_logprobs"]] == pytest.approx(given["token_logprobs"], abs=1e-3)


def test_tokens_that_cut_a_character_are_named_by_their_bytes(client: Any) -> None:
    emoji = {"type": "choice", "choices": ["😀a😁"]}
    given = post(client, logprobs=5, response_format=emoji)["choices"][0]["logprobs"]
    smile = [rf"bytes:\x{byte:02x}" for byte in "😀".encode()]
    assert given["tokens"][:5] == [*smile, "a"] and given["text_offset"] == [0, 0, 0, 0, 1, 2, 2, 2, 2]
    for token, likeliest in zip(given["tokens"], given["top_logprobs"], strict=True):
        assert token in likeliest and 3 < len(likeliest) <= 6


def test_log_probabilities_end_where_the_text_is_stopped(client: Any, stream: Any) -> None:
    body: dict[str, Any] = {
        "stop": "3😀",
        "logprobs": 0,
        "response_format": {"type": "choice", "choices": ["é123😀45"]},
    }
    choice = post(client, **body)["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"][2:]) == ("é12", ["1", "2"])
    parts = [c for chunk in stream(client, ROUTE, prompt=PROMPT, **body) for c in chunk["choices"]]
    assert [token for part in parts for token in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_penalties_are_those_of_openai(client: Any, llama: Any, tokenizer: Any) -> None:
    import torch

    bias = {str(tokenizer("e").input_ids[0]): 2.5}
    answer = post(client, temperature=0, frequency_penalty=1.5, presence_penalty=0.5, logit_bias=bias)
    ids = tokenizer(PROMPT).input_ids
    written: list[int] = []
    for _ in range(20):
        scores = llama(torch.tensor([ids + written])).logits[0, -1]
        for token, count in Counter(written).items():
            scores[token] -= 1.5 * count + 0.5
        for token, value in bias.items():
            scores[int(token)] += value
        written.append(int(scores.argmax()))
    assert answer["choices"][0]["text"] == tokenizer.decode(written, skip_special_tokens=True)


def test_prompts_are_texts_or_tokens_one_or_several(client: Any, tokenizer: Any) -> None:
    one, two = post(client)["choices"][0]["text"], post(client, prompt="xyz")["choices"][0]["text"]
    ids = [tokenizer(text).input_ids for text in (PROMPT, "xyz")]
    for prompt in ([PROMPT, "xyz"], ids):
        choices = post(client, prompt=prompt)["choices"]
        assert [(c["index"], c["text"]) for c in choices] == [(0, one), (1, two)]
    assert post(client, prompt=ids[1])["choices"][0]["text"] == two


def test_a_prompt_is_echoed_as_it_was_given(client: Any, stream: Any, tokenizer: Any) -> None:
    prompts = ["a</s>b", " c  ,"]
    for given in (prompts, [tokenizer(prompt).input_ids for prompt in prompts]):
        body = {"prompt": given, "n": 2, "echo": True, "max_tokens": 2}
        chunks = stream(client, ROUTE, **body)
        for index, choice in enumerate(post(client, **body)["choices"]):
            assert choice["text"].startswith(prompts[index // 2])
            parts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(parts) == choice["text"] and parts[0] == prompts[index // 2]


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strategy", ["autoregressive", "grammar+prompt_lookup"])
def test_a_schema_is_kept(client: Any, stream: Any, strategy: str) -> None:
    body = {
        "strategy": strategy, "temperature": 1.0, "seed": 2, "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    answer = post(client, **body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["choices"][0]["text"]), SCHEMA)
    chunks = stream(client, ROUTE, prompt=PROMPT, **body)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == answer["choices"][0]["text"]


@pytest.mark.parametrize(
    "format, pattern",
    [
        ({"type": "regex", "regex": "[ab]{3}x"}, r"[ab]{3}x"),
        ({"type": "choice", "choices": ["yes", "no"]}, r"yes|no"),
        ({"type": "grammar", "grammar": 'start: "<" /[0-9]{2}/ ">"'}, r"<\d\d>"),
        ({"type": "grammar", "name": "uuid"}, r"[0-9a-fA-F-]{36}"),
        ({"type": "text"}, r"(?s).*"),
    ],
)
def test_text_follows_its_format(client: Any, format: dict[str, Any], pattern: str) -> None:
    text = post(client, max_tokens=80, temperature=1, seed=4, response_format=format)["choices"][0]["text"]
    assert re.fullmatch(pattern, text)
