"""Chooses the kernel that computes a model's attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....errors import UnsupportedError
from ....settings import Attention
from ..cache import LayerSpec
from . import runs_kernels
from .attention import Kernel
from .products import take_cpu_kernels

#: The widest heads that the Triton kernel supports. The kernel pads heads narrower than 16.
WIDEST_HEAD = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def preferred(device: torch.device) -> Kernel | None:
    """The kernel that ``attention="auto"`` chooses on `device` if the kernel supports the model; None for PyTorch's attention."""
    if device.type == "cpu":
        return None if take_cpu_kernels() is None else "cpu"
    return "triton" if device.type == "cuda" else None


def unfit(kernel: Kernel, layout: Sequence[LayerSpec], own_layers: int, device: torch.device) -> str | None:
    """Why `kernel` cannot compute the attention of a model with this cache `layout`; None if it can.

    own_layers: number of layers whose attention function can be replaced through their config.
    """
    with_keys = [spec for spec in layout if spec.key_heads]
    if kernel == "triton" and not runs_kernels(device):
        return (
            f"Triton does not run on {device}"
            if device.type == "cuda"
            else f"it runs on CUDA, the model is on {device}"
        )
    if own_layers < len(with_keys):
        return "its layers have their own attention"
    widest = max(max(spec.key_dim, spec.value_dim) for spec in with_keys)
    if kernel == "triton" and widest > WIDEST_HEAD:
        return f"its heads are {widest} wide, {WIDEST_HEAD} are possible"
    dtypes = {spec.dtype for spec in with_keys} - set(DTYPES)
    return f"it computes in {dtypes.pop()}, possible are float32, bfloat16 and float16" if dtypes else None


def kernel_for(wanted: Attention, layout: Sequence[LayerSpec], own_layers: int, name: str) -> Kernel | None:
    """Our kernel that computes the attention of model `name`; None for PyTorch's attention. layout, own_layers: see :func:`unfit`.

    Raises:
        UnsupportedError: the caller asked for the kernel for CUDA, which does not support the model.
    """
    device = layout[0].device
    ours = preferred(device) if wanted == "auto" else None if wanted == "sdpa" else wanted
    reason = None if ours is None else unfit(ours, layout, own_layers, device)
    if reason is not None and wanted == "triton":
        raise UnsupportedError(f"attention='triton' does not support {name}: {reason}. Leave attention='auto'")
    return ours if reason is None else None
