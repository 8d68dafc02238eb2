"""FlexAttention on the CPU: the same rule as the additive masks, and the same tokens. Its CUDA kernels are not run here."""

from __future__ import annotations

import pytest
import torch

import decoders
from decoders.engine.attention import LayerKind, build_mask
from decoders.engine.flex import BLOCK, block_mask, pack_mask
from decoders.testing.models import tiny_model
from decoders.tree import Topology

CPU = torch.device("cpu")
KINDS = [LayerKind(), LayerKind(window=7), LayerKind(window=150), LayerKind(chunk=16)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_block_masks_follow_the_rule_of_the_additive_masks(kind: LayerKind) -> None:
    base, slots = torch.tensor([3, 200, 127]), 384
    tree = Topology.branches(2, 3).tensors(3, CPU)
    expected = build_mask((kind,), base, tree.offsets, tree.visible, slots, torch.float32)[:, 0] == 0
    mask = block_mask(pack_mask(base, tree.offsets, tree.visible), kind, slots)
    rows, nodes, keys = torch.meshgrid(torch.arange(3), torch.arange(7), torch.arange(slots), indexing="ij")
    assert torch.equal(mask.mask_mod(rows, torch.zeros_like(rows), nodes, keys), expected)
    # No block that is skipped holds a slot that is seen.
    for row in range(3):
        visited = mask.kv_indices[row, 0, 0, : mask.kv_num_blocks[row, 0, 0]].tolist()
        seen = expected[row].any(0).nonzero().flatten() // BLOCK
        assert set(seen.tolist()) <= set(visited)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_flex_attention_gives_the_same_tokens(name: str) -> None:
    model = decoders.enable(tiny_model(name))
    ids = torch.arange(6, 26).repeat(2)[None]
    plain = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    settings = {"attention": "flex", "compile": False}
    for strategy in ("autoregressive", "prompt_lookup"):
        ours = model.generate(
            input_ids=ids, max_new_tokens=6, do_sample=False, strategy=strategy, decoders_config=settings
        )
        assert torch.equal(ours, plain)
