"""Whole calls on a device that is pretended: nothing mixes its tensors with the host's, and the tokens are those of the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import decoders
from decoders.demo import load
from decoders.engine.decode import engine
from decoders.engine.model import self_check
from decoders.strategies import DFlash, Eagle3
from decoders.testing import ARCHITECTURES, RECURRENT, tiny_draft, tiny_model

from ..strategies import test_block_heads, test_dflash, test_eagle3
from ..tape_recorder import TapeRecorder
from ..turns import slow_but
from .pretended_cuda import MixedDevicesError, OnDevice, moved, pretended_cuda

IDS = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4], [0, 0, 7, 8, 9, 7, 8, 9]])
MASK = torch.tensor([[1] * 8, [0] * 2 + [1] * 6])
GREEDY: dict[str, Any] = dict(do_sample=False)
DRAWN: dict[str, Any] = dict(do_sample=True, seed=3, temperature=0.8, top_p=0.9)
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}), ("prompt_lookup", {}), ("suffix", {}), ("auto", {}), ("lookahead", {}), ("ngram", {}),
    ("token_recycling", {}), ("prompt_lookup+suffix", {}), ("suffix+token_recycling", {}), ("early_exit", {}),
    ("speculative", {}), ("speculative", {"tree": "dynamic"}), ("speculative", {"tree": "static"}), ("threshold", {}),
    ("threshold", {"rule": "calibrated"}), ("staged", {}), ("prompt_lookup+speculative", {}),
    ("auto", {"candidates": ["suffix", "speculative"]}),
]  # fmt: skip
#: Kernels have tests of their own, which interpret them; nothing is remembered from the strategy before.
CONFIG = {"compile": False, "attention": "sdpa", "memory": False}
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[TapeRecorder]:
    """From here on there is a CUDA device, which records."""
    recorder = TapeRecorder()
    monkeypatch.setattr(engine, "recorder_of", lambda device: recorder)
    with pretended_cuda():
        yield recorder


def on(device: bool) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    model, draft = tiny_model("llama"), tiny_draft("llama")
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    if device:
        return moved(model), moved(draft), {name: OnDevice(value) for name, value in inputs.items()}
    return model, draft, inputs


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    model, _, inputs = on(device=False)
    decoders.enable(model)
    options = dict(max_new_tokens=12, pad_token_id=0, strategy="autoregressive", decoders_config=CONFIG)
    return [model.generate(**inputs, **options, **more).tolist() for more in (GREEDY, DRAWN)]


def test_a_function_of_tensors_of_both_devices_is_refused_as_on_cuda() -> None:
    with pretended_cuda():
        ours = torch.ones(2, device="cuda")
        assert ours.device.type == "cuda" and (ours + 1).sum().item() == 4 and ours.to("cpu").device.type == "cpu"
        assert (ours + torch.tensor(1)).tolist() == [2, 2]  # single numbers may be the host's
        with pytest.raises(MixedDevicesError):
            ours + torch.ones(2)
        with pytest.raises(MixedDevicesError):
            ours[torch.tensor([0])]


@pytest.mark.parametrize(
    ("strategy", "config"),
    slow_but([("prompt_lookup", {}), ("speculative", {"tree": "dynamic"})], STRATEGIES),  # .ci/run runs all
    ids=lambda value: str(value or ""),
)
def test_strategies_write_the_tokens_of_the_cpu(
    cuda: TapeRecorder, expected: Any, strategy: str, config: dict[str, Any]
) -> None:
    model, draft, inputs = on(device=True)
    decoders.enable(model)
    if {"speculative", "threshold", "staged"} & {*strategy.split("+"), *config.get("candidates", ())}:
        inputs["assistant_model"] = draft
    for tokens, more in zip(expected, (GREEDY, DRAWN), strict=True):
        out = model.generate(
            **inputs, max_new_tokens=12, pad_token_id=0, strategy=strategy, strategy_config=config or None,
            decoders_config=CONFIG, **more,
        )  # fmt: skip
        assert out.tolist() == tokens
    assert cuda.replayed


def test_seconds_of_kernels_that_are_compiled_before_the_first_pass_are_those_of_the_first_call(
    cuda: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "interpreted", lambda: False)
    monkeypatch.setattr(self_check, "compile_kernels", lambda passes: time.sleep(0.05) or 3)
    model, _, inputs = on(device=True)
    decoders.enable(model)
    options = dict(max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True, decoders_config=CONFIG)
    reports = [model.generate(**inputs, **options, **GREEDY, strategy="suffix").report for _ in range(2)]
    assert reports[0].timings.kernels >= 0.05 and reports[1].timings.kernels == 0


#: Strategies with networks of their own: a head that drafts a part of the vocabulary, P-EAGLE.
NETWORKS: list[tuple[Any, Any]] = [
    (test_dflash.target, DFlash(draft_model=test_block_heads.written("dspark rnn, small vocabulary"), tree="dynamic", length=3)),
    (test_eagle3.target, Eagle3(head=test_eagle3.newer("parallel"), length=4, nodes=12)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("target", "strategy"), NETWORKS, ids=["a head", "P-EAGLE"])
def test_networks_write_the_tokens_of_the_cpu(cuda: TapeRecorder, target: Any, strategy: Any) -> None:
    options: dict[str, Any] = dict(max_new_tokens=12, pad_token_id=0, decoders_config=CONFIG)
    own = target.__wrapped__()
    given = dict(input_ids=IDS, attention_mask=MASK)
    expected = [
        own.generate(**given, **options, **more, strategy="autoregressive").tolist() for more in (GREEDY, DRAWN)
    ]
    model = decoders.enable(moved(target.__wrapped__()))
    given = {name: OnDevice(value) for name, value in given.items()}
    for tokens, more in zip(expected, (GREEDY, DRAWN), strict=True):
        assert model.generate(**given, **options, **more, strategy=strategy).tolist() == tokens
    assert cuda.replayed


@pytest.mark.parametrize("name", slow_but(["lfm2"], (*ARCHITECTURES, *RECURRENT)))
@pytest.mark.filterwarnings("ignore:a step could not be captured")  # of models that make tensors of the host's data
def test_architectures_write_the_tokens_of_the_cpu(cuda: TapeRecorder, name: str) -> None:
    options = dict(max_new_tokens=10, pad_token_id=0, do_sample=False)
    expected = tiny_model(name).generate(input_ids=IDS, attention_mask=MASK, **options).tolist()
    model = decoders.enable(moved(tiny_model(name)))
    for strategy in ("suffix", "prompt_lookup"):
        inputs = {"input_ids": OnDevice(IDS), "attention_mask": OnDevice(MASK)}
        out = model.generate(**inputs, strategy=strategy, decoders_config=CONFIG, **options)
        assert out.tolist() == expected, strategy


@pytest.mark.slow
def test_heads_grammars_and_calls_of_many_kinds_write_the_tokens_of_the_cpu(cuda: TapeRecorder) -> None:
    written: list[list[Any]] = []
    for device in (False, True):
        model, tokenizer = load()
        inputs = dict(tokenizer(PROMPT, return_tensors="pt"))
        if device:
            inputs = {name: OnDevice(value) for name, value in inputs.items()}
            moved(model)
        decoders.enable(model, tokenizer=tokenizer)
        written.append(list(calls(model, tokenizer, inputs)))
    assert written[0] == written[1]
    assert cuda.replayed


def calls(model: Any, tokenizer: Any, inputs: dict[str, torch.Tensor]) -> Iterator[Any]:
    pattern = decoders.regex(r"\n    return a [-*] b")
    schema = decoders.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    options = dict(max_new_tokens=12, decoders_config=CONFIG)

    def tokens(**more: Any) -> list[list[int]]:
        return model.generate(**inputs, **options, **({"do_sample": False} | more)).tolist()

    for strategy in ("medusa", "eagle3", "auto"):
        yield tokens(strategy=strategy)
    for strategy in ("grammar", "grammar+suffix", "eagle3"):
        yield tokens(strategy=strategy, grammar=pattern)
        yield tokens(strategy=strategy, grammar=schema, do_sample=True, seed=3)
    yield tokens(strategy="grammar+suffix", grammar=schema, do_sample=True, seed=3, num_return_sequences=3)
    yield tokens(strategy="suffix", grammar=decoders.after("b", pattern))
    yield tokens(strategy="suffix", repetition_penalty=1.2, no_repeat_ngram_size=2)
    yield tokens(strategy="prompt_lookup", stop_strings=["b"], tokenizer=tokenizer)
    cache = DynamicCache()
    model(input_ids=inputs["input_ids"][:, :-4], cache=cache, use_cache=True)
    yield tokens(strategy="suffix", past_key_values=cache)
    for strategy in ("prompt_lookup", "auto"):
        many = decoders.generate_many(model, [PROMPT, "one two one", "a b a b"], strategy=strategy, **options)
        yield sorted(done.text for done in many)
