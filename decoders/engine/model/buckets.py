"""Buckets of sizes, which bound the number of recordings.

On CUDA every size needs a recording, so rows, nodes, slots and prefill chunks are rounded up to the next bucket. The CPU records
nothing: `static` is false, and only least sizes matter. Compiled code has dynamic sizes on both.

==============  ==========================================  =================================
size            buckets on CUDA                             on the CPU
==============  ==========================================  =================================
rows            1, 2, 4, 8, …                               as they are
nodes           4, 8, 16, 32, 64, 128, then 256, 384, …     as they are, at least 3
slots           256, 512, 1024, …                           few multiples of 64
prefill chunk   32, 64, … up to the call's chunk            as they are
==============  ==========================================  =================================

In low precision on the CPU, nodes and chunks come in multiples of 4, and views have few sizes (:mod:`.invariance`). With several rows
or quantized weights, steps without a draft run one node per row if this gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...tree import Topology, TreeTensors

#: Least number of nodes of a block: 1 and 2 would compile separate graphs, and 3 cost little more.
LEAST_NODES, LEAST_STATIC_NODES = 3, 4
#: Larger blocks grow by this many nodes; doubling would compute up to twice as much.
NODE_STEP = 128
LEAST_SLOTS, SLOT_STEP = 256, 64
#: A block of up to this size fits after the longest row without enlarging the cache.
BLOCK_MARGIN = 64
LEAST_CHUNK = 32
#: In low precision on the CPU, blocks and chunks of text are multiples of this.
ROWS = 4
#: Numbers of slots in attention's last block of 512 at which the CPU's kernels give the same bits.
VIEWS = (0, 64, 128, 192, 384, 448, 512)


def row_bucket(rows: int, static: bool = True) -> int:
    """Rows of a batch, rounded up to a power of two; padding rows count as ended from the start."""
    return _power_of_two(rows) if static else rows


def node_bucket(nodes: int, static: bool = True, multiple: int = 1) -> int:
    """Nodes of a block, root included; if sizes are not static, a multiple of `multiple`."""
    if not static:
        return round_up(max(nodes, LEAST_NODES), multiple)
    if nodes > NODE_STEP:
        return -(-nodes // NODE_STEP) * NODE_STEP
    return max(_power_of_two(nodes), LEAST_STATIC_NODES)


def slot_bucket(slots: int, static: bool = True) -> int:
    """Slots of a cache, or of attention's view of it."""
    return max(_power_of_two(slots), LEAST_SLOTS) if static else max(-(-slots // SLOT_STEP), 1) * SLOT_STEP


def view_bucket(length: int) -> int:
    """The smallest number of slots from `length` up that attention may look at, if sizes are not static."""
    full, rest = divmod(length, 512)
    return full * 512 + next(size for size in VIEWS if size >= rest)


def row_multiple(dtype: torch.dtype, device: torch.device, rounds: bool = False) -> int:
    """The multiple for blocks and chunks of text: more than 1 if kernels round by groups of rows and bits matter."""
    return ROWS if device.type == "cpu" and low_precision(dtype, rounds) else 1


def low_precision(dtype: torch.dtype, rounds: bool = False) -> bool:
    """Whether a difference in the last bit may change a token; in float32, that difference is far below any near-tie.

    rounds: whether intermediate values are rounded to a lower precision.
    """
    return rounds or dtype in (torch.bfloat16, torch.float16)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def slots_for(tokens: int, static: bool = True) -> int:
    """Slots per row for `tokens` and a block after them.

    A view must be smaller than the cache for a graph with dynamic sizes, because the graph was traced with two different sizes.
    """
    return slot_bucket(tokens + BLOCK_MARGIN) if static else view_bucket(tokens + BLOCK_MARGIN) + SLOT_STEP


def prefill_chunks(tokens: int, chunk: int, static: bool = True, least: int = 1) -> list[tuple[int, int]]:
    """``(start, size)`` of the passes that read `tokens` tokens, at most `chunk` at once. The last size is rounded up to a bucket or,
    if sizes are not static, to `least` tokens.

    Padding after the prompt goes to slots that the next block overwrites before they are read; the cache needs room for it.
    """
    passes = [(start, chunk) for start in range(0, tokens - tokens % chunk, chunk)]
    if rest := tokens % chunk:
        size = min(max(_power_of_two(rest), LEAST_CHUNK), chunk) if static else max(rest, least)
        passes.append((tokens - rest, size))
    return passes


def chunk_bucket(tokens: int, static: bool = True) -> int:
    """The largest chunk of at most `tokens` tokens; at least :data:`LEAST_CHUNK`."""
    return max(1 << (tokens.bit_length() - 1), LEAST_CHUNK) if static else tokens


def pad_block(draft_tokens: Tensor, tree: Topology | TreeTensors, nodes: int) -> tuple[Tensor, Topology | TreeTensors]:
    """Pads a block to at least `nodes` nodes with "no draft token" (-1). draft_tokens: ``[B, N-1]`` int64."""
    missing = nodes - 1 - draft_tokens.shape[1]
    return (F.pad(draft_tokens, (0, missing), value=-1), tree.padded(nodes)) if missing > 0 else (draft_tokens, tree)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
