"""A tiny target, and texts that it can learn in seconds."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decoders.testing import tiny_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer(word_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return word_tokenizer


@pytest.fixture(scope="module")
def texts(counting_texts: list[str]) -> list[str]:
    return counting_texts
