"""The compiled loop, on one model: it gives the same tokens, and what has been compiled once serves every later call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

import decoders
from decoders.strategies import PromptLookup
from decoders.testing import Replay, decode, prompts, tiny_model


@pytest.fixture(scope="module")
def compiled() -> PreTrainedModel:
    """A model that has generated for one row and for several, greedily and with sampling; all that a process compiles."""
    model = decoders.enable(tiny_model("llama"))
    for rows in (1, 2):
        first = decode(model, prompts(rows), "autoregressive", max_new_tokens=4)
        assert first.report.compiled and first.report.compilations > 0 and first.report.timings.compile > 0
        decode(model, prompts(rows), "autoregressive", max_new_tokens=4, do_sample=True, top_k=5, temperature=0.5)
        decode(model, prompts(rows), "prompt_lookup", max_new_tokens=4)
    return model


@pytest.mark.parametrize(
    "rows, length, options",
    [
        (1, 24, dict()),
        (1, 7, dict(max_new_tokens=40)),
        (1, 130, dict(max_new_tokens=100)),
        (2, 24, dict()),
        (5, 40, dict(max_new_tokens=50)),
        (1, 24, dict(do_sample=True, top_k=9, temperature=0.9, seed=3)),
        (3, 24, dict(do_sample=True, top_k=50, temperature=1.4, seed=4)),
        (2, 24, dict(eos_token_id=[7, 8, 9])),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "strategy",
    [
        "autoregressive",
        "prompt_lookup",
        PromptLookup(length=5),
        Replay(texts=((3, 4, 5),), branches=3),
        "prompt_lookup+autoregressive",
    ],
    ids=str,
)
def test_later_calls_compile_nothing(
    compiled: PreTrainedModel, strategy: Any, rows: int, length: int, options: dict[str, Any]
) -> None:
    inputs, options = prompts(rows, length), dict(max_new_tokens=12) | options
    out = decode(compiled, inputs, strategy, **options)
    assert out.report.compiled and out.report.compilations == 0 and out.report.timings.compile == 0
    if options.get("do_sample"):
        expected = decode(compiled, inputs, "autoregressive", decoders_config={"compile": False}, **options)
    else:
        expected = decode(compiled, inputs, **options)
    assert torch.equal(out.sequences, expected.sequences)


def test_a_block_of_any_size_takes_the_same_graph(compiled: PreTrainedModel) -> None:
    for length in (1, 2, 17, 63):
        out = decode(compiled, prompts(2), Replay(texts=((9,) * 60,) * 2, length=length), max_new_tokens=6)
        assert out.report.compilations == 0
    assert torch.equal(out.sequences, decode(compiled, prompts(2), max_new_tokens=6).sequences)


@pytest.mark.slow
def test_processors_on_the_host_use_a_graph_of_the_forward_alone(compiled: PreTrainedModel) -> None:
    class Twist(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + (input_ids[:, -1:] % 7) * torch.linspace(0, 1, scores.shape[-1])

    options = dict(logits_processor=[Twist()], max_new_tokens=16)
    plain = decode(compiled, prompts(2), **options).sequences
    first, second = (decode(compiled, prompts(2), "prompt_lookup", **options) for _ in range(2))
    assert torch.equal(first.sequences, plain) and torch.equal(second.sequences, plain)
    assert second.report.compilations == 0


@pytest.mark.slow
def test_a_weight_changed_in_place_is_seen_by_compiled_code() -> None:
    model = decoders.enable(tiny_model("llama"))
    before = decode(model, prompts(), "autoregressive", max_new_tokens=12)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.add_(0.5)
    after = decode(model, prompts(), "autoregressive", max_new_tokens=12)
    assert before.report.compiled and after.report.compiled
    assert not torch.equal(after.sequences, before.sequences)
    assert torch.equal(after.sequences, decode(model, prompts(), max_new_tokens=12).sequences)
    model.load_state_dict(tiny_model("llama").state_dict())
    assert torch.equal(decode(model, prompts(), "autoregressive", max_new_tokens=12).sequences, before.sequences)


def test_a_strategy_that_cannot_be_compiled_is_no_reason_to_fail(compiled: PreTrainedModel) -> None:
    """Its own tensor code runs eagerly unless it asks for more."""

    class OnHost(PromptLookup):
        on_device = False

        def propose(self, state: Any, sequences: Any) -> Any:
            return decoders.Draft.chain(
                torch.tensor([[int(sequences.last[row])] for row in range(len(sequences.length))])
            )

    out = decode(compiled, prompts(2), OnHost(), max_new_tokens=8)
    assert out.report.compiled and out.report.compilations == 0
    assert torch.equal(out.sequences, decode(compiled, prompts(2), max_new_tokens=8).sequences)
