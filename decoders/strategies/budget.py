"""How many nodes a draft may have: what the settings say, or what a step of so many costs on this machine."""

from __future__ import annotations

from ..strategy import Context

#: A step with a draft may take this share more time than one without. Late nodes of a draft are seldom right: a block that takes
#: half as long again must bring half a token more per step.
SHARE = 0.5


def node_budget(context: Context, chosen: int | None, otherwise: int, most: int = 256) -> int:
    """Most nodes of a block, the root included.

    Args:
        chosen: set by hand, the answer if it is not None.
        otherwise: the answer where nothing is known of what steps cost (:attr:`Context.costs`).
        most: bound of what costs allow.

    Returns:
        where costs are known a power of two of at least 4, so that calls at different lengths share their graphs.
    """
    if chosen is not None:
        return chosen
    costs = context.costs()
    if costs is None:
        return otherwise
    affordable = max(min(costs.affordable(SHARE), most), 4)
    return 1 << (affordable.bit_length() - 1)


def draft_budget(context: Context, chosen: int | None, otherwise: int, most: int = 255) -> int:
    """The same in draft tokens: of all numbers the root is left out."""
    return node_budget(context, None if chosen is None else chosen + 1, otherwise + 1, most + 1) - 1
