"""Tiny models with tokenizers of their own."""

from __future__ import annotations

import functools
from types import MappingProxyType

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decoders.testing.models import ARCHITECTURES, Architecture


@functools.cache
def tokenizer(size: int, text: str, *names: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `size` tokens, trained on `text`; ``<end>`` and `names` come first."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = token_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>", *names], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", bos_token="<end>")


def model(vocab: int, seed: int, architecture: str = "llama") -> PreTrainedModel:
    torch.manual_seed(seed)
    options = dict(ARCHITECTURES[architecture].options) | {"vocab_size": vocab}
    return Architecture(architecture, MappingProxyType(options))()
