"""What a measurement runs on: processor, versions of software, the speed of the device's memory; and the memory in use.

The resident memory of this process comes from psutil (``pip install 'hf-decoders[bench]'``) on Linux, macOS and Windows; without
psutil it is None. The peak is read from /proc, because psutil reports only the peak of the process's whole life.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import PreTrainedModel

from ..errors import amount
from ..report.surroundings import processor_name

T = TypeVar("T")

# Writing 5 to clear_refs resets the peak (VmHWM) in status: see proc(5).
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def facts(device: torch.device) -> dict[str, Any]:
    """JSON-safe facts: processor, threads, device, versions, whether the memory that a method adds can be measured."""
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
    }


def line(facts: Mapping[str, Any]) -> str:
    """Processor, threads and device from :func:`facts`, as a text."""
    return f"{facts['cpu']}, {amount(facts['threads'], 'thread')}, device {facts['device']}"


def has_own_memory(device: torch.device) -> bool:
    """Whether the allocator of `device` reports its peak memory, as the allocators of CUDA and XPU do."""
    return device.type in ("cuda", "xpu")


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work; returns immediately for the CPU."""
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


def with_peak_memory(device: torch.device, work: Callable[[], T]) -> tuple[T, int | None]:
    """What `work` returns, and the peak memory in bytes while it runs: on CUDA and XPU the allocator's, else the resident memory of
    the whole process, other models included. The peak is None if the system does not report it.
    """
    if has_own_memory(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return work(), torch.accelerator.max_memory_allocated(device)
    try:
        _RESET.write_text("5")
    except OSError:
        return work(), None
    result = work()
    line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
    return result, int(line.split()[1]) * 1024 if line else None


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
