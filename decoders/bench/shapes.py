"""Models of well-known shapes with random weights. Their times equal the times of the real models; their texts are noise.

A step's time depends on sizes alone. Acceptance depends on the weights, so acceptance rates mean nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..errors import UnknownNameError
from .workloads import Workload

#: The note beside figures that were measured with random weights.
RANDOM_WEIGHTS = (
    "Random weights: times and memory are as for the real model, how often drafts are accepted means nothing."
)
#: Standard deviation of the weights.
SCALE = 0.02
#: The config of each shape.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-110m": dict(model_type="llama",
        num_hidden_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=12, intermediate_size=2048,
        vocab_size=32_000, max_position_embeddings=4096, tie_word_embeddings=True),
    "smollm2-135m": dict(model_type="llama",
        num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49_152, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}),
    "gemma3-270m": dict(model_type="gemma3_text",
        num_hidden_layers=18, hidden_size=640, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        intermediate_size=2048, vocab_size=262_144, max_position_embeddings=32_768, tie_word_embeddings=True,
        sliding_window=512, query_pre_attn_scalar=256,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3),
    "qwen2.5-0.5b": dict(model_type="qwen2",
        num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
        vocab_size=151_936, max_position_embeddings=32_768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}),
    "qwen3-0.6b": dict(model_type="qwen3",
        num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151_936, max_position_embeddings=40_960, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}),
    "llama-1b": dict(model_type="llama",
        num_hidden_layers=16, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128_256, max_position_embeddings=131_072, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model of the shape `name` in evaluation mode, without a stop token. Equal seeds give equal weights.

    Raises:
        UnknownNameError: no such shape.
    """
    if name not in SHAPES:
        raise UnknownNameError("shape", name, SHAPES)
    # These ids are set to None because some architectures' configs have default ids.
    config = AutoConfig.for_model(**SHAPES[name], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with no_init_weights():  # `fill` draws them
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.tie_weights()
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.config.name_or_path = name
    fill(model, seed)
    return model


@torch.no_grad()
def fill(model: PreTrainedModel, seed: int) -> None:
    """Fills matrices with random numbers and biases with zeros; norms keep their initial scales."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=SCALE, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()


def random_workloads(vocabulary: int, lengths: list[int], rows: int = 1, count: int = 1) -> list[Workload]:
    """`count` different prompts of random tokens for each of `lengths`, the same in every run."""
    workloads = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        for number in range(1, count + 1):
            ids = torch.randint(vocabulary, (rows, length), generator=generator)
            workloads.append(Workload(f"{length}-{number:02}", f"{length} random tokens", ids, torch.ones_like(ids)))
    return workloads
