"""A tiny model with a token for each byte."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.testing.models import ARCHITECTURES, Architecture


@pytest.fixture
def speller() -> PreTrainedModel:
    """An enabled model; token 0 pads, token 1 ends texts."""
    names = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = token_decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    options = MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": len(names)})
    return decoders.enable(Architecture("llama", options)(0), tokenizer=tokenizer)
