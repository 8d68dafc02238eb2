"""Attention over the slot cache by every variant of the CPU's kernels: right, and with bits that depend on a path alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoders.engine.model.attention import LayerKind, build_mask
from decoders.engine.model.blocks import causal_block
from decoders.engine.model.kernels import cpu
from decoders.engine.model.kernels.attention import pack_mask
from decoders.engine.model.kernels.cpu import build
from decoders.engine.model.slot_cache import quantize_slots
from decoders.tree import Topology, TreeTensors

from .variants import IN_TURN

CPU = torch.device("cpu")
each_variant = pytest.mark.parametrize("variant", IN_TURN)
DTYPES = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

if build.compiler() is None:
    pytest.skip("there is no C++ compiler", allow_module_level=True)


@functools.cache
def kernels(variant: str) -> cpu.Kernels:
    return cpu.loaded(variant)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(
    variant: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: LayerKind = LayerKind(), softcap: float = 0.0,
    sinks: Tensor | None = None, scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> Tensor:  # fmt: skip
    window, chunk, scale = kind.window or 0, kind.chunk or 0, query.shape[3] ** -0.5
    return kernels(variant).slot_attention(query, key, value, mask, sinks, *scales, window, chunk, scale, softcap)


def expected(
    query: Tensor, key: Tensor, value: Tensor, base: Tensor, tree: TreeTensors, kind: LayerKind, softcap: float, sinks: Tensor | None
) -> Tensor:  # fmt: skip
    """By plain operations in float64, ``[B, N, Hq, Dv]``."""
    queries, group = query.shape[2], query.shape[1] // key.shape[1]
    visible = tree.visible[:, -queries:]
    allowed = build_mask((kind,), base, tree.offsets, visible, key.shape[2], torch.float64)[:, 0] == 0
    # What is not visible may hold anything.
    key, value = (t.double().nan_to_num().repeat_interleave(group, 1) for t in (key, value))
    scores = query.double() @ key.transpose(2, 3) * query.shape[3] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].nan_to_num()
    return (weights @ value).transpose(1, 2)


def check(
    variant: str, tree: TreeTensors, base: list[int], view: int, *, queries: int | None = None, kind: LayerKind = LayerKind(),
    text: bool = False, softcap: float = 0.0, sinks: bool = False, heads: int = 1, group: int = 1, width: int = 16,
    value_width: int | None = None, dtype: torch.dtype = torch.float32, int8: bool = False,
) -> None:  # fmt: skip
    rows, nodes = tree.offsets.shape
    queries = queries or nodes
    # As a model hands them over: queries with heads inside, keys as the beginning of a longer cache.
    query = noise(rows, queries, heads * group, width, dtype=dtype).transpose(1, 2)
    key = noise(rows, heads, view + 64, width, dtype=dtype, seed=1)
    value = noise(rows, heads, view + 64, value_width or width, dtype=dtype, seed=2)
    own = noise(heads * group, dtype=dtype, seed=3) if sinks else None
    begin = torch.tensor(base)
    for row, first in enumerate(base):  # slots that no node of the row sees
        for tensor in (key, value):
            tensor[row, :, max(first + nodes, 0) :] = 0.0 if int8 else float("nan")
    levels: Any = (key, value)
    scales: Any = (None, None)
    if int8:
        (key_levels, key_scales), (value_levels, value_scales) = quantize_slots(key), quantize_slots(value)
        levels, scales = (key_levels, value_levels), (key_scales, value_scales)
        key, value = key_levels.double() * key_scales.double(), value_levels.double() * value_scales.double()
    levels, scales = ([t if t is None else t[:, :, :view] for t in pair] for pair in (levels, scales))
    key, value = key[:, :, :view], value[:, :, :view]
    mask = pack_mask(begin, tree.offsets, None if text else tree.visible[:, -queries:])
    ours = attend(variant, query, *levels, mask, kind, softcap, own, scales)
    plain = expected(query, key, value, begin, tree, kind, softcap, own)
    assert ours.dtype == dtype and ours.is_contiguous() and ours.shape == plain.shape
    counts = (
        begin[:, None] + tree.offsets[:, -queries:]
    ) >= 0  # nodes in front of a row's beginning are run for nothing
    assert (ours.double() - plain)[counts].abs().max() < DTYPES[dtype] * plain[counts].abs().max().clamp(min=1)


def branching(nodes: int, rows: int) -> TreeTensors:
    """A tree of several branches, filled up to `nodes`."""
    return Topology.branches(max(min(nodes // 3, 5), 1), max((nodes - 1) // 6, 1)).padded(nodes).tensors(rows, CPU)


CASES: dict[str, dict[str, Any]] = {
    "one node": dict(tree=branching(1, 1), base=[150], view=256, group=4),
    "an empty cache": dict(tree=branching(1, 2), base=[0, 0], view=64, group=2),
    "a tree and ragged rows": dict(tree=branching(16, 2), base=[0, 239], view=256, group=3, heads=2),
    "more nodes than a word has bits": dict(tree=branching(80, 1), base=[130], view=256),
    "the last nodes of the largest block": dict(tree=branching(1024, 1), base=[130], view=1280, queries=40),
    "a level of a tree, whose others are in the cache": dict(tree=branching(16, 2), base=[7, 100], view=128, queries=5),
    "a window shorter than the text": dict(tree=branching(16, 2), base=[20, 200], view=256, heads=2, kind=LayerKind(window=37)),
    "a window shorter than the block": dict(tree=branching(16, 2), base=[20, 200], view=256, kind=LayerKind(window=2)),
    "chunks": dict(tree=branching(16, 2), base=[30, 330], view=384, kind=LayerKind(chunk=33)),
    "capped scores": dict(tree=branching(4, 2), base=[20, 200], view=256, softcap=0.7),
    "capped scores in a short window": dict(tree=branching(16, 2), base=[20, 200], view=256, softcap=5.0, kind=LayerKind(window=2)),
    "sinks": dict(tree=branching(4, 2), base=[0, 200], view=256, heads=2, group=2, sinks=True),
    "values narrower than keys": dict(tree=branching(4, 1), base=[140], view=192, width=24, value_width=8),
    "heads of one number": dict(tree=branching(9, 1), base=[140], view=192, width=1),
    "odd heads": dict(tree=branching(9, 1), base=[140], view=192, width=37, value_width=21, group=7),
    "wide heads": dict(tree=branching(4, 1), base=[140], view=192, width=256),
    "a block that begins before its row": dict(tree=branching(4, 2), base=[-2, 5], view=128),
    "several stretches": dict(tree=branching(9, 2), base=[1500, 200], view=1600, group=2),
    "more queries than are read for at once": dict(tree=branching(100, 1), base=[40], view=192, group=3),
    "text": dict(tree=causal_block(2, 40, CPU), base=[0, 170], view=256, text=True, group=2),
    "text with a window": dict(tree=causal_block(1, 170, CPU), base=[90], view=320, text=True, kind=LayerKind(window=20), group=3),
    "text in chunks, with sinks": dict(
        tree=causal_block(1, 70, CPU), base=[90], view=192, text=True, kind=LayerKind(chunk=50), sinks=True
    ),
    "text that begins before its row": dict(tree=causal_block(2, 10, CPU), base=[-3, 9], view=64, text=True),
}  # fmt: skip


@each_variant
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_a_block_attends_as_plain_attention_does(variant: str, case: dict[str, Any]) -> None:
    for dtype in DTYPES:
        check(variant, dtype=dtype, **case)
        check(variant, dtype=dtype, int8=True, **case)


def random_tree(draw: st.DrawFn, nodes: int) -> Topology:
    return Topology.from_parents([-1, *[draw(st.integers(0, node - 1)) for node in range(1, nodes)]])


@each_variant
@given(data=st.data())
def test_any_tree_over_any_rows_attends_as_plain_attention_does(variant: str, data: st.DataObject) -> None:
    draw, view = data.draw, data.draw(st.sampled_from([64, 192, 1100]))
    nodes, rows = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    kind = LayerKind(draw(st.none() | st.integers(1, 200)), draw(st.none() | st.integers(1, 200)))
    check(
        variant, random_tree(draw, nodes).tensors(rows, CPU),
        [draw(st.integers(-1, view - nodes)) for _ in range(rows)], view, kind=kind, queries=draw(st.integers(1, nodes)),
        group=draw(st.sampled_from([1, 2, 3, 7, 8])), heads=draw(st.sampled_from([1, 2])), width=draw(st.integers(1, 130)),
        value_width=draw(st.integers(1, 130)), sinks=draw(st.booleans()), softcap=draw(st.sampled_from([0.0, 2.0])),
        dtype=draw(st.sampled_from(list(DTYPES))), int8=draw(st.booleans()),
    )  # fmt: skip


class Sequence:
    """A text of random tokens as one head's queries, keys and values, and its attention as one block of text."""

    def __init__(
        self, variant: str, dtype: torch.dtype, length: int, kind: LayerKind, group: int = 3, width: int = 48
    ) -> None:
        self.variant, self.dtype, self.length, self.kind = variant, dtype, length, kind
        self.query = noise(1, 2 * group, length, width, dtype=dtype)
        self.key, self.value = (
            noise(1, 2, length, width, dtype=dtype, seed=1),
            noise(1, 2, length, width, dtype=dtype, seed=2),
        )
        text = causal_block(1, length, CPU)
        mask = pack_mask(torch.tensor([0]), text.offsets, None)
        self.whole = attend(variant, self.query, self.key, self.value, mask, kind, 4.0)

    def verified(
        self, parents: list[int], path: list[int], base: int, view: int, rows: int = 1, spare: int = 0
    ) -> Tensor:
        """The attention of tokens ``base …`` as the nodes of `path`; all other slots and nodes hold NaN."""
        nodes, at = len(parents), [base + node for node in path]
        tokens = slice(base, base + len(path))
        key, value = (
            torch.full((1, 2, view + spare, t.shape[3]), float("nan"), dtype=self.dtype) for t in (self.key, self.value)
        )
        query = torch.full((1, self.query.shape[1], nodes, self.query.shape[3]), float("nan"), dtype=self.dtype)
        query[:, :, path] = self.query[:, :, tokens]
        for own, whole in ((key, self.key), (value, self.value)):
            own[:, :, :base], own[:, :, at] = whole[:, :, :base], whole[:, :, tokens]
        tree = Topology.from_parents(parents).tensors(rows, CPU)
        begin = torch.tensor([base] * rows)
        mask = pack_mask(begin, tree.offsets, tree.visible)
        many = [t.expand(rows, -1, -1, -1) for t in (query, key[:, :, :view], value[:, :, :view])]
        return attend(self.variant, *many, mask, self.kind, 4.0)[-1:, path]


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(window=70), LayerKind(chunk=100)], ids=str)
def test_a_token_has_the_same_bits_as_text_in_a_chain_and_on_any_branch(
    variant: str, dtype: torch.dtype, kind: LayerKind
) -> None:
    sequence = Sequence(variant, dtype, 620, kind)
    generator = torch.Generator().manual_seed(4)
    for base in (0, 61, 130, 505, 590):
        by_itself = [sequence.verified([-1], [0], base + token, 640) for token in range(5)]
        assert torch.equal(torch.cat(by_itself, 1), sequence.whole[:, base : base + 5])
        for nodes, rows, view in ((5, 1, 640), (12, 3, 700), (90, 1, 1300)):
            parents, path = [-1], [0]
            for node in range(1, nodes):
                grows = len(path) < 5 and (
                    nodes - node <= 5 - len(path) or bool(torch.rand(1, generator=generator) < 0.2)
                )
                parents.append(path[-1] if grows else int(torch.randint(node, (1,), generator=generator)))
                path += [node] * grows
            ours = sequence.verified(parents, path, base, view, rows, spare=rows * 7)
            assert torch.equal(ours, sequence.whole[:, base : base + 5]), (base, nodes)


