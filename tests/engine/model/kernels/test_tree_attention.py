"""The attention kernel, interpreted on the CPU, beside plain attention in float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.engine.model.attention import LayerKind, build_mask
from decoders.engine.model.blocks import causal_block
from decoders.engine.model.kernels import attention_cuda, interpreted
from decoders.engine.model.kernels.attention import attend, pack_mask
from decoders.tree import Topology, TreeTensors

from ....turns import slow_but

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is off: a GPU is here, or no Triton")


def made(
    rows: int, nodes: int, view: int, *, heads: int = 1, group: int = 1, width: int = 16, value_width: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Queries, keys and values as a model hands them over: queries with heads inside, keys as the beginning of a longer cache."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = noise(rows, nodes, heads * group, width).transpose(1, 2)
    key, value = noise(rows, heads, view + 64, width), noise(rows, heads, view + 64, value_width or width)
    return query, key[:, :, :view], value[:, :, :view]


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, base: torch.Tensor, tree: TreeTensors, kind: LayerKind,
    scale: float, softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """By plain operations in float64, ``[B, N, Hq, Dv]``."""
    queries, group = query.shape[2], query.shape[1] // key.shape[1]
    visible = tree.visible[:, -queries:]
    allowed = build_mask((kind,), base, tree.offsets, visible, key.shape[2], torch.float64)[:, 0] == 0
    key, value = (t.double().repeat_interleave(group, 1) for t in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].nan_to_num()
    return (weights @ value).transpose(1, 2)


def check(
    tree: TreeTensors, base: list[int], view: int, *, queries: int | None = None, kind: LayerKind = LayerKind(),
    text: bool = False, softcap: float | None = None, sinks: bool = False, tolerance: float = 2e-6, **sizes: Any,
) -> None:  # fmt: skip
    rows, nodes = tree.offsets.shape
    query, key, value = made(rows, queries or nodes, view, **sizes)
    own = torch.randn(query.shape[1], generator=torch.Generator().manual_seed(1)) if sinks else None
    begin = torch.tensor(base)
    mask = pack_mask(begin, tree.offsets, None if text else tree.visible[:, -query.shape[2] :])
    scale = query.shape[3] ** -0.5
    ours = attend(query, key, value, mask, own, kind, None, softcap)
    plain = expected(query, key, value, begin, tree, kind, scale, softcap, own)
    assert ours.dtype == query.dtype and ours.is_contiguous()
    # Nodes in front of a row's beginning are run for nothing.
    counts = (begin[:, None] + tree.offsets[:, -query.shape[2] :]) >= 0
    assert (ours.double() - plain)[counts].abs().max() < tolerance


def branching(nodes: int, rows: int) -> TreeTensors:
    """A tree of several branches, filled up to `nodes`."""
    return Topology.branches(max(min(nodes // 3, 5), 1), max((nodes - 1) // 6, 1)).padded(nodes).tensors(rows, CPU)


CASES = {
    "one node": dict(tree=branching(1, 1), base=[150], view=256, group=4),
    "a tree and ragged rows": dict(tree=branching(16, 2), base=[0, 239], view=256, group=3),
    "more nodes than a word has bits": dict(tree=branching(80, 1), base=[130], view=256),
    "the last nodes of the largest block": dict(tree=branching(1024, 1), base=[130], view=1280, queries=40),
    "a level of a tree, whose others are in the cache": dict(tree=branching(16, 2), base=[7, 100], view=128, queries=5),
    "a window shorter than the text": dict(tree=branching(16, 2), base=[20, 200], view=256, heads=2, kind=LayerKind(window=37)),
    "a window shorter than the block": dict(tree=branching(16, 2), base=[20, 200], view=256, kind=LayerKind(window=2)),
    "chunks": dict(tree=branching(16, 2), base=[30, 330], view=384, kind=LayerKind(chunk=33)),
    "capped scores": dict(tree=branching(4, 2), base=[20, 200], view=256, softcap=0.7),
    "sinks": dict(tree=branching(4, 2), base=[0, 200], view=256, heads=2, group=2, sinks=True),
    "values narrower than keys": dict(tree=branching(4, 1), base=[140], view=192, width=24, value_width=8),
    "a width that is no power of two": dict(tree=branching(4, 1), base=[140], view=192, width=80),
    "wide heads": dict(tree=branching(4, 1), base=[140], view=192, width=256),
    "a block that begins before its row": dict(tree=branching(4, 2), base=[-2, 5], view=128),
    "bfloat16": dict(tree=branching(8, 1), base=[190], view=256, group=4, dtype=torch.bfloat16, tolerance=2e-2),
    "float16": dict(tree=branching(8, 2), base=[5, 190], view=256, dtype=torch.float16, tolerance=2e-3),
    "text whose keys are split": dict(tree=causal_block(2, 40, CPU), base=[0, 170], view=256, text=True, group=2),
    "text with a window": dict(tree=causal_block(1, 70, CPU), base=[90], view=192, text=True, kind=LayerKind(window=20)),
    "text in chunks, with sinks": dict(
        tree=causal_block(1, 70, CPU), base=[90], view=192, text=True, kind=LayerKind(chunk=50), sinks=True
    ),
}  # fmt: skip


#: Between them they go through every branch of the kernels; interpreted, a case takes most of a second.
QUICK = (
    "a tree and ragged rows",
    "more nodes than a word has bits",
    "a window shorter than the text",
    "capped scores",
    "values narrower than keys",
    "bfloat16",
    "text in chunks, with sinks",
)


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_a_block_attends_as_plain_attention_does(name: str) -> None:
    check(**CASES[name])


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(window=70)], ids=["all", "window"])
def test_a_token_of_text_has_the_same_bits_whatever_was_read_with_it(
    kind: LayerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prefix that another call has read, in a shorter cache, and beside other rows."""
    monkeypatch.setattr(attention_cuda, "FIRST_TEXT_SPLIT", 64)
    query, key, value = made(2, 80, 128, group=2)
    base, text = torch.tensor([0, 7]), causal_block(2, 80, CPU)
    whole = attend(query, key, value, pack_mask(base, text.offsets, None), None, kind)
    check(text, base.tolist(), 128, text=True, group=2, kind=kind)
    for begin, end, view in ((0, 40, 64), (40, 80, 128), (76, 80, 96)):
        rest = pack_mask(base[:1] + begin, causal_block(1, end - begin, CPU).offsets, None)
        part = attend(query[:1, :, begin:end], key[:1, :, :view], value[:1, :, :view], rest, None, kind)
        assert torch.equal(part, whole[:1, begin:end])


