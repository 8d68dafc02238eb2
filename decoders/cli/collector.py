"""Python's collector, and what torch and its compiler keep."""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Takes what is in memory out of collections, until ``gc.unfreeze()``.

    A full one would walk through it, for up to a second in which nobody is given a token.
    """
    gc.collect()
    gc.freeze()
