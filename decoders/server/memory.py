"""Memory that the allocator keeps after it was freed."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


@cache
def _library() -> Any:
    """The C library where it can give freed memory back, glibc's; elsewhere None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def give_back() -> None:
    """Gives what is freed to the system. Every thread that has decoded leaves a heap of its own behind."""
    if (library := _library()) is not None:
        library.malloc_trim(0)
