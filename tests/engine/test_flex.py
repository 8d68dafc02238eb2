"""FlexAttention on the CPU: the same rule as the additive masks, and the same tokens. Its CUDA kernels are not run here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
import torch

import decoders
from decoders.engine import flex
from decoders.engine.attention import LayerKind, build_mask
from decoders.engine.flex import BLOCK, FusedAttention, PackedMask, attend_densely, block_mask, pack_mask
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


def test_a_block_that_ends_behind_the_cache_names_no_block_of_keys_behind_it() -> None:
    tree = Topology.chain(9).tensors(1, CPU)
    mask = block_mask(pack_mask(torch.tensor([250]), tree.offsets, tree.visible), LayerKind(), 256)
    assert mask.kv_num_blocks.tolist() == [[[2]]] and mask.kv_indices.shape[-1] == 2


LAYOUTS = [(1, 4), (3, 4), (7, 9), (7, 33), (7, 128), (16, 64), (1, 128), (3, 100)]


@pytest.mark.parametrize(("group", "nodes"), LAYOUTS)
def test_packed_queries_are_found_again(group: int, nodes: int) -> None:
    packing = PackedMask.of(2 * group, 2, nodes)
    query = torch.arange(nodes).repeat(2, 2 * group, 1)[..., None] + 1000.0 * torch.arange(2 * group)[:, None, None]
    packed = packing.pack(query)
    assert torch.equal(packing.unpack(packed), query)
    # What masks are told about a row is the node that stands there.
    heads, rows = torch.meshgrid(torch.arange(packed.shape[1]), torch.arange(packed.shape[2]), indexing="ij")
    filled = (heads % packing.parts) * packing.rows + rows < group * nodes
    assert torch.equal((packed[0, :, :, 0] % 1000)[filled], packing.node(heads, rows)[filled].float())
    assert int(packing.node(heads, rows + BLOCK).max()) < nodes  # padding of the kernel's tile as well


@pytest.mark.parametrize(("group", "nodes"), LAYOUTS)
def test_every_tree_gets_the_kernel_that_splits_the_cache(group: int, nodes: int) -> None:
    """By torch's own rule, and with a size of tile that the kernel has a configuration for."""
    from torch._inductor.kernel.flex.flex_decoding import _use_flex_decoding
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    packing = PackedMask.of(2 * group, 2, nodes)
    query, value = _sizes(1, 2 * packing.parts, packing.rows, 64), _sizes(1, 2, 1024, 64)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        assert _use_flex_decoding(query, _sizes(1, 1, 1, 8), value, packing.kernel_options, packing.shared)
        # As the model lays them out, ratios that are no power of two do not get it.
        unpacked = _use_flex_decoding(_sizes(1, 2 * group, nodes, 64), _sizes(1, 1, 1, 8), value, {}, group > 1)
        assert unpacked == (nodes < 128 and group & (group - 1) == 0)
    tile = packing.kernel_options["BLOCK_M"]
    assert BLOCK % tile == 0 and tile % packing.parts == 0 and tile >= 16


def test_where_the_kernel_takes_one_tile_only_larger_blocks_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flex.takes_several_programs()
    monkeypatch.setattr(flex, "takes_several_programs", lambda: False)
    for nodes in (1, 8, 9):
        packing = PackedMask.of(14, 2, nodes)
        assert packing.parts == 1 and packing.kernel_options["BLOCK_M"] >= 7 * nodes
    assert PackedMask.of(14, 2, 10).parts == 0


def test_prefill_is_not_packed() -> None:
    packing = PackedMask.of(14, 2, 512)
    assert packing.parts == 0 and packing.shared and packing.kernel_options is None
    assert PackedMask.of(71, 1, 128).parts == 0  # more rows than heads to deal them out to


