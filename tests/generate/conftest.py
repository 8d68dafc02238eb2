"""One tiny model for tests that leave it as it is, and one of its own for each test that does not."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.testing import tiny_model
from decoders.testing.models import VOCAB


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """An enabled model, shared: whoever changes it takes `fresh`."""
    return decoders.enable(tiny_model("llama"))


@pytest.fixture
def fresh() -> PreTrainedModel:
    """An enabled model of the test's own."""
    return decoders.enable(tiny_model("llama"))


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny models' vocabulary, one word per token: ``w0 w1 … w127``."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w1", pad_token="w0", padding_side="left", clean_up_tokenization_spaces=False
    )
