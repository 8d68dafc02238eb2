"""Invariance: a node's logits have the same bits in every block. This file checks whether a model on the CPU has this property.

The following was measured with torch 2.13 on AVX512 (oneDNN, MKL, ATen) and one to three threads; :func:`check` measures a given model:

- This package's matrix products (:mod:`~decoders.engine.model.kernels.products`, :mod:`~decoders.engine.model.weights.quantized`) give
  a row the same bits for any number of rows. torch's products give, at best, the same bits for any number of rows except one.
- This package's attention (:mod:`~decoders.engine.model.kernels.attention`) sums over keys in the order of a node's path, so the node
  has the same bits in every block, whatever slots the path is in. The bits of PyTorch's attention depend on sizes and slots:

  - Fused attention works on 32 query rows of a head at a time. It sums a remainder of one to three rows in another order, so blocks
    and chunks of text are multiples of four tokens (:func:`~decoders.engine.model.buckets.row_multiple`).
  - Fused attention works on 512 slots at once. It sums a remainder of more than 192 and fewer than 384 slots in another order
    (:func:`~decoders.engine.model.buckets.view_bucket`).
  - Softmax sums by slot modulo 16, and the product with values sums by groups of slots. So a path has the same bits only if its nodes
    are in slots ``base + depth``, as in a chain or on a tree's first branch. Tokens accepted on another branch run again before the
    next block (:func:`branch_length`). While another branch is verified, a near-tie between two tokens may come out differently.
- silu, sigmoid and tanh-gelu compute the last elements of every thread's share with scalar code, which rounds differently
  (:func:`~decoders.engine.model.weights.same_bits.align_activations`). exp, tanh, gelu (erf), softmax and norms round all elements
  alike.
- torch uses another kernel if an expert has a single row, and an expert's number of rows depends on the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from ...tree import Topology
from .blocks import PassInput
from .buckets import low_precision, node_bucket, slot_bucket, view_bucket
from .cache import CacheBuffers
from .facts import Invariance
from .target import Target


def branch_length(path: Tensor, emitted: list[int]) -> int:
    """The number of tokens at the end of a step's path that are not in the slots ``base + depth``: the maximum over all rows.

    path: ``[B, N]`` int64, the accepted nodes; emitted: per row, the number of new tokens.
    """
    longest = 0
    for nodes, count in zip(path.tolist(), emitted, strict=True):
        moved = next((depth for depth in range(count) if nodes[depth] != depth), count)
        longest = max(longest, count - moved)
    return longest


#: Name of the comparison with a tree's branch. The nodes of the branch are not in the slots ``base + depth``.
BRANCHES = "the branch of a tree"
#: Name of the comparison with a block of one node in one row.
SINGLE = "whether a block has one node"


def brief_check(target: Target) -> Invariance | None:
    """Makes only the comparisons that fail most often, in few passes. ``decoders doctor MODEL`` makes all comparisons.

    Returns None in float32, where bits matter little, and for models with recurrent layers, whose blocks run level by level.
    """
    if target.recurrent or not low_precision(target.dtype, target.rounds):
        return None
    length = 16
    return _at_once(target, length) or check(target, length, comparisons=4)


@torch.no_grad()
def check(target: Target, length: int = 40, comparisons: int | None = None) -> Invariance:
    """Runs random text in several ways, and compares logits, keys and values bit for bit.

    length: number of tokens of the text; comparisons: number of comparisons, None for all.
    """
    compared: dict[str, bool] = {}
    for what, left, right in islice(_comparisons(target, length), comparisons):
        compared[what] = compared.get(what, True) and torch.equal(left, right)
    single = compared.pop(SINGLE, False)
    differs = tuple(what for what, equal in compared.items() if not equal)
    return Invariance(not set(differs) - {BRANCHES}, differs, single)


class _Text:
    """A random text of `length` tokens, which can be prefilled and continued in several ways."""

    def __init__(self, target: Target, length: int) -> None:
        self.target, self.length = target, length
        self._multiple = target.multiple
        self._view_of = slot_bucket if target.static else view_bucket
        slots = self._view_of(length + 64) + 512
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(
            0, target.vocabulary.embeddings, (1, length + 8), generator=generator, device="cpu"
        ).to(target.device)
        self._slots = torch.arange(slots, device=target.device)

    def read(self, *chunks: int, rows: int = 1) -> CacheBuffers:
        """Prefills the text and returns the cache. chunks: number of tokens of each prefill pass."""
        target, done = self.target, 0
        buffers = CacheBuffers.allocate(target.layout, rows, len(self._slots) + 64)
        for size in chunks:
            tokens = self._tokens[:, done : done + size].expand(rows, -1)
            start = torch.full((rows,), done, device=target.device)
            target.prefill(tokens, start, buffers, self._slots[: self._view_of(done + size)], done)
            done += size
        return buffers

    def run(
        self, buffers: CacheBuffers, tree: Topology, path: list[int], rows: int = 1, spare: int = 0, padded: bool = True
    ) -> Tensor:
        """Runs a block after the text, with the text's next tokens in the nodes of `path`. Returns the logits ``[D, V]`` along `path`.

        spare: number of further slots that attention reads; padded: whether the block is padded to a bucket.
        """
        target, length, device = self.target, self.length, self.target.device
        if padded:
            tree = tree.padded(node_bucket(len(tree), target.static, self._multiple))
        nodes = torch.arange(len(tree), device=device)[None] % target.vocabulary.embeddings
        nodes[0, path] = self._tokens[0, length : length + len(path)]
        base = torch.full((rows,), length, device=device)
        view = self._slots[: self._view_of(length + len(tree) + spare)]
        return target.forward(
            PassInput(nodes.expand(rows, -1), base, tree.tensors(rows, device), buffers, view)
        ).logits[0, path]

    def cached(self, buffers: CacheBuffers, until: int | None = None) -> Tensor:
        """Keys and values of the first row's text, or of the text's first `until` tokens, in one flat tensor."""
        return torch.cat([t[0, :, : until or self.length].reshape(-1) for t in buffers.tensors])


CHAIN, DEPTHS = Topology.chain(3), [0, 1, 2, 3]


def _at_once(target: Target, length: int) -> Invariance | None:
    """Makes several comparisons in one: two runs differ in prefill chunks, rows and block size. Returns None if any bits differ."""
    text = _Text(target, length)
    parted, whole = text.read(12, length - 12), text.read(length, rows=3)
    chained = text.run(parted, CHAIN, DEPTHS)
    same = torch.equal(text.cached(parted), text.cached(whole)) and torch.equal(
        text.run(whole, Topology.chain(11), DEPTHS, rows=3), chained
    )
    single = same and _takes_single(target) and torch.equal(_alone(text, parted), chained[:1])
    return Invariance(True, (), single) if same else None


def _takes_single(target: Target) -> bool:
    """Whether to compare a block of one node: only in low precision, with this package's attention or products."""
    ours = target.attends == "cpu" or target.products.quantized.layers or target.products.few_rows
    return bool(ours) and target.dtype != torch.float32