CASES = {
    "plain": dict(group=1), "three queries per key": dict(group=3), "seven": dict(group=7),
    "seven, several heads of rows": dict(group=7, nodes=33), "prefill": dict(group=3, nodes=140),
    "window": dict(group=2, kind=LayerKind(window=5)), "cap": dict(group=3, softcap=5.0),
    "sinks": dict(group=3, sinks=True), "narrow heads": dict(group=7, width=8, sinks=True),
    "values narrower than keys": dict(group=1, width=24, value_width=8),
}  # fmt: skip
#: Between them they have all that the others have.
QUICK = (
    "plain",
    "seven, several heads of rows",
    "prefill",
    "window",
    "cap",
    "narrow heads",
    "values narrower than keys",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()],
)
def test_packed_attention_is_that_of_additive_masks(case: dict) -> None:
    group, nodes, width = case["group"], case.get("nodes", 9), case.get("width", 16)
    generator = torch.Generator().manual_seed(0)
    rows, slots, base = 2, 256, torch.tensor([0, 90])

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tree = Topology.branches(2, (nodes - 1) // 2).padded(nodes).tensors(rows, CPU)
    key, value = noise(rows, 2, slots, width), noise(rows, 2, slots, case.get("value_width", width))
    query, sinks = noise(rows, 2 * group, nodes, width), noise(2 * group) if case.get("sinks") else None
    mask = pack_mask(base, tree.offsets, tree.visible)
    given = (query, key, value, mask, sinks, case.get("kind", LayerKind()), width**-0.5, case.get("softcap"))
    fused = FusedAttention()
    torch.testing.assert_close(fused(*given), attend_densely(*given), rtol=1e-5, atol=1e-5)
    assert all(compiled is not None for shapes in fused.shapes.values() for compiled in shapes._compiled.values())


def test_attention_is_compiled_once_per_shape_and_never_meets_the_limit_of_recompilations() -> None:
    compiled = []
    fused = FusedAttention(lambda function: compiled.append(function.__code__) or function)
    original, calls = flex.attend, 0
    try:
        flex.attend = lambda query, *rest: query
        for nodes in (*range(1, 30), *range(1, 30)):
            shape = torch.zeros(1, 2, nodes, 16)
            fused(shape, shape, shape, torch.zeros(1, 1, nodes + 1, nodes + 1), None, LayerKind(), 1.0, None)
            calls += 1
    finally:
        flex.attend = original
    assert calls == 58 and len(compiled) == len(set(map(id, compiled))) == 29


def test_where_attention_cannot_be_lowered_one_warning_says_so_and_the_tokens_are_the_same() -> None:
    model = decoders.enable(tiny_model("gemma2"))
    ids = torch.arange(6, 26).repeat(2)[None]
    plain = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)

    def refuse(function):
        def lowered(*args):
            raise NotImplementedError("NYI: embedding dimension must be at least 16")

        return lowered

    broken = FusedAttention(refuse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_shared", broken)
        patch.setattr(flex, "FusedAttention", lambda: broken)
        with pytest.warns(UserWarning, match="attend could not be compiled.*at least 16") as said:
            ours = model.generate(
                input_ids=ids, max_new_tokens=6, do_sample=False, strategy="prompt_lookup",
                decoders_config={"attention": "flex", "compile": False},
            )  # fmt: skip
    assert torch.equal(ours, plain) and len(said) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
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


def test_layers_of_one_model_share_what_is_compiled_and_two_models_do_not() -> None:
    first, second = (tiny_model("llama") for _ in range(2))
    of_first, of_second = (flex.prepare(model, (LayerKind(),), (0, 0)) for model in (first, second))
    layers = [m for m in first.modules() if hasattr(m, "layer_idx")]
    assert of_first is not of_second and layers
    assert all(getattr(layer, flex.FUSED_ATTRIBUTE) is of_first for layer in layers)


def _sizes(*sizes: int) -> SimpleNamespace:
    """A node of inductor's graph, as far as its size goes."""
    return SimpleNamespace(get_size=lambda: [sympy.Integer(size) for size in sizes])
