"""A tokenizer of the tiny models' vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast

from decoders.testing.models import VOCAB


@pytest.fixture(scope="session")
def letters() -> PreTrainedTokenizerFast:
    """A token for each printable character; the first one ends texts."""
    vocab = {token: i for i, token in enumerate(["</s>", "<unk>", *map(chr, range(32, 127))])}
    assert len(vocab) <= VOCAB
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = token_decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="</s>")