def _alone(text: _Text, buffers: CacheBuffers) -> Tensor:
    return text.run(buffers, Topology.chain(0), [0], padded=False)


def _comparisons(target: Target, length: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the name and the two results of each comparison. length: number of tokens of the text."""
    text = _Text(target, length)
    read, run, cached = text.read, text.run, text.cached
    plain = read(length)
    # Comparisons that are most likely to differ come first, since a brief check stops early.
    yield "how text is divided into passes", cached(read(12, length - 12)), cached(plain)
    chained = run(plain, CHAIN, DEPTHS)
    if _takes_single(target):
        yield SINGLE, _alone(text, plain), chained[:1]
    yield "the size of the block", run(plain, Topology.chain(11), DEPTHS), chained
    three = read(length, rows=3)
    yield "the number of rows", run(three, CHAIN, DEPTHS, rows=3), chained
    yield "the number of rows", cached(three), cached(plain)
    yield "whether a token is read or decoded", cached(read(length + 4), length + 4), cached(plain, length + 4)
    for draft in (0, 35):
        longer = chained[: min(draft, 3) + 1]
        yield "the size of the block", run(plain, Topology.chain(draft), DEPTHS[: len(longer)]), longer
    for spare in (64, 200, 500):
        yield "how many slots attention reads", run(plain, CHAIN, DEPTHS, spare=spare), chained
    for branches in (2, 11):
        tree = Topology.branches(branches, 3)
        yield BRANCHES, run(read(length), tree, [0, *range(len(tree) - 3, len(tree))]), chained
