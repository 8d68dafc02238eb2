"""One tiny model for tests that leave it as it is, and one of its own for each test that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models
from tokenizers import decoders as token_decoders
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

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
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny models' vocabulary: the printable characters and some pairs of them."""
    single = ["<pad>", "<unk>", *map(chr, range(32, 127))]
    pairs = [(a, b) for a in "etaoins" for b in "hrdlu"][: VOCAB - len(single)]
    vocab = {token: i for i, token in enumerate([*single, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    backend.decoder = token_decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


class Calls(BaseStreamer):
    """Calls `job` at the first token."""

    def __init__(self, job: Callable[[], object]) -> None:
        self.job: Callable[[], object] | None = job

    def put(self, value: Tensor) -> None:
        if value.dim() == 1 and self.job is not None:
            job, self.job = self.job, None
            job()

    def end(self) -> None: ...
