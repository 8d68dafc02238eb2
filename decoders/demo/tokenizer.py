"""The demo tokenizer: a byte-level BPE trained on the training files. Lossless on any text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 2048


def train_tokenizer(texts: Iterable[str], *, vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocabulary` tokens; `<|endoftext|>` (id 0) is beginning, end and padding at once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """One text's ids without special tokens; quiet about texts longer than the model's context."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
