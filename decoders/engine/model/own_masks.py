"""Takes over the causal masks that some attention modules keep in a buffer and slice by the current number of keys.

In the loop, the number of keys is the size of the cache's view, whatever the positions are. Such a module would take a wrong slice.
The loop passes its own masks. So in our copy of a model, these buffers are set to True, and their windows become layer kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attention import LayerKind

#: A view of the cache may have up to this many slots more than the longest text has tokens: slots for a block and for rounding up.
MARGIN = 2048
OWN_KIND = "decoders_own_kind"


def take_over(model: nn.Module, kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Sets the masks in buffers of our copy of a model to True. Returns `kinds`, extended by the masks' windows.

    A module that had a mask with a window then gets the loop's mask for this window.
    """
    masks = _masks(model)
    for mask in masks:
        kind = LayerKind(mask.window if mask.window < mask.length else None)
        kinds = tuple(dict.fromkeys((*kinds, kind)))
        setattr(mask.module, OWN_KIND, kinds.index(kind))
        length = 2 * mask.length + MARGIN
        mask.exchange(mask.buffer.new_ones(()).expand(*mask.buffer.shape[:-2], length, length))
    if len(kinds) > 1:
        for mask in masks:
            mask.module.register_forward_pre_hook(_pick, with_kwargs=True)
    return kinds


@contextmanager
def within(model: nn.Module, reach: int, length: int) -> Iterator[None]:
    """Within this context, limits the windows of all masks in a model's buffers to `reach`, for texts of up to `length` tokens."""
    longer = [mask for mask in _masks(model) if reach < mask.window < mask.length]
    try:
        for mask in longer:
            part = mask.buffer[..., :length, :length]
            mask.exchange(part & ~part.new_ones(part.shape).tril(-reach))
        yield
    finally:
        for mask in longer:
            mask.exchange(mask.buffer)


@dataclass(frozen=True)
class _Mask:
    """A causal mask in a module's buffer. window: number of positions that a token sees, itself included."""

    module: nn.Module
    name: str
    buffer: Tensor
    window: int

    @property
    def length(self) -> int:
        return self.buffer.shape[-1]

    def exchange(self, mask: Tensor) -> None:
        self.module.register_buffer(self.name, mask, persistent=False)


def _masks(model: nn.Module) -> list[_Mask]:
    return [
        _Mask(module, name, buffer, window)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if (window := _window(buffer)) is not None
    ]


def _window(buffer: Tensor) -> int | None:
    """The window of the causal mask ``[…, T, T]`` in `buffer`; T if the mask has no window; None if `buffer` is not a causal mask."""
    if buffer.dtype != torch.bool or buffer.dim() < 2 or buffer.shape[-1] != buffer.shape[-2] or not buffer.numel():
        return None
    mask = buffer.reshape(-1, *buffer.shape[-2:])[0]
    if not mask[0, 0] or len(mask) == 1 or mask[0, 1:].any():
        return None
    window = int(mask[-1].sum())
    banded = mask[-1, len(mask) - window :].all() and mask[:window, 0].all() and not mask[window:, 0].any()
    return window if banded else None


def _pick(module: nn.Module, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A forward pre-hook that reduces the module's argument ``attention_mask`` to the mask of the module's kind."""
    mask, kind = given.get("attention_mask"), getattr(module, OWN_KIND)
    return args, given if mask is None else given | {"attention_mask": mask[:, kind : kind + 1]}
