"""Tokens with the attention kernel, interpreted on the CPU: those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decoders
from decoders.engine.model import self_check
from decoders.engine.model.kernels import chosen, interpreted
from decoders.testing.models import tiny_model

from ...tape_recorder import TapeRecorder

pytestmark = pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is off: a GPU is here, or no Triton")

#: The interpreter is slow.
SMALL = {"num_key_value_heads": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "name, rows, compile",
    [
        pytest.param("llama", 1, False, marks=pytest.mark.slow),  # .ci/run runs it
        pytest.param("llama", 2, False, marks=pytest.mark.slow),
        pytest.param("gemma3", 1, False, marks=pytest.mark.slow),  # windows
        pytest.param("gpt_oss", 1, False, marks=pytest.mark.slow),  # sinks and windows
        pytest.param("llama", 1, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("strategy", ["autoregressive", pytest.param("prompt_lookup", marks=pytest.mark.slow)])
def test_the_attention_kernel_gives_the_tokens_of_transformers(
    name: str, rows: int, compile: bool, strategy: str
) -> None:
    layers = 1 if name == "llama" else 2
    model = decoders.enable(tiny_model(name, **SMALL, num_hidden_layers=layers))
    ids = torch.arange(6, 18).repeat(rows, 1)
    mask = torch.ones_like(ids)
    mask[1:, :5] = 0
    given: dict[str, Any] = dict(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    settings = {"attention": "triton", "compile": compile}
    out = model.generate(**given, strategy=strategy, decoders_config=settings, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**given))
    assert out.report.compiled_steps == compile * out.report.steps


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["prompt_lookup", "lookahead"])
def test_a_device_that_records_attends_by_the_kernel_in_its_replays(
    strategy: str, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "preferred", lambda device: True)
    monkeypatch.setattr(self_check, "ON_CPU", self_check.Sizes((12, 7), ((5, 3),), 8))
    model = decoders.enable(tiny_model("llama", **SMALL, num_hidden_layers=1))
    given: dict[str, Any] = dict(input_ids=torch.arange(6, 18)[None], max_new_tokens=10, do_sample=False)
    settings = {"compile": False}  # the interpreter runs in one thread at a time
    out = model.generate(**given, strategy=strategy, decoders_config=settings, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**given))
    assert out.report.replayed_steps > 0
