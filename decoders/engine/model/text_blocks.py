"""Ordinary text as a block of nodes: by itself, or in front of a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...tree import TreeTensors


class LeadingText(NamedTuple):
    """Text that a block begins with: nodes in front of its root that see nothing behind themselves.

    Attributes:
        length: nodes of every row.
        latest_start: of the slots in which it begins, the largest of all rows, for the host.
    """

    length: int = 0
    latest_start: int = 0


def causal_block(rows: int, n: int, device: torch.device) -> TreeTensors:
    """An ordinary stretch of text as a block: a chain of `n` nodes, none of which is verified."""
    index = torch.arange(n, device=device)
    visible = (index[:, None] >= index[None]).expand(rows, n, n)
    offsets = index.expand(rows, n)
    return TreeTensors((offsets - 1).clamp(min=0), offsets, visible, visible)


def after_text(count: int, tree: TreeTensors) -> TreeTensors:
    """`tree` with `count` tokens of text in front of its root, for a forward pass: offsets and visibility only."""
    text = causal_block(tree.offsets.shape[0], count, tree.offsets.device)
    n = count + len(tree)
    index = torch.arange(n, device=tree.offsets.device)
    pad = torch.nn.functional.pad
    # What is in front of the root is seen by everything from the root on.
    in_front = (index[:, None] >= count) & (index[None] < count)
    visible = pad(tree.visible, (count, 0, count, 0)) | pad(text.visible, (0, len(tree), 0, len(tree))) | in_front
    offsets = torch.cat([text.offsets, tree.offsets + count], dim=1)
    return TreeTensors(offsets, offsets, visible, visible)
