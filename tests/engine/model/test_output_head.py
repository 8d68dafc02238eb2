"""The output head by itself: what a model does behind its decoder layers, whatever it reads of them there."""

from __future__ import annotations

import pytest
import torch

from decoders.engine.model.self_check import target_of
from decoders.testing import RECURRENT, tiny_model
from decoders.testing.models import ARCHITECTURES

from ...turns import slow_but

#: OPT calls a part of its decoder, Falcon-H1 reads a multiplier of it, Gemma 2 squeezes the logits.
QUICK = ("llama", "opt", "gemma2", "falcon_h1")


@pytest.mark.parametrize("name", slow_but(QUICK, (*ARCHITECTURES, *RECURRENT)))
def test_head_gives_the_logits_of_the_model(name: str) -> None:
    model = tiny_model(name)
    if name == "falcon_h1":
        model.model.lm_head_multiplier = 0.25
    head = model.get_output_embeddings()
    read: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with torch.no_grad():
        expected = model(torch.tensor([[3, 5, 7, 11]])).logits.float()
    handle.remove()
    with torch.no_grad():
        torch.testing.assert_close(target_of(model).output_head()(read[0]), expected, rtol=1e-4, atol=1e-4)
