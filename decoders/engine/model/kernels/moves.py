"""Moves the keys and values of an accepted path to successive slots. On CUDA, one launch with a table of addresses moves all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_compat import is_fake
from . import operator


def places_of(buffers: Sequence[Tensor]) -> Tensor:
    """A table ``[M, 3]`` int64. Per buffer and head: the address of row 0's first slot, the bytes from row to row, the bytes of a slot.

    buffers: ``[B, heads, L, dim]`` each, whole contiguous tensors or some rows of them.
    """
    places = []
    for buffer in buffers:
        row, head, slot = (stride * buffer.itemsize for stride in buffer.stride()[:3])
        begin = 0 if is_fake(buffer) else buffer.data_ptr()  # no kernel ever runs on fake tensors
        places += [(begin + own * head, row, slot) for own in range(buffer.shape[1])]
    return torch.tensor(places, dtype=torch.int64).view(-1, 3).to(buffers[0].device)


move_in_one_launch = operator(
    "move_slots(Tensor places, Tensor base, Tensor path, Tensor(a!)[] buffers) -> ()",
    "moves_triton.move",
    lambda *_: None,
)
