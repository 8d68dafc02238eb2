"""What a measurement runs on: processor, versions of software, the speed of the device's memory; and the memory in use.

The resident memory of this process comes from psutil (``pip install 'hf-decoders[bench]'``) on Linux, macOS and Windows; without
psutil it is None. The peak is read from /proc, because psutil reports only the peak of the process's whole life.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..report.surroundings import busy_share, processor_name

# Writing 5 to clear_refs resets the peak (VmHWM) in status: see proc(5).
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def facts(device: torch.device) -> dict[str, Any]:
    """JSON-safe facts: processor, threads, device, versions, whether memory can be measured, and the text of :func:`busy`."""
    from ..common.version import __version__

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": processor_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": processor_name(device) if has_own_memory(device) else device.type,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda} if device.type == "cuda" else {}),
        "transformers": transformers.__version__,
        "decoders": __version__,
        "memory": resident() is not None,
        "busy": busy(),
    }


def busy() -> str:
    """A warning if other processes occupy this machine's cores, else ""."""
    if not (waits := busy_share(0.1)):
        return ""
    several = torch.get_num_threads() > 1
    effect = (
        "That slows transformers more than this loop, so ratios are too high" if several else "Speeds vary with that"
    )
    return f"Busy: other processes take the cores, code waits {waits:.0%} of its time. {effect}: measure again on a quiet machine."


def has_own_memory(device: torch.device) -> bool:
    """Whether the allocator of `device` reports its peak, as the allocators of CUDA and XPU do."""
    return device.type in ("cuda", "xpu")


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work; returns at once for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def copy_bandwidth(device: torch.device, size: int | None = None, repeats: int = 5) -> float:
    """Bytes read plus bytes written per second while `size` bytes are copied; the best of `repeats` copies.

    The default size (256 MiB, 1 GiB on an accelerator) is far larger than any cache.
    """
    size = size or (1 << 28 if device.type == "cpu" else 1 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(repeats + 1):  # the first pass is slow, because the system maps the pages
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one forward pass reads: all parameters, except an embedding that is only looked up.

    In a mixture of experts all experts are included, though a step may read only a few.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = None
    if embedding is not None and (head is None or head.weight is not embedding.weight):
        looked_up = embedding.weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not looked_up)


class PeakMemory:
    """Context manager that measures the peak memory of the work inside it.

    Attributes:
        bytes: the peak in bytes; None if the system does not report it.
        kind: "device" (the allocator of CUDA or XPU), "process" (resident set of the whole process, other models included) or
            "unknown".
    """

    bytes: int | None
    kind: str

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self.kind = device, None, "unknown"

    def __enter__(self) -> PeakMemory:
        if has_own_memory(self.device):
            torch.accelerator.reset_peak_memory_stats(self.device)
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
            self.bytes = torch.accelerator.max_memory_allocated(self.device)
        elif self.kind == "process":
            line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
            self.bytes = int(line.split()[1]) * 1024 if line else None


def resident() -> int | None:
    """The present resident memory of this process in bytes; None without psutil.

    It includes freed pages that were not returned to the system, since no other process can use them.
    """
    try:
        import psutil
    except ImportError:
        return None
    gc.collect()
    return int(psutil.Process().memory_info().rss)
