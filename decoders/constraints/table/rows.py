"""Packed masks in memory: of masks that allow few tokens, only the words that are not zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A mask.

    Attributes:
        places: ``[k]``, ascending, the words that are not zero; None for all.
        words: ``[k]`` int32, these words.
    """

    places: NDArray[np.unsignedinteger[Any]] | None
    words: NDArray[np.int32]

    @staticmethod
    def of(mask: NDArray[np.int32]) -> Row:
        """Of a mask ``[W]``."""
        places = np.flatnonzero(mask)
        if 2 * len(places) > len(mask):  # would save little or nothing
            return Row(None, mask.copy())
        return Row(places.astype(np.uint16 if len(mask) <= 1 << 16 else np.uint32), mask[places])

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Tells masks apart."""
        return b"" if self.places is None else self.places.tobytes(), self.words.tobytes()

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + (0 if self.places is None else self.places.nbytes)

    def write(self, out: NDArray[np.int32]) -> None:
        """The mask to `out`, ``[W]`` zeros."""
        out[slice(None) if self.places is None else self.places] = self.words

    def allows(self, token: int) -> bool:
        """Whether the mask allows `token`."""
        place = token >> 5
        if self.places is not None:
            position = int(self.places.searchsorted(place))
            if position == len(self.places) or int(self.places[position]) != place:
                return False
            place = position
        return bool(int(self.words[place]) >> (token & 31) & 1)


class MaskRows:
    """Masks ``[R, W]``.

    Attributes:
        width: ``W``.
        each: the ``R`` masks.
    """

    def __init__(self, width: int, rows: Iterable[Row]) -> None:
        self.width = width
        self.each = tuple(rows)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def nbytes(self) -> int:
        """Memory of what is kept."""
        return sum(row.nbytes for row in self.each)

    def fill(self, number: int, out: Tensor) -> None:
        """One of the masks to `out`, ``[W]`` int32."""
        self.each[number].write(out.zero_().numpy())

    def all(self) -> Tensor:
        """``[R, W]`` int32, made anew."""
        masks = np.zeros((len(self.each), self.width), np.int32)
        for row, mask in zip(self.each, masks, strict=True):
            row.write(mask)
        return torch.from_numpy(masks)
