"""Detects that tensors have been written to: by PyTorch's counter, and by samples of the contents for writes that it does not count
(through ``.data``, through numpy, in inference mode).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_compat import local_part, with_parts, writes_counted

#: A sample has this many stretches of at least this many entries, evenly spaced, including the first and the last entry. Reading a
#: stretch costs no more than reading one entry, since both load a cache line.
STRETCHES, ENTRIES = 4, 16


def _content_of(tensor: Tensor) -> Callable[[], bytes]:
    """A function that reads a sample of a tensor on the CPU, without keeping the memory alive. tensor: see :func:`sampled`."""
    rows, width, step = _stretches(tensor)
    size = tensor.element_size()
    memory = (ctypes.c_char * (tensor.numel() * size)).from_address(tensor.data_ptr())
    # Bytes are compared, not numbers, so that NaNs equal themselves and signed zeros differ.
    return np.ndarray((rows, width * size), np.uint8, memoryview(memory), strides=(step * size, 1)).tobytes


class DeviceSamples:
    """Samples of tensors of one device and entry size. They are compared together, since each comparison waits for the device."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self._pointers = tensors, [t.data_ptr() for t in tensors]
        self._views = [t.detach().view(_BITS[t.element_size()]).as_strided(*_strided(t)) for t in tensors]
        self._content = self._look()

    @property
    def changed(self) -> bool:
        pointers = [t.data_ptr() for t in self.tensors]
        return pointers != self._pointers or not torch.equal(self._look(), self._content)

    def _look(self) -> Tensor:
        return torch.cat([view.reshape(-1) for view in self._views])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprints:
    """Samples of those of a model's tensors that can be sampled.

    Every call compares them, so this does not check again that the tensors still have the same memory: the caller must know that
    before it reads :attr:`changed`.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        groups: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._look: list[Callable[[], bytes]] = []
        for tensor in {id(t): t for t in tensors if sampled(t)}.values():
            if tensor.device.type == "cpu":
                self._look.append(_content_of(tensor))
            else:
                groups.setdefault((tensor.device, tensor.element_size()), []).append(tensor)
        self._content = [look() for look in self._look]
        self._elsewhere = [DeviceSamples(group) for group in groups.values()]

    @property
    def changed(self) -> bool:
        """Whether any sample differs from the first one."""
        return [look() for look in self._look] != self._content or any(group.changed for group in self._elsewhere)


class Snapshot:
    """The state of tensors at one time. Every copy of weights has one, and is renewed when the tensors have changed since.

    Attributes:
        tensors: the tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._parts = with_parts(self.tensors)
        self._states = [state_of(part) for part in self._parts]
        self._samples = Fingerprints(self._parts)

    @property
    def changed(self) -> bool:
        """Whether a tensor has been written to since, noticed by PyTorch or not, or has other memory."""
        return [state_of(part) for part in self._parts] != self._states or self._samples.changed

    def shows(self, tensors: Iterable[Tensor]) -> bool:
        """Whether this is the state of these very tensors, with their present values."""
        return [*map(id, tensors)] == [*map(id, self.tensors)] and not self.changed


def state_of(tensor: Tensor) -> tuple[int, int]:
    """The address of this process's part of `tensor`, and how many writes PyTorch has counted."""
    own = local_part(tensor)
    return own.data_ptr(), writes_counted(own)


def sampled(tensor: Tensor) -> bool:
    """Whether the content of `tensor` lies in one piece of memory that can be read."""
    if type(tensor) not in (nn.Parameter, nn.Buffer, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and span == tensor.numel() and tensor.element_size() in _BITS and not tensor.is_complex()


def _stretches(tensor: Tensor) -> tuple[int, int, int]:
    """Number of stretches, entries of each, and the distance between their starts. The last one ends with the last entry."""
    n = tensor.numel()
    if n <= STRETCHES * (ENTRIES + STRETCHES):
        return 1, n, 0
    width = next(w for w in range(ENTRIES, ENTRIES + STRETCHES) if (n - w) % (STRETCHES - 1) == 0)
    return STRETCHES, width, (n - width) // (STRETCHES - 1)


def _strided(tensor: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, width, step = _stretches(tensor)
    return (rows, width), (step, 1)
