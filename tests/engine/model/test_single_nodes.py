"""Several rows of one node each: their graph is made behind the one for any number of nodes, and gives the same bits."""

from __future__ import annotations

import pytest
import torch

import decoders
from decoders.engine.model.compiled import tiers
from decoders.engine.model.compiled.tiers import PassKind
from decoders.testing import decode, prompts, tiny_model


@pytest.mark.slow  # of one row: tests/engine/model/test_quantization.py
@pytest.mark.usefixtures("traced_only")
def test_plain_steps_of_several_rows_get_a_graph_of_their_own(
    monkeypatch: pytest.MonkeyPatch, block_sizes: list[int]
) -> None:
    monkeypatch.setattr(tiers, "FORWARD_SECONDS", 0.0)
    model, inputs = decoders.enable(tiny_model("llama", num_hidden_layers=1).bfloat16()), prompts(3)
    passes = vars(model)["generate"].engine().forward_pass.tiers
    compiled = dict(max_new_tokens=8, decoders_config={"compile": True})
    padded = decode(model, inputs, "autoregressive", **compiled)
    job = passes.kinds[PassKind(True, single_node=True)].job
    assert padded.report.nodes >= 3 and job is not None and job.wait()
    block_sizes.clear()
    single = decode(model, inputs, "autoregressive", **compiled)
    assert block_sizes == [1] * 8 and single.report.compiled_steps == single.report.steps == 8
    assert torch.equal(padded.sequences, single.sequences)
    drafted = decode(model, inputs, "prompt_lookup", **compiled)
    assert torch.equal(drafted.sequences, single.sequences)