@each_variant
def test_text_has_the_same_bits_in_passes_of_any_length_and_with_any_number_of_threads(variant: str) -> None:
    sequence, before = Sequence(variant, torch.bfloat16, 1200, LayerKind(), width=64), torch.get_num_threads()
    try:
        for count, threads in ((1200, 1), (1200, 3), (1200, 8), (300, 2), (77, 5), (1, 4)):
            torch.set_num_threads(threads)
            text = causal_block(1, count, CPU)
            for begin in range(0, 1200 - count + 1, max(count, 97)):
                part = slice(begin, begin + count)
                view = begin + count
                mask = pack_mask(torch.tensor([begin]), text.offsets, None)
                parts = sequence.query[:, :, part], sequence.key[:, :, :view], sequence.value[:, :, :view]
                assert torch.equal(attend(variant, *parts, mask, LayerKind(), 4.0), sequence.whole[:, part]), (
                    count,
                    threads,
                )
    finally:
        torch.set_num_threads(before)


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_node_has_the_same_bits_however_many_stretches_of_a_long_text_a_thread_takes_at_a_time(
    variant: str, dtype: torch.dtype
) -> None:
    tree, before = Topology.chain(0).tensors(1, CPU), torch.get_num_threads()
    mask = pack_mask(torch.tensor([5900]), tree.offsets, tree.visible)
    query = noise(1, 12, 1, 64, dtype=dtype)
    key, value = noise(1, 6, 6000, 64, dtype=dtype, seed=1), noise(1, 6, 6000, 64, dtype=dtype, seed=2)
    try:
        torch.set_num_threads(1)
        alone = attend(variant, query, key, value, mask)
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert torch.equal(attend(variant, query, key, value, mask), alone), threads
    finally:
        torch.set_num_threads(before)


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_changes_only_what_sees_it(variant: str, dtype: torch.dtype) -> None:
    query, key, value = (noise(1, heads, 130, 48, dtype=dtype, seed=seed) for seed, heads in enumerate((6, 1, 1)))
    text = causal_block(1, 130, CPU)
    mask = pack_mask(torch.tensor([0]), text.offsets, None)
    finite = attend(variant, query, key, value, mask)
    for token in (2, 40, 70, 129):
        infinite = value.clone()
        infinite[:, :, token, ::5] = float("inf")
        ours = attend(variant, query, key, infinite, mask)
        assert torch.equal(ours[:, :token], finite[:, :token]), token
        assert not ours[:, token:, :, ::5].isfinite().any(), token


