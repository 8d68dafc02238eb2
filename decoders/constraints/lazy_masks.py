"""Rows of masks that are written out when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LazyMasks:
    """Rows of one array, each written when it is first asked for; all are dropped when there would be too many.

    Attributes:
        most: rows that are held at a time.
    """

    def __init__(
        self, width: int, dtype: type[np.generic], most: int, make: Callable[[int, NDArray[Any]], None]
    ) -> None:
        """make: writes the row of a number to an array ``[width]``."""
        self.most, self._make = most, make
        # Replaced together: another thread may still look at the ones before.
        self._held: tuple[dict[int, int], NDArray[Any]] = {}, np.empty((0, width), dtype)
        self._making = Lock()

    @property
    def nbytes(self) -> int:
        return self._held[1].nbytes

    def places(self, numbers: Sequence[int]) -> tuple[list[int], NDArray[Any]] | None:
        """Places of the rows of `numbers` in a read-only array ``[R, width]``, and that array; None if they are too many."""
        places, rows = self._held
        try:
            return [places[number] for number in numbers], rows
        except KeyError:
            wanted = {*numbers}
        if len(wanted) > self.most:
            return None
        with self._making:
            places, rows = self._held
            missing = wanted - places.keys()
            needed = len(places) + len(missing)
            if needed > len(rows):
                if needed > self.most:
                    places, missing = {}, wanted
                places, before = {**places}, rows
                rows = np.empty((min(2 * needed, self.most), before.shape[1]), before.dtype)
                rows[: len(places)] = before[: len(places)]
            for number in missing:
                self._make(number, rows[len(places)])
                places[number] = len(places)
            self._held = places, rows
        return [places[number] for number in numbers], rows
