"""Rounds the sizes of tensors up to buckets, so that few sizes occur.

On CUDA every size needs its own recording, so rows, nodes, slots and prefill chunks are rounded up to the next bucket. On the CPU
nothing is recorded: `static` is False, and most sizes stay as they are. Compiled code has dynamic sizes on both devices.

==============  ==========================================  =================================
size            buckets on CUDA                             on the CPU
==============  ==========================================  =================================
rows            1, 2, 4, 8, …                               as they are
nodes           4, 8, 16, 32, 64, 128, then 256, 384, …     as they are, at least 3
slots           256, 512, 1024, …                           few multiples of 64
prefill chunk   32, 64, … up to the call's chunk            as they are
==============  ==========================================  =================================

In low precision on the CPU, nodes and chunks are multiples of 4 (:func:`row_multiple`). A step without a draft runs one node per row
instead of 3 if that gives the same bits (:meth:`~decoders.engine.model.target.Target.takes_single_nodes`).
"""

from __future__ import annotations

import functools

import torch

#: Least number of nodes of a block: 1 and 2 nodes would need separate graphs, and 3 nodes cost little more.
LEAST_NODES, LEAST_STATIC_NODES = 3, 4
#: Larger blocks are rounded up to a multiple of this size, because rounding up to a power of two would compute up to twice as much.
NODE_STEP = 128
LEAST_SLOTS, SLOT_STEP = 256, 64
#: The cache has room for a block of up to this many nodes after the longest row.
BLOCK_MARGIN = 64
LEAST_CHUNK = 32
#: Number of a matrix's rows (tokens) that torch's CPU kernels sum together in low precision; see :func:`row_multiple`.
ROWS = 4
#: A view (the slots that attention reads) has a multiple of 512 slots plus one of these numbers. In all such views, PyTorch's attention
#: on the CPU gives a node the same bits.
VIEWS = (0, 64, 128, 192, 384, 448, 512)


def row_bucket(rows: int, static: bool = True) -> int:
    """The padded number of rows of a batch. If sizes are static, it is a power of two. Padding rows are treated as ended rows."""
    return _power_of_two(rows) if static else rows


def node_bucket(nodes: int, static: bool = True, multiple: int = 1) -> int:
    """The padded size of a block of the size `nodes`, root included. If sizes are not static, it is a multiple of `multiple`."""
    if not static:
        return round_up(max(nodes, LEAST_NODES), multiple)
    if nodes > NODE_STEP:
        return -(-nodes // NODE_STEP) * NODE_STEP
    return max(_power_of_two(nodes), LEAST_STATIC_NODES)


def slot_bucket(slots: int, static: bool = True) -> int:
    """`slots`, the size of a cache or of attention's view of the cache, rounded up to the next bucket."""
    return max(_power_of_two(slots), LEAST_SLOTS) if static else max(-(-slots // SLOT_STEP), 1) * SLOT_STEP


def view_bucket(length: int) -> int:
    """Rounds `length` up to a number of slots that attention may look at (:data:`VIEWS`). Used if sizes are dynamic."""
    full, rest = divmod(length, 512)
    return full * 512 + next(size for size in VIEWS if size >= rest)


@functools.cache
def view_sizes(slots: int, static: bool = True) -> tuple[int, ...]:
    """The numbers of slots that attention may look at in a cache of the size `slots`, in ascending order."""
    return (slots,) if static else tuple(size for size in range(0, slots, SLOT_STEP) if view_bucket(size) == size)


def row_multiple(dtype: torch.dtype, device: torch.device, rounds: bool = False) -> int:
    """The sizes of blocks and chunks of text must be multiples of this number: :data:`ROWS` on a CPU in low precision, else 1.

    In low precision, torch's CPU kernels sum the last one to three tokens in another order if their number is no multiple of 4.
    """
    return ROWS if device.type == "cpu" and low_precision(dtype, rounds) else 1


def low_precision(dtype: torch.dtype, rounds: bool = False) -> bool:
    """Whether a difference in the last bit of an intermediate value may change a token. In float32 this practically never happens.

    rounds: whether intermediate values are rounded to a lower precision than `dtype`.
    """
    return rounds or dtype in (torch.bfloat16, torch.float16)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def slots_for(tokens: int, static: bool = True) -> int:
    """The number of slots per row for a text and a block after it. tokens: number of tokens of the text.

    If sizes are dynamic, a view must be smaller than the cache, because graphs are traced with different sizes for view and cache.
    """
    return slot_bucket(tokens + BLOCK_MARGIN) if static else view_bucket(tokens + BLOCK_MARGIN) + SLOT_STEP


def prefill_chunks(tokens: int, chunk: int, static: bool = True, least: int = 1) -> list[tuple[int, int]]:
    """The passes that prefill `tokens` tokens, as pairs ``(start, size)`` of at most `chunk` tokens each. If sizes are static, the last
    size is rounded up to a bucket; otherwise it is at least `least`.

    Padding after the prompt goes to slots that the next block overwrites before attention reads them. The cache needs room for padding.
    """
    passes = [(start, chunk) for start in range(0, tokens - tokens % chunk, chunk)]
    if rest := tokens % chunk:
        size = min(max(_power_of_two(rest), LEAST_CHUNK), chunk) if static else max(rest, least)
        passes.append((tokens - rest, size))
    return passes


def chunk_bucket(tokens: int, static: bool = True) -> int:
    """The largest chunk size up to `tokens`. If sizes are static, it is a power of two, and at least :data:`LEAST_CHUNK`."""
    return max(1 << (tokens.bit_length() - 1), LEAST_CHUNK) if static else tokens


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
