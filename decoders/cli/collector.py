"""Python's collector, and what torch and its compiler keep."""

from __future__ import annotations

import atexit
import gc


def set_aside() -> None:
    """Takes what is in memory out of collections, until ``gc.unfreeze()`` or the end of the process.

    A full one would walk through it, for up to a second in which nobody is given a token.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # Triton, from 3.9 on, lists on stderr what is not freed at the end
