"""Whole calls on pretended devices of the kinds on which nothing has run, which refuse what one of them may lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import decoders
from decoders.cli import doctor
from decoders.cli.models import device_called
from decoders.common import devices
from decoders.demo import load
from decoders.engine.model import experts, self_check
from decoders.engine.model.compiled import functions, tiers
from decoders.engine.model.kernels import chosen
from decoders.errors import SettingsError, UnsupportedError
from decoders.testing import tiny_draft, tiny_model

from .pretended_cuda import UNTRIED, OnDevice, RefusedError, moved, pretended
from .test_pretended_cuda import DRAWN, GREEDY, IDS, MASK, PROMPT, calls

CONFIG = {"memory": False}
OPTIONS: dict[str, Any] = dict(max_new_tokens=12, pad_token_id=0)
#: Processors of which some are computed otherwise where a device records.
PROCESSED: dict[str, Any] = dict(
    do_sample=True, seed=3, top_k=40, top_p=0.9, typical_p=0.95, repetition_penalty=1.2, no_repeat_ngram_size=3,
    bad_words_ids=[[3, 4], [7]], sequence_bias={(5, 6): 1.5},
)  # fmt: skip
KINDS = {"greedy": GREEDY, "drawn": DRAWN, "processed": PROCESSED}
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}), ("prompt_lookup", {"branches": 3}), ("suffix", {}), ("lookahead", {}), ("ngram", {}),
    ("token_recycling", {}), ("auto", {}), ("early_exit", {}), ("speculative", {"tree": "dynamic"}), ("threshold", {}), ("staged", {}),
    ("prompt_lookup+speculative", {}),
]  # fmt: skip


@pytest.fixture
def here(kind: str) -> Iterator[str]:
    """From here on there is a device of this kind."""
    with pretended(kind):
        yield kind


@pytest.fixture
def checked_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are checked with the texts of a CPU's check, which are short."""
    monkeypatch.setattr(self_check, "ON_CUDA", self_check.ON_CPU)


KIND = pytest.mark.parametrize("kind", UNTRIED)


def on(device: bool, name: str = "llama") -> tuple[Any, dict[str, Any]]:
    model, inputs = tiny_model(name), {"input_ids": IDS, "attention_mask": MASK}
    if device:
        moved(model)
        inputs = {name: OnDevice(value) for name, value in inputs.items()}
    return decoders.enable(model), inputs


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    model, inputs = on(device=False)
    options = dict(strategy="autoregressive", decoders_config={"compile": False}, **OPTIONS)
    return {name: model.generate(**inputs, **options, **more).tolist() for name, more in KINDS.items()}


@KIND
@pytest.mark.usefixtures("here")
def test_what_such_a_device_may_lack_is_refused(kind: str) -> None:
    ours = torch.arange(3, device=kind)
    assert ours.device.type == kind and not ours.is_cuda and (ours + 1).tolist() == [1, 2, 3]
    for lacking in (
        lambda: ours.double(), lambda: ours.sort(), lambda: ours.float().argsort(stable=True), lambda: torch.ones(2).pin_memory(),
        lambda: ours.to("cpu", non_blocking=True), lambda: ours.scatter_reduce(0, ours, ours, "amax"),
        lambda: torch.zeros(2, device=kind, dtype=torch.float64), lambda: (ours << 40).scatter_add(0, ours, ours << 40),
    ):  # fmt: skip
        with pytest.raises(RefusedError):
            lacking()


