"""Designs that compute by how many tokens their cache holds, and not by the positions that they are given.

Llama 4 sharpens the attention of long texts so. One number serves no rows of several lengths, and no nodes of a tree; a single row's
nodes are given one each where the design takes that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ContextLengthError
from .cache import LayoutProbe

#: Tokens of a trial pass: attention to a single one is the same at every temperature.
PROBED = 8
#: No longer contexts are tried: some designs make a tensor of as many numbers.
LONGEST = 1 << 24


@dataclass(frozen=True)
class CountedTokens:
    """What a design does with the number of tokens in its cache.

    Attributes:
        harmless: up to so many tokens it computes as with an empty cache.
        by_node: whether it takes a number for each node of a row.
    """

    harmless: int
    by_node: bool

    def check(self, name: str, longest: int, rows: int) -> None:
        """Raises ContextLengthError if texts of up to `longest` tokens cannot be decoded in so many rows."""
        if longest <= self.harmless or (rows == 1 and self.by_node):
            return
        raise ContextLengthError(
            f"{name} computes by the number of tokens in its cache from {self.harmless} tokens on, which is one number for all rows, "
            f"and {longest} are asked for: "
            + ("decode one prompt at a time with generate, " if self.by_node else "ask for fewer, ")
            + "or call generate without strategy=."
        )


class CountingProbe(LayoutProbe):
    """Answers `count` when a layer asks how many tokens there are."""

    def __init__(self, count: int | Tensor) -> None:
        super().__init__()
        self.count = count

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        return self.count


def counted_tokens(
    logits: Callable[[CountingProbe], Tensor], context: int, device: torch.device
) -> CountedTokens | None:
    """None for designs that ask and do not mind the answer.

    Args:
        logits: of a pass over :data:`PROBED` tokens with a cache.
        context: most tokens of a text.
    """
    empty = logits(CountingProbe(0))

    def minds(count: int | Tensor, usual: Tensor = empty) -> bool:
        try:
            return not torch.equal(logits(CountingProbe(count)), usual)
        except Exception:  # whatever a design says of such an answer
            return True

    most = max(min(context, LONGEST) - PROBED, 1)
    if not minds(most):
        return None
    harmless, first = 0, most
    while first - harmless > 1:
        middle = int((max(harmless, 1) * first) ** 0.5) if first > 2 * harmless + 2 else (harmless + first) // 2
        middle = min(max(middle, harmless + 1), first - 1)
        harmless, first = (harmless, middle) if minds(middle) else (middle, first)
    if harmless:  # the last token of the pass was as far behind
        harmless += PROBED
    of_each = torch.full((PROBED,), first, device=device)
    return CountedTokens(harmless, by_node=not minds(of_each, logits(CountingProbe(first))))
