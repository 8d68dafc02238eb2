"""Models to draft for and to draft with, and Medusa heads for the tiny models: random ones, which draft token badly, in a tree so
wide that some draft tokens are right.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.medusa.config import HeadsConfig
from decoders.medusa.files import save_heads
from decoders.medusa.heads import MedusaHeads
from decoders.testing import tiny_draft, tiny_model
from decoders.testing.models import VOCAB

#: Wide enough for random draft tokens; no rank is skipped.
WIDE = tuple((i,) for i in range(40)) + tuple((i, j) for i in range(4) for j in range(12)) + ((0, 0, 0), (0, 1, 0))


@cache
def random_heads(hidden: int = 32, vocab: int = VOCAB, tree: tuple | None = WIDE) -> str:
    """A folder of random heads, the same in every run."""
    folder = tempfile.TemporaryDirectory(prefix="medusa-heads-")
    _folders.append(folder)
    heads = MedusaHeads(
        HeadsConfig(heads=3, layers=1, hidden_size=hidden, vocab_size=vocab, projection="tied", tree=tree)
    )
    with torch.no_grad():
        heads.linear.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    save_heads(heads, Path(folder.name))
    return folder.name


_folders: list[tempfile.TemporaryDirectory] = []


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
