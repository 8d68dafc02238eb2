"""The kernel that moves slots of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

#: The number of slots that a program moves at once, and the greatest number of words of each slot that it moves.
NODES, WORDS = 16, 64
#: Bytes of a word.
WORD = 8


@triton.jit
def _move(first_slot, words, begin, path, nodes, slots, NODES: tl.constexpr, WORDS: tl.constexpr):
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    for first in range(0, nodes, NODES):
        place = first + tl.arange(0, NODES)
        node = tl.minimum(tl.load(path + place, mask=place < nodes, other=0), nodes - 1)
        here = (node > place)[:, None] & (word < words)[None, :]
        source, target = begin + node, begin + place
        source, target = tl.where(source < 0, source + slots, source), tl.where(target < 0, target + slots, target)
        values = tl.load(first_slot + source[:, None] * words + word[None, :], mask=here)
        tl.debug_barrier()  # all threads must read before any thread writes, because a slot may be source and target
        tl.store(first_slot + target[:, None] * words + word[None, :], values, mask=here)


@triton.jit(do_not_specialize=["nodes", "slots"])
def _move_slots(
    places, base, path, nodes, slots, WORD: tl.constexpr, SMALL: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr
):
    """Moves up to ``WORDS`` words of each slot of a path, for one head of a buffer and one row."""
    place, row = places + tl.program_id(0) * 3, tl.program_id(1).to(tl.int64)
    begin, own = tl.load(base + row), path + row * nodes
    address, size = tl.load(place) + row * tl.load(place + 1), tl.load(place + 2)
    if size % WORD == 0:
        _move(address.to(tl.pointer_type(tl.int64)), size // WORD, begin, own, nodes, slots, NODES, WORDS)
    elif SMALL == 4:
        _move(address.to(tl.pointer_type(tl.int32)), size // SMALL, begin, own, nodes, slots, NODES, WORDS)
    elif SMALL == 2:
        _move(address.to(tl.pointer_type(tl.int16)), size // SMALL, begin, own, nodes, slots, NODES, WORDS)
    elif SMALL == 1:
        _move(address.to(tl.pointer_type(tl.int8)), size // SMALL, begin, own, nodes, slots, NODES, WORDS)


def move(places: Tensor, base: Tensor, path: Tensor, buffers: Sequence[Tensor]) -> None:
    """Copies slot ``base[b] + path[b, n]`` to slot ``base[b] + n``, in every row ``b`` of all buffers. The nodes of a path ascend, so
    no slot is written before it is read.

    Args:
        places: the result of :func:`~decoders.engine.model.kernels.moves.places_of`.
        buffers: the buffers in `places`, all with the same number of slots. Negative slots count from a buffer's end.
    """
    path, sizes = path.contiguous(), {buffer.shape[3] * buffer.itemsize for buffer in buffers}
    odd = [size & -size for size in sizes if size % WORD]  # for example the scales of quantized keys
    small = min(odd, default=0)
    words = max(size // (WORD if size % WORD == 0 else small) for size in sizes)
    block = min(triton.next_power_of_2(words), WORDS)
    _move_slots[(len(places), len(path), triton.cdiv(words, block))](
        places, base, path, path.shape[1], buffers[0].shape[2], WORD=WORD, SMALL=small, NODES=NODES, WORDS=block, num_warps=2,
        enable_fp_fusion=True,  # without it, Triton 3.9 warns of its default
    )  # fmt: skip
