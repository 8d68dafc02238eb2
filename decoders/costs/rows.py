"""What a token is worth in each row of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A row that has this share of the longest row's steps less to go is the last one e times more rarely.
LAST_ROW_SPREAD = 1 / 8


def row_weights(tokens: Sequence[int], outlooks: Sequence[float]) -> list[float]:
    """What a token is worth in each row where all begin together and a call lasts as long as its last row: by how likely that is.

    Args:
        tokens: that each row may still write.
        outlooks: draft tokens that are expected to be right in a step of each row (:attr:`Follower.outlook`).

    Returns:
        weights, 1 on average.
    """
    if not tokens:
        return []
    left = [count / (1 + outlook) for count, outlook in zip(tokens, outlooks, strict=True)]
    longest = max(left)
    spread = max(LAST_ROW_SPREAD * longest, 1.0)
    likely = [math.exp((steps - longest) / spread) for steps in left]
    return [share * len(left) / sum(likely) for share in likely]