@KIND
@pytest.mark.parametrize("call", KINDS)
@pytest.mark.parametrize(("strategy", "config"), STRATEGIES, ids=lambda value: str(value or ""))
@pytest.mark.in_turns
@pytest.mark.usefixtures("here", "checked_briefly")
def test_strategies_write_the_tokens_of_the_cpu(
    expected: Any, strategy: str, config: dict[str, Any], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tiers, functions):  # what may be compiled is, from the first step on
        monkeypatch.setattr(module, "worth_compiling", lambda *given: True)
    model, inputs = on(device=True)
    if {"speculative", "threshold", "staged"} & {*strategy.split("+")}:
        inputs["assistant_model"] = moved(tiny_draft("llama"))
    out = model.generate(
        **inputs, **OPTIONS, **KINDS[call], strategy=strategy, strategy_config=config or None, decoders_config=CONFIG,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences.tolist() == expected[call]
    assert out.report.replayed_steps == out.report.compiled_steps == out.report.compilations == 0


@KIND
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
@pytest.mark.in_turns
@pytest.mark.usefixtures("here")
def test_architectures_write_the_tokens_of_the_cpu(name: str) -> None:
    written = tiny_model(name).generate(input_ids=IDS, attention_mask=MASK, do_sample=False, **OPTIONS).tolist()
    model, inputs = on(device=True, name=name)
    out = model.generate(**inputs, strategy="prompt_lookup", decoders_config=CONFIG, do_sample=False, **OPTIONS)
    assert out.tolist() == written


@KIND
@pytest.mark.usefixtures("here")
def test_products_by_many_experts_are_those_of_the_cpu(kind: str) -> None:
    x, ids, matrices = torch.randn(64, 4), torch.arange(64) * 7 % 5, torch.randn(300, 3, 4)
    there = [OnDevice(tensor) for tensor in (x, ids, matrices)]
    assert torch.equal(experts._expert_product(*there, False).cpu(), experts._expert_product(x, ids, matrices, False))


@pytest.mark.usefixtures("checked_briefly")
def test_heads_grammars_and_calls_of_many_kinds_write_the_tokens_of_the_cpu() -> None:
    def written(kind: str | None) -> list[Any]:
        model, tokenizer = load()
        inputs = dict(tokenizer(PROMPT, return_tensors="pt"))
        if kind is not None:
            inputs = {name: OnDevice(value) for name, value in inputs.items()}
            moved(model)
        decoders.enable(model, tokenizer=tokenizer)
        return list(calls(model, tokenizer, inputs))

    on_cpu = written(None)
    with pretended("mps"):
        assert written("mps") == on_cpu


@KIND
@pytest.mark.usefixtures("here", "checked_briefly")
def test_what_is_made_ready_ahead_is_not_compiled_either() -> None:
    model, inputs = on(device=True)
    decoders.warmup(model, strategies=["suffix"])
    out = model.generate(**inputs, **OPTIONS, strategy="suffix", do_sample=False, return_dict_in_generate=True)
    assert out.report.compiled_steps == out.report.compilations == 0


@KIND
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"compile": True}, "passes are compiled for cpu and cuda only. Leave compile='auto'"),
        ({"attention": "triton"}, "it runs on CUDA, the model is on {kind}:0. Leave attention='auto'"),
        ({"weights": "int8"}, "works on the CPU so far, and this model is on {kind}:0. Leave the setting out"),
        ({"kv_cache": "int8"}, "works on the CPU so far, and this model is on {kind}:0. Leave the setting out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("here", "checked_briefly")
def test_an_error_names_what_a_device_allows(
    kind: str, config: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "runs_kernels", lambda device: False)  # interpreted ones run anywhere
    model, inputs = on(device=True)
    with pytest.raises(UnsupportedError) as error:
        model.generate(**inputs, **OPTIONS, strategy="suffix", decoders_config=config)
    assert said.format(kind=kind) in str(error.value)


def test_a_device_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    for name in (*UNTRIED, "gpu"):
        with pytest.raises(SettingsError, match=rf"--device {name}: .*\. This machine has cpu"):
            device_called(name)


@KIND
def test_doctor_names_a_device_on_which_nothing_has_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "present", lambda: {"cpu": "a processor", kind: "a card"})
    used, note, *_ = doctor.device()
    assert (used.status, used.detail) == ("ok", "cpu: a processor")
    assert note.status == "note" and note.detail.startswith(f"{kind}: a card. No such device is tested")
