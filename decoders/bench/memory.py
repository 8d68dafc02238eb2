"""Peak memory of a piece of work."""

from __future__ import annotations

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