@pytest.mark.slow
def test_text_as_a_block_of_nodes_gives_the_same() -> None:
    check(causal_block(2, 40, CPU), [0, 100], 192)


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_tree_over_any_rows_attends_as_plain_attention_does(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(-1 if node > 1 else 0, max(node - 1, 0))) for node in range(1, nodes)]
    rows = data.draw(st.integers(1, 2))
    tree = Topology.from_parents([-1, *[max(p, 0) for p in parents]]).tensors(rows, CPU)
    view = data.draw(st.sampled_from([64, 192]))
    check(
        tree, [data.draw(st.integers(-1, view - nodes)) for _ in range(rows)], view,
        kind=LayerKind(window=data.draw(st.none() | st.integers(1, 200))), group=data.draw(st.sampled_from([1, 3])),
        sinks=data.draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_a_query_has_the_same_bits_whatever_else_is_in_its_block_batch_and_cache(dtype: torch.dtype) -> None:
    base, view = 150, 320
    query, key, value = made(1, 17, view, group=2, dtype=dtype)
    chain = Topology.chain(16).tensors(1, CPU)
    whole = attend(query, key, value, pack_mask(torch.tensor([base]), chain.offsets, chain.visible))
    for nodes, capacity in ((1, 192), (5, 256)):
        short = Topology.chain(nodes - 1).tensors(1, CPU)
        mask = pack_mask(torch.tensor([base]), short.offsets, short.visible)
        alone = attend(query[:, :, :nodes], key[:, :, :capacity], value[:, :, :capacity], mask)
        assert torch.equal(alone, whole[:, :nodes])
    others = [torch.cat([t, torch.randn_like(t)]) for t in (query, key, value)]
    pair = Topology.chain(16).tensors(2, CPU)
    beside = attend(*others, pack_mask(torch.tensor([base, 7]), pair.offsets, pair.visible))
    assert torch.equal(beside[:1], whole)


@pytest.mark.parametrize("limit", ["MOST_SCRATCH", "MOST_PAIRS"])
def test_rows_that_are_too_many_for_a_launch_are_attended_to_in_turns(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    query, key, value = made(3, 4, 256)
    tree = branching(4, 3)
    mask = pack_mask(torch.tensor([0, 100, 200]), tree.offsets, tree.visible)
    together = attend(query, key, value, mask)
    from decoders.engine.model.kernels import attention_triton

    launches: list[tuple[int, ...]] = []
    plain = attention_triton.attend_kernel

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return plain[grid]

    monkeypatch.setattr(attention_triton, "attend_kernel", Noted())
    monkeypatch.setattr(attention_cuda, limit, 1)
    assert torch.equal(attend(query, key, value, mask), together)
    assert [pairs for *_, pairs in launches] == [1] * 3


def test_splits_cover_the_slots_once_and_their_places_depend_on_nothing() -> None:
    ends: list[int] = []
    for view in (*range(1, 6000, 7), 1 << 17):
        count = attention_cuda.split_count(view)
        starts = [_start(split) for split in range(count + 1)]
        assert starts[0] == 0 and starts[count - 1] < view <= starts[count]
        ends = starts if len(starts) > len(ends) else ends
    assert all(0 < b - a <= 4096 and a % 128 == 0 for a, b in pairwise(ends)) and len(ends) <= 113


def _start(split: int) -> int:
    """As the kernels have it."""
    octave, place = divmod(split, attention_cuda.OCTAVE)
    size = attention_cuda.FIRST_SPLIT << max(octave - 1, 0)
    return (attention_cuda.FIRST_SPLIT * attention_cuda.OCTAVE << (octave - 1) if octave else 0) + place * size


def test_a_row_in_front_of_its_beginning_gets_zeros_and_no_nan() -> None:
    query, key, value = made(1, 2, 64)
    tree = Topology.chain(1).tensors(1, CPU)
    out = attend(query, key, value, pack_mask(torch.tensor([-2]), tree.offsets, tree.visible))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("view", [64, 256], ids=["at once", "in splits"])
def test_a_text_may_have_more_than_two_to_the_31_numbers(
    view: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cuda, "FIRST_TEXT_SPLIT", attention_cuda.FIRST_SPLIT)
    query, key, value = made(1, 3, view, dtype=torch.float16)
    mask = pack_mask(torch.tensor([view - 3]), causal_block(1, 3, CPU).offsets, None)
    usual = attend(query, key, value, mask)
    # A sparse file. Token 2 begins at number 2^31; in 32 bits that would be -2^31, which is in the file, too.
    far, allocate = 1 << 31, torch.Tensor.new_empty
    numbers = torch.from_file(str(tmp_path / "numbers"), shared=True, size=2 * far + 64, dtype=torch.float16)
    (tmp_path / "numbers").unlink()  # the mapping stays
    wide, out = (numbers.as_strided(query.shape, (0, 0, far // 2, 1), far + place) for place in (0, 32))
    wide.copy_(query)

    def given(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        return out.transpose(1, 2) if len(size) == 4 else allocate(self, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", given)
    assert torch.equal(attend(wide, key, value, mask), usual)
