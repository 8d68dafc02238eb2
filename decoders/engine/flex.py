"""Block-sparse FlexAttention over the slot cache: the CUDA counterpart of the additive masks.

Slots behind the longest row cost nothing: whole blocks of the cache are skipped by a block mask made on the device from
the rows' lengths. What a block mask needs travels to the layers as one small 4-D tensor, in the place of the mask that
model code hands through untouched.

Few queries and a long cache keep a GPU busy only if the cache is split among its processors ("flash decoding"). FlexAttention has
such a kernel for fewer than 128 queries per head and a power of two of query heads per key head. :class:`PackedMask` packs every block
of a tree so that this holds, whatever the model's ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from . import attention
from .attention import KIND_ATTRIBUTE, LayerKind
from .compiled.per_shape import PerShape, compile_static
from .torch_compat import flex_decoding_takes_several_programs

NAME = "decoders_flex"
KINDS_ATTRIBUTE = "decoders_layer_kinds"
FUSED_ATTRIBUTE = "decoders_fused_attention"
#: Slots per block of keys, and queries per tile.
BLOCK = 128
#: The kernel that splits the cache takes fewer queries per head than this.
SPLIT_BELOW = 128
#: Blocks with more nodes fill the device by their queries alone: prefill.
MOST_PACKED_NODES = 128
#: Most heads that the queries of one key head are dealt out to.
MOST_PARTS = 16
#: Query rows per program. More than 128 would have no kernel at all (they must divide BLOCK), 128 wide heads no registers.
MOST_ROWS_PER_PROGRAM = 64
#: Triton's matrix product takes no narrower heads.
LEAST_HEAD_DIM = 16


@torch.compiler.assume_constant_result
def takes_several_programs() -> bool:
    """See :func:`~decoders.engine.torch_compat.flex_decoding_takes_several_programs`."""
    return flex_decoding_takes_several_programs()


@dataclass(frozen=True)
class PackedMask:
    """Where the queries of a block stand: those of a GQA group are rows of one key head, dealt out to `parts` heads.

    Row ``r = (h % parts) · rows + q`` of key head ``h // parts`` holds node ``r % nodes`` of the group's query head ``r // nodes``;
    rows from ``group · nodes`` on are padding.

    Attributes:
        heads: key heads.
        group: query heads per key head.
        nodes: queries of the block.
        parts: a power of two; 0 where queries are not packed.
        rows: rows per head.
    """

    heads: int
    group: int
    nodes: int
    parts: int
    rows: int

    @staticmethod
    def of(q_heads: int, kv_heads: int, nodes: int) -> PackedMask:
        group = q_heads // kv_heads
        total, parts = group * nodes, 1
        while -(-total // parts) >= SPLIT_BELOW:
            parts *= 2
        too_many = parts > MOST_PARTS or (total > MOST_ROWS_PER_PROGRAM and not takes_several_programs())
        if nodes > MOST_PACKED_NODES or too_many:
            return PackedMask(kv_heads, group, nodes, 0, nodes)
        return PackedMask(kv_heads, group, nodes, parts, -(-total // parts))

    @property
    def shared(self) -> bool:
        """Whether several heads of queries share one of keys."""
        return (self.parts or self.group) > 1

    @property
    def kernel_options(self) -> dict | None:
        """Query rows per program; left to FlexAttention, the size would grow with the block until no kernel fits."""
        if not self.parts:
            return None
        rows = 1 << (self.rows * self.parts - 1).bit_length()
        return {"BLOCK_M": min(max(rows, 16), MOST_ROWS_PER_PROGRAM)}

    def node(self, h: Tensor, q: Tensor) -> Tensor:
        """The node at row `q` of head `h`. Kernels also ask for the padding of their tiles: it gets some node's answer."""
        if not self.parts:
            return q.clamp(max=self.nodes - 1)
        return (q if self.parts == 1 else h % self.parts * self.rows + q) % self.nodes

    def pack(self, query: Tensor) -> Tensor:
        """``[B, Hq, N, D]`` → ``[B, Hkv · parts, rows, D]``."""
        if not self.parts:
            return query
        b, _, n, d = query.shape
        packed = query.reshape(b, self.heads, self.group * n, d)
        padding = self.parts * self.rows - self.group * n
        if padding:
            packed = F.pad(packed, (0, 0, 0, padding))
        return packed.reshape(b, self.heads * self.parts, self.rows, d)

    def unpack(self, out: Tensor) -> Tensor:
        """``[B, Hkv · parts, rows, …]`` → ``[B, Hq, N, …]``."""
        if not self.parts:
            return out
        b, rest = out.shape[0], out.shape[3:]
        rows = out.reshape(b, self.heads, self.parts * self.rows, *rest)[:, :, : self.group * self.nodes]
        return rows.reshape(b, self.heads * self.group, self.nodes, *rest)


