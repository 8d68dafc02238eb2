"""What needs the host between forward and commit: logits processors and stopping criteria that read the prefix.

Processors are run along the path the target actually takes, node by node: exactly the calls plain decoding would make,
in the same order, however large the tree is. Stateful processors therefore work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree import TreeTensors
from .core import Rows
from .sampling import SamplingPlan, choose

#: chosen token of nodes that the walk never reached: equals no proposal, not even "no guess" (-1).
NOT_REACHED = -2


@dataclass
class Prefixes:
    """Each row as transformers would show it: prompt with its left padding, then what has been generated.

    Attributes:
        prompt: ``[B, P]`` int64 as passed to ``generate``. generated: token ids per row.
    """

    prompt: Tensor
    generated: list[list[int]]

    def of(self, row: int, length: int | None = None, extra: tuple[int, ...] = ()) -> Tensor:
        """``[1, P + length + len(extra)]``: the row's first `length` generated tokens (all by default), then `extra`."""
        tail = self.generated[row][:length] + list(extra)
        return torch.cat([self.prompt[row], torch.tensor(tail, dtype=torch.int64, device=self.prompt.device)])[None]


Processors = Callable[[Tensor, Tensor], Tensor]


def call_for_row(processors: Processors, ids: Tensor, scores: Tensor, row: int, rows: int) -> Tensor:
    """``processors(ids, scores)`` for one row of a batch: ids ``[1, P]``, scores ``[1, V]`` to ``[V]``.

    Processors may hold per-row data (padding lengths, allowed tokens by batch index). Rows have different lengths here,
    so each is shown a batch that repeats it, of which its own row counts.
    """
    if rows == 1:
        return processors(ids, scores)[0]
    return processors(ids.expand(rows, -1).contiguous(), scores.expand(rows, -1).contiguous())[row]


def choose_along_path(
    nodes: Tensor,
    tree: TreeTensors,
    logits: Tensor,
    rows: Rows,
    prefixes: Prefixes,
    processors: Processors,
    plan: SamplingPlan,
) -> tuple[Tensor, Tensor]:
    """Walks every row's tree along the target's own choices.

    Returns:
        chosen ``[B, N]`` int64, :data:`NOT_REACHED` off the path, and scores ``[B, N, V]``, zero off the path.
    """
    batch, n = nodes.shape
    chosen = torch.full((batch, n), NOT_REACHED, dtype=torch.int64, device=nodes.device)
    scores = torch.zeros_like(logits)
    tokens, parents = nodes.tolist(), tree.parents.tolist()
    candidate = tree.ancestors[:, :, 0].tolist()
    stops = set(rows.sampling.stop_tokens.tolist())
    room = (rows.limit - rows.length).tolist()
    for row in range(batch):
        if rows.finished[row]:
            continue
        node, path = 0, ()
        generated = torch.tensor([[len(prefixes.generated[row])]], device=nodes.device)
        while True:
            ids = prefixes.of(row, extra=path)
            scores[row, node] = call_for_row(processors, ids, logits[row, node][None].clone(), row, batch)
            inputs = type(rows.sampling)(
                rows.sampling.values, rows.sampling.keys[row : row + 1], rows.sampling.stop_tokens
            )
            token = int(choose(scores[row, node][None, None], plan, inputs, generated + len(path)))
            chosen[row, node] = token
            path += (token,)
            following = [
                child for child in range(node + 1, n)
                if parents[row][child] == node and candidate[row][child] and tokens[row][child] == token
            ]  # fmt: skip
            if not following or token in stops or len(path) >= room[row]:
                break
            node = following[0]
    return chosen, scores
