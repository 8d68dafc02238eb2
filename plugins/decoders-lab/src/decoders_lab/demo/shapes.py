"""The shapes of the two demo models (Llama, tied embeddings), and their tokenizer, a byte-level BPE, which is lossless on any text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class DemoShape:
    """The shape of a Llama, and a suitable peak learning rate."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    learning_rate: float
    vocabulary: int = VOCABULARY

    def model(self, *, vocabulary: int | None = None) -> LlamaForCausalLM:
        """A freshly initialised float32 model; token 0 is beginning, end and padding."""
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary if vocabulary is None else vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        model = LlamaForCausalLM(config)
        model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
        return model


SHAPES = {
    "target": DemoShape(hidden=256, layers=6, intermediate=512, heads=8, kv_heads=4, learning_rate=4e-3),
    # An eighth of the target's size, with heads of width 32, and as wide as this size allows. A draft model of two layers of width 64
    # did not learn to copy from its context, and speculation gains most if the draft model can copy.
    "draft": DemoShape(hidden=96, layers=2, intermediate=160, heads=3, kv_heads=3, learning_rate=6e-3),
}
# Numbers of training tokens of the shipped models.
TOKENS = {"target": 17_469_440, "draft": 20_480_000}
# Number of training steps against loops, for each of the shipped models.
LOOP_STEPS = 400


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
