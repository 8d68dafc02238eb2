"""What a token is worth in each row of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A row that has this share of the longest row's way less to go is the last one e times more rarely.
AHEAD = 1 / 8


def row_weights(left: Sequence[float]) -> list[float]:
    """What a token is worth in each row where all begin together and a call lasts as long as its last row: by how likely that is.

    Args:
        left: how many steps each row will take.

    Returns:
        weights, 1 on average.
    """
    longest = max(left)
    spread = max(AHEAD * longest, 1.0)
    likely = [math.exp((steps - longest) / spread) for steps in left]
    return [share * len(left) / sum(likely) for share in likely]
