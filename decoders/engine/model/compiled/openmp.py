"""The threads that OpenMP keeps for a thread of ours.

libgomp, the OpenMP of PyTorch's wheels for Linux, keeps a team of threads for every thread that has run parallel code. Where these
are more than there are cores, it puts each to sleep at every barrier, and a decoding step has hundreds of them: SmolLM2-135M with 8
rows in bfloat16 took 70 ms in place of 41 on two cores once two threads had decoded. So whoever stops decoding while another thread
goes on gives its team back.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

#: ``omp_pause_soft`` of OpenMP 5: threads go, settings stay.
_SOFT = 1


def release_threads() -> None:
    """Ends the calling thread's team; its next parallel region makes a new one, in less than a millisecond.

    Does nothing within a parallel region, and where OpenMP is not libgomp.
    """
    if (pause := _pause()) is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the libgomp that PyTorch uses. Other libraries' ends every thread's team, or none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not library.exists():
        return None
    try:  # symbols are looked up in the libraries that it needs, too
        symbols = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    if not hasattr(symbols, "GOMP_parallel") or hasattr(symbols, "__kmpc_fork_call"):
        return None
    return getattr(symbols, "omp_pause_resource_all", None)
