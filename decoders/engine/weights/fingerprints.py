"""Samples of tensors' contents: writes that PyTorch does not count (through ``.data``, numpy, under inference mode) show there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

#: A sample is so many stretches of at least so many entries, spread evenly, the first and the last entry included. Stretches,
#: since a cache line costs the same as one entry of it.
STRETCHES, ENTRIES = 4, 16


class Fingerprint:
    """A few entries of a tensor on the CPU as they were; it does not keep the tensor's memory alive.

    Args:
        tensor: dense, strided; see :func:`sampled`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._pointer = tensor, tensor.data_ptr()
        rows, width, step = _stretches(tensor)
        size = tensor.element_size()
        memory = (ctypes.c_char * (tensor.numel() * size)).from_address(self._pointer)
        # NaNs and signed zeros count: bytes are compared, not numbers.
        self.view = np.ndarray((rows, width * size), np.uint8, memoryview(memory), strides=(step * size, 1))
        self.content = self.view.tobytes()

    @property
    def changed(self) -> bool:
        """Whether the entries differ, or the tensor has other memory."""
        return self.tensor.data_ptr() != self._pointer or self.view.tobytes() != self.content


class DeviceSamples:
    """As :class:`Fingerprint`, of tensors of one device and size of entry: they are compared at once, since to look is to wait."""

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
    """Samples of all of a model's tensors that can be sampled.

    They are looked at in every call, so that what is cheap to know is left to the caller: :attr:`changed` may be asked only
    while the tensors have the memory that they had.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        groups: dict[tuple[torch.device, int], list[Tensor]] = {}
        on_host: list[Fingerprint] = []
        for tensor in {id(t): t for t in tensors if sampled(t)}.values():
            if tensor.device.type == "cpu":
                on_host.append(Fingerprint(tensor))
            else:
                groups.setdefault((tensor.device, tensor.element_size()), []).append(tensor)
        self._look = [sample.view.tobytes for sample in on_host]
        self._content = [sample.content for sample in on_host]
        self._elsewhere = [DeviceSamples(group) for group in groups.values()]

    @property
    def changed(self) -> bool:
        """Whether any sample differs from what it was."""
        return [look() for look in self._look] != self._content or any(group.changed for group in self._elsewhere)


def sampled(tensor: Tensor) -> bool:
    """Whether the content of `tensor` lies in one piece of memory that can be looked at."""
    if type(tensor) not in (nn.Parameter, nn.Buffer, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and span == tensor.numel() and tensor.element_size() in _BITS and not tensor.is_complex()


def _stretches(tensor: Tensor) -> tuple[int, int, int]:
    """How many stretches, of how many entries, how far apart: the last one ends with the last entry."""
    n = tensor.numel()
    if n <= STRETCHES * (ENTRIES + STRETCHES):
        return 1, n, 0
    width = next(w for w in range(ENTRIES, ENTRIES + STRETCHES) if (n - w) % (STRETCHES - 1) == 0)
    return STRETCHES, width, (n - width) // (STRETCHES - 1)


def _strided(tensor: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, width, step = _stretches(tensor)
    return (rows, width), (step, 1)
