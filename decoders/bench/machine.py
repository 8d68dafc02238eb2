"""What a measurement runs on: processor, versions of software, the speed of the device's memory."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..errors import amount
from ..report.surroundings import processor_name


def facts(device: torch.device) -> dict[str, Any]:
    """JSON-safe facts: processor, threads, device, versions."""
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
    }


def line(facts: Mapping[str, Any]) -> str:
    """Processor, threads and device from :func:`facts`, as a text."""
    return f"{facts['cpu']}, {amount(facts['threads'], 'thread')}, device {facts['device']}"


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