@each_variant
def test_a_row_in_front_of_its_beginning_gets_zeros(variant: str) -> None:
    key = torch.full((1, 1, 64, 16), float("nan"))
    tree = Topology.chain(1).tensors(1, CPU)
    out = attend(variant, noise(1, 1, 2, 16), key, key, pack_mask(torch.tensor([-2]), tree.offsets, tree.visible))
    assert torch.equal(out, torch.zeros_like(out))


@each_variant
def test_what_a_layer_looks_at_is_read_where_it_is_and_strides_do_not_matter(variant: str) -> None:
    tree = branching(7, 2)
    mask = pack_mask(torch.tensor([40, 3]), tree.offsets, tree.visible)
    query, key, value = noise(2, 4, 7, 24), noise(2, 2, 64, 24, seed=1), noise(2, 2, 64, 40, seed=2)
    whole = attend(variant, query, key, value, mask)
    apart = [
        torch.cat([t, t], 3).transpose(1, 2).contiguous().transpose(1, 2)[..., : t.shape[3]]
        for t in (query, key, value)
    ]
    assert torch.equal(attend(variant, *apart, mask), whole)


@each_variant
@pytest.mark.parametrize("wrong", ["numbers", "order", "int8"])
def test_a_wrong_attention_is_refused(variant: str, wrong: str) -> None:
    right = kernels(variant)

    def odd(query: Tensor, *rest: Any) -> Tensor:
        out = right.slot_attention(query, *rest)
        if wrong == "order":
            return out * (1 + query.shape[2] * 2**-8)
        return out * (1.1 if wrong == "numbers" or rest[0].dtype == torch.int8 else 1)

    broken = replace(right, slot_attention=odd)
    assert "attention" in str(cpu.check(broken))
    assert cpu.check(right) is None
