"""The attention kernel beside SDPA with masks, at the sizes of real calls: logits of whole models behind long prompts."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoders.engine.model.blocks import PassInput
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.self_check import target_of
from decoders.testing.models import Architecture
from decoders.tree import Topology

#: Tokens of the prompts: none a multiple of a tile or of a split, the rows very different.
PROMPTS = (300, 7, 129)
#: Branches and their length, for blocks of 4, 16, 64 and 128 nodes.
TREES = {4: (3, 1), 16: (5, 3), 64: (21, 3), 128: (127, 1)}

_SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024,
)  # fmt: skip
_LAYERS = ["sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = _SIZES | dict(head_dim=64, query_pre_attn_scalar=64, sliding_window=50)
#: What a kernel has to get right, with the windows shorter than the prompts.
DESIGNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"head {width}": ("llama", _SIZES | dict(head_dim=width)) for width in (16, 32, 64, 80, 96, 128, 256)},
    "one query head per key": ("llama", _SIZES | dict(num_key_value_heads=4)),
    "seven query heads per key": ("qwen2", _SIZES | dict(hidden_size=56, num_attention_heads=7, num_key_value_heads=1)),
    "window": ("mistral", _SIZES | dict(sliding_window=50)),
    "windows and soft-cap": ("gemma2", _GEMMA | dict(attn_implementation="eager")),
    "two kinds of layers": ("gemma3_text", _GEMMA | dict(layer_types=_LAYERS)),
    "sinks": (
        "gpt_oss",
        _SIZES | dict(head_dim=64, sliding_window=50, num_local_experts=4, num_experts_per_tok=2, layer_types=_LAYERS,
                      max_position_embeddings=131072),
    ),
    "values of another width": (
        "deepseek_v3",
        _SIZES | dict(num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=4, n_group=2, topk_group=1,
                      num_experts_per_tok=2, first_k_dense_replace=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16,
                      qk_nope_head_dim=32, v_head_dim=24),
    ),
    "chunks": (
        "llama4_text",
        _SIZES | dict(head_dim=16, intermediate_size_mlp=48, num_local_experts=4, interleave_moe_layer_step=2,
                      attention_chunk_size=70, no_rope_layers=[1, 0]),
    ),
}  # fmt: skip
#: How far logits may differ, relative to the largest.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.01}


@torch.no_grad()
def tree_logits(
    model: PreTrainedModel, attention: Any, nodes: int, prompts: tuple[int, ...] = PROMPTS, first: int = 0
) -> Tensor:
    """``[B, N, V]`` float32: logits of a block behind prompts that are read as calls read them, in one pass for all rows.

    Args:
        first: number of the first row: a row's tokens depend on its number alone.
    """
    target, device, rows = target_of(model, attention), model.device, len(prompts)
    longest, block = max(prompts), Topology.branches(*TREES[nodes]).tensors(rows, device)
    numbers = torch.arange(first, first + rows, device=device)[:, None]
    ids = ((numbers + 1) * torch.arange(1024, device=device) * 37 + 11) % 97 + 3  # [B, 1024]
    slots = -(-(longest + nodes) // 128) * 128 + 256
    buffers, start = (
        CacheBuffers.allocate(target.layout, rows, slots),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    view = torch.arange(slots - 256, device=device)
    target.prefill(ids[:, :longest], start, buffers, view, 0)
    base = torch.tensor(prompts, device=device)
    return target.forward(PassInput(ids[:, -len(block) :], base, block, buffers, view)).logits.float()


def model_of(design: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model_type, options = DESIGNS[design]
    return Architecture(model_type, MappingProxyType(options), embedding=0.1)(0).to(device=device, dtype=dtype)  # type: ignore[arg-type]


def assert_close(ours: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    gap, scale = (ours - reference).abs().max().item(), reference.abs().max().item()
    assert gap <= TOLERANCE[dtype] * scale, f"off by {gap:.2g}, largest logit {scale:.2g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("design", list(DESIGNS))
def test_kernel_and_sdpa_give_the_same_logits(design: str, dtype: torch.dtype, device: torch.device) -> None:
    model = model_of(design, dtype, device)
    for nodes in TREES:
        reference = tree_logits(model, "sdpa", nodes)
        assert_close(tree_logits(model, "triton", nodes), reference, dtype)


def test_half_precision(device: torch.device) -> None:
    model = model_of("head 64", torch.float16, device)
    assert_close(tree_logits(model, "triton", 16), tree_logits(model, "sdpa", 16), torch.float16)


def test_a_row_alone_has_the_logits_that_it_has_beside_others(device: torch.device) -> None:
    model = model_of("two kinds of layers", torch.float32, device)
    beside = tree_logits(model, "triton", 16)
    for row, length in enumerate(PROMPTS):
        alone = tree_logits(model, "triton", 16, (length,), row)
        assert_close(alone[0], beside[row], torch.float32)
