"""How close a step comes to reading the weights as fast as the device can."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedModel

from .call import synchronize


def copy_bandwidth(device: torch.device, size: int | None = None, repeats: int = 5) -> float:
    """Bytes read plus bytes written per second by copying `size` bytes, the best of `repeats`.

    The default size (256 MiB, 1 GiB on an accelerator) is far larger than any cache.
    """
    size = size or (1 << 28 if device.type == "cpu" else 1 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(repeats + 1):  # the first pass also touches the pages
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one forward reads: all parameters, without an embedding that is only looked up.

    In a mixture of experts all experts count, though a step may read only a few.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = None
    if embedding is not None and (head is None or head.weight is not embedding.weight):
        looked_up = embedding.weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not looked_up)