def pack_mask(base: Tensor, offsets: Tensor, visible: Tensor) -> Tensor:
    """``[B, 1, N+1, K+1]`` int32: visibility ``[B, N, K]`` with the nodes' offsets ``[B, K]`` as one more row and their base
    ``[B]`` as one more column.
    """
    table = torch.cat([visible.int(), offsets[:, None].int()], dim=1)
    return torch.cat([table, base[:, None, None].int().expand(-1, table.shape[1], 1)], dim=2)[:, None]


def unpack_mask(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`pack_mask` was given, as int32: kernels read these views as they are."""
    queries, n = packed.shape[2] - 1, packed.shape[3] - 1
    return packed[:, 0, 0, n], packed[:, 0, queries, :n], packed[:, 0, :queries, :n]


def block_mask(packed: Tensor, kind: LayerKind, slots: int, packing: PackedMask | None = None) -> BlockMask:
    """The mask of one kind of layer over `slots` slots; see :func:`decoders.engine.attention.build_mask` for the rule.

    Its size follows the slots of the cache, which are rounded to buckets, and never the rows' lengths.
    """
    base, offsets, visible = unpack_mask(packed)
    queries, n = visible.shape[1:]
    packing = packing or PackedMask(1, 1, queries, 0, queries)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        node = k - base[b]
        inside = node.clamp(0, n - 1)
        q = packing.node(h, q)
        in_block = (node >= 0) & (node < n)
        allowed = (node < 0) | (in_block & (visible[b, q, inside] != 0))
        position_q = base[b] + offsets[b, n - queries + q]
        position_k = torch.where(in_block, base[b] + offsets[b, inside], k)
        return kind.narrow(allowed, position_q, position_k)

    blocks = -(-slots // BLOCK)
    end = ((base + n + BLOCK - 1) // BLOCK).clamp(max=blocks)  # more would be read behind the end of the index
    first = torch.zeros_like(end)
    if kind.window is not None:
        first = (base - kind.window + 1).clamp(min=0) // BLOCK
    count = (end - first).clamp(min=0)[:, None, None].to(torch.int32)
    index = (first[:, None] + torch.arange(blocks, device=packed.device)).clamp(max=blocks - 1)
    tiles = -(-packing.rows // BLOCK)
    return BlockMask.from_kv_blocks(
        count.expand(-1, 1, tiles).contiguous(),
        index[:, None, None].to(torch.int32).expand(-1, 1, tiles, -1).contiguous(),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
        seq_lengths=(packing.rows, slots),
        compute_q_blocks=False,
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, kind: LayerKind, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """``[B, Hq, N, Dv]``. query: ``[B, Hq, N, D]``. key, value: ``[B, Hkv, L, D]``. mask: of :func:`pack_mask`. sinks: ``[Hq]``."""
    packing = PackedMask.of(query.shape[1], key.shape[1], query.shape[2])
    width, value_width = query.shape[3], value.shape[3]
    if width < LEAST_HEAD_DIM:  # zeros add nothing to a product, and the scale is that of the real width
        query, key = (F.pad(t, (0, LEAST_HEAD_DIM - width)) for t in (query, key))
    if value_width < LEAST_HEAD_DIM:
        value = F.pad(value, (0, LEAST_HEAD_DIM - value_width))

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    fused: Any = flex_attention  # its annotations are those of one overload
    result = fused(
        packing.pack(query), key, value,
        score_mod=cap if softcap is not None else None,
        block_mask=block_mask(mask, kind, key.shape[2], packing),
        scale=scale,
        enable_gqa=packing.shared,
        kernel_options=packing.kernel_options,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return packing.unpack(result)[..., :value_width]
    # A sink is one more key with value zero: it takes its share of the softmax and nothing else.
    out, lse = packing.unpack(result[0]), packing.unpack(result[1].lse)
    return (out * torch.sigmoid(lse - sinks.float()[None, :, None])[..., None].to(out.dtype))[..., :value_width]


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, kind: LayerKind, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """The same by additive masks over all slots, for where :func:`attend` cannot be compiled: slower, and needs no compiler."""
    base, offsets, visible = unpack_mask(mask)
    bias = attention.build_mask((kind,), base.long(), offsets.long(), visible.bool(), key.shape[2], query.dtype)
    out, _ = attention.tree_attention(_NO_KIND, query, key, value, bias, scale, softcap=softcap, s_aux=sinks)
    return out.transpose(1, 2)


_NO_KIND = nn.Module()  # its mask has one kind only, the first


class FusedAttention:
    """:func:`attend` compiled by itself, for passes that are not compiled as a whole; one for each model.

    Run as it is, FlexAttention makes the whole score matrix, and compiles a public function that everything in the process shares.

    Args:
        compile: as in :class:`~decoders.engine.compiled.per_shape.PerShape`; by default the compiler of the tensors' device.
    """

    def __init__(self, compile: Callable[[Callable], Callable] | None = None) -> None:
        self.shapes: dict[str, PerShape] = {}
        self._compile = compile

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, kind: LayerKind,
        scale: float, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        device = query.device.type
        if device not in self.shapes:
            self.shapes[device] = PerShape(attend, self._compile or _compiler(device), attend_densely)
        given = (query.shape, query.dtype, key.shape, value.shape, mask.shape, sinks is None, kind, scale, softcap)
        return self.shapes[device](given, query, key, value, mask, sinks, kind, scale, softcap)


def _compiler(device: str) -> Callable[[Callable], Callable]:
    """On the CPU, FlexAttention is there for tests: what would be compiled is traced, and run by plain operations."""
    if device == "cpu":
        return lambda function: torch.compile(function, fullgraph=True, dynamic=False, backend="eager")
    return compile_static


_shared = FusedAttention()


def prepare(model: nn.Module, kinds: tuple[LayerKind, ...], kind_of_layer: Sequence[int]) -> FusedAttention:
    """Tells every layer of a private module tree its kind, and gives the tree a fused attention of its own."""
    fused = FusedAttention()
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(kind_of_layer):
            setattr(module, KIND_ATTRIBUTE, kind_of_layer[layer])
            setattr(module, KINDS_ATTRIBUTE, kinds)
            setattr(module, FUSED_ATTRIBUTE, fused)
    return fused


def flex_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same contract as :func:`decoders.engine.attention.tree_attention`, with a packed mask (:func:`pack_mask`)."""
    kind = getattr(module, KINDS_ATTRIBUTE)[getattr(module, KIND_ATTRIBUTE, 0)]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        out = attend(query, key, value, attention_mask, s_aux, kind, scale, softcap)
    else:
        fused = getattr(module, FUSED_ATTRIBUTE, _shared)
        out = fused(query, key, value, attention_mask, s_aux, kind, scale, softcap)
    return out.transpose(1, 2).contiguous(), None
