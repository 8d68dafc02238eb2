"""A tiny model and a tokenizer of its vocabulary, for libraries that call ``model.generate`` themselves."""

from __future__ import annotations

import copy

import pytest
from tokenizers import Tokenizer, models
from tokenizers import decoders as token_decoders
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.testing import tiny_model
from decoders.testing.models import VOCAB


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_COMPILE", "false")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The printable characters and some pairs of them."""
    single = ["<pad>", "<unk>", "</s>", *map(chr, range(32, 127))]
    pairs = [(a, b) for a in "etaoins" for b in "hrdlu"][: VOCAB - len(single)]
    vocab = {token: i for i, token in enumerate([*single, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    backend.decoder = token_decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", padding_side="left",
        clean_up_tokenization_spaces=False, model_max_length=256,
    )  # fmt: skip


@pytest.fixture
def plain() -> PreTrainedModel:
    """A model as transformers made it."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    return model


@pytest.fixture
def enabled(plain: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The same, decoding with a strategy that its generation config names: its callers know nothing of it."""
    model = decoders.enable(copy.deepcopy(plain), tokenizer=tokenizer)
    model.generation_config.strategy = "prompt_lookup"
    return model
