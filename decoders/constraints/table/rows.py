"""Packed masks as they are kept: most allow few tokens, and of these only the words that are not zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Masks that are held written out, those asked for last: 2 MB at 128k tokens, and more than a tree of guesses has nodes.
WRITTEN = 128


@dataclass(frozen=True)
class Row:
    """A mask.

    Attributes:
        places: ``[k]``, ascending, the words that are not zero; None for all. words: ``[k]`` int32, these words.
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

    def holds(self, token: int) -> bool:
        """Whether the mask allows `token`."""
        place = token >> 5
        if self.places is not None:
            at = int(self.places.searchsorted(place))
            if at == len(self.places) or int(self.places[at]) != place:
                return False
            place = at
        return bool(int(self.words[place]) >> (token & 31) & 1)


class Rows:
    """Masks ``[R, W]``.

    Attributes:
        width: ``W``. each: the ``R`` masks.
    """

    def __init__(self, width: int, rows: Iterable[Row]) -> None:
        self.width = width
        self.each = tuple(rows)
        # Where those that are written out stand in the tensor beside. Replaced together: another thread may still look there.
        self._written: tuple[dict[int, int], Tensor] = {}, torch.empty(0, width, dtype=torch.int32)
        self._writing = Lock()

    def __len__(self) -> int:
        return len(self.each)

    @property
    def nbytes(self) -> int:
        """Memory of what is kept and of what is written out at the moment."""
        return sum(row.nbytes for row in self.each) + self._written[1].nbytes

    def fill(self, number: int, out: Tensor) -> None:
        """One of the masks to `out`, ``[W]`` int32."""
        places, masks = self._written
        if number not in places:
            places, masks = self._write([number])
        out.copy_(masks[places[number]])

    def stack(self, numbers: Sequence[int], out: Tensor) -> None:
        """Some of the masks to `out`, ``[N, W]`` int32."""
        places, masks = self._written
        try:
            found = [places[number] for number in numbers]
        except KeyError:
            if len({*numbers}) > WRITTEN:
                out.zero_()
                for number, mask in zip(numbers, out.numpy(), strict=True):
                    self.each[number].write(mask)
                return
            places, masks = self._write(numbers)
            found = [places[number] for number in numbers]
        torch.index_select(masks, 0, torch.from_numpy(np.array(found)), out=out)

    def _write(self, numbers: Iterable[int]) -> tuple[dict[int, int], Tensor]:
        """Writes out masks; those of before give way if they become too many."""
        with self._writing:
            places, masks = self._written
            missing = {*numbers} - places.keys()
            needed = len(places) + len(missing)
            if needed > len(masks):
                if needed > WRITTEN:
                    places, missing = {}, {*numbers}
                room = min(2 * needed, WRITTEN)
                places, before, masks = {**places}, masks, torch.empty(room, self.width, dtype=torch.int32)
                masks[: len(places)] = before[: len(places)]
            out = masks.numpy()
            for number in missing:
                out[len(places)] = 0
                self.each[number].write(out[len(places)])
                places[number] = len(places)
            self._written = places, masks
            return self._written

    def all(self) -> Tensor:
        """``[R, W]`` int32, made anew."""
        masks = np.zeros((len(self.each), self.width), np.int32)
        for row, mask in zip(self.each, masks, strict=True):
            row.write(mask)
        return torch.from_numpy(masks)
