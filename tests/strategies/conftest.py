"""Models to draft for and to draft with."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.testing import tiny_draft, tiny_model


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    """An enabled model, shared: whoever changes it makes one of its own."""
    return decoders.enable(tiny_model("llama"))


@pytest.fixture(scope="session")
def near() -> PreTrainedModel:
    """A draft that often agrees with `target`."""
    return tiny_draft("llama")


@pytest.fixture(scope="session")
def looping() -> PreTrainedModel:
    """An enabled model whose next token depends on the last one alone, so that its greedy text soon repeats itself."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return decoders.enable(model)
