"""Memory of this process: now, allocated from the heap, and the peak of a piece of work.

psutil reads it, on Linux, macOS and Windows. It comes with ``pip install 'hf-decoders[bench]'``; without it the figures are
None. The peak is read here, because psutil only tells the highest of the whole life of a process and cannot reset it.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

# Writing 5 to clear_refs resets the peak (VmHWM) in status: see proc(5).
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Context manager that measures the peak of the work inside it.

    Attributes:
        bytes: the peak; None where the system does not tell.
        kind: "device" (CUDA's allocator), "process" (resident set of the whole process, other models included) or
            "unknown".
    """

    bytes: int | None
    kind: str

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self.kind = device, None, "unknown"

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.kind = "device"
        else:
            try:
                _RESET.write_text("5")
                self.kind = "process"
            except OSError:
                self.kind = "unknown"
        return self

    def __exit__(self, *_: object) -> None:
        if self.kind == "device":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self.kind == "process":
            line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
            self.bytes = int(line.split()[1]) * 1024 if line else None


def resident() -> int | None:
    """Bytes of this process that are in memory now; None without psutil.

    Pages that were freed and not given back to the system count: no other process can have them.
    """
    psutil = _psutil()
    if psutil is None:
        return None
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def allocated() -> int | None:
    """Bytes that are allocated from the C heap, extensions' own among them; None where psutil cannot tell.

    Small objects of Python are not counted: Python has its own allocator for them.
    """
    psutil = _psutil()
    if not hasattr(psutil, "heap_info"):  # psutil has it where the C library tells: glibc, macOS, Windows, FreeBSD
        return None
    gc.collect()
    heap = psutil.heap_info()
    return int(heap.heap_used + heap.mmap_used)


def _psutil() -> Any:
    """The module; None where it is not installed, for instance beside ``decoders demo``, which shows no memory."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil
