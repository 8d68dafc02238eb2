"""A fresh registry for every test, and a tiny model with a token for each byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.registry import reset_registry
from decoders.testing.models import ARCHITECTURES, Architecture


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    reset_registry()
    yield
    reset_registry()


@pytest.fixture
def speller(byte_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedModel:
    """An enabled model; token 0 pads, token 1 ends texts."""
    tokenizer = byte_tokenizer(["<pad>", "</s>"], pad_token="<pad>", eos_token="</s>")
    options = MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": len(tokenizer)})
    return decoders.enable(Architecture("llama", options)(0), tokenizer=tokenizer)
