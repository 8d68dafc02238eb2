"""Peak memory of a piece of work, and memory that is held."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Context manager; afterwards `bytes` is the peak while it was entered and `kind` says of what.

    ``kind``: "device" (the CUDA allocator), "process" (resident set of the whole process, other models included), or
    "unknown" where the system tells neither (`bytes` is None).
    """

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
            line = next((x for x in _STATUS.read_text().splitlines() if x.startswith("VmHWM:")), None)
            self.bytes = int(line.split()[1]) * 1024 if line else None


def resident() -> int | None:
    """Bytes of this process that are in memory now; None where the system does not tell.

    Pages that were freed and not given back to the system count: it is what others cannot have.
    """
    gc.collect()
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def held() -> int | None:
    """Bytes that this process has been given by malloc and not given back, extensions' own among them; None without glibc.

    Small objects of Python are not among them: Python has their memory from elsewhere.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _Mallinfo
    gc.collect()
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
