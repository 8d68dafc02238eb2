"""Checks for faults of hooks: writes to the loop's tensors, invalid trees and invalid outcome distributions. Faults can be noted on
the device without a sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntFlag

import torch
from torch import Tensor

from ...errors import DraftError, VerifierError
from ...strategy import PromptChunk, Sequences, Step, Strategy
from ...tree import TreeTensors
from ..model.modules_compat import writes_counted
from .rows import Rows


class Fault(IntFlag):
    """Faults of strategies and verifiers that are detected on the device."""

    TREE = 1
    OUTCOMES = 2


_TREE = (
    "proposed an invalid tree: a parent must come before its child, the root's parent must be -1, and visible, ancestors and offsets "
    "must follow from the parents as in TreeTensors.from_parents"
)
_NO_DISTRIBUTION = "gave probabilities that are negative, not finite, or do not sum to 1"


def tensors_of(shown: Sequences | Step | PromptChunk | None) -> dict[str, Tensor]:
    """The tensors in a hook's argument, by field name."""
    if shown is None:
        return {}
    return {name: value for name, value in vars(shown).items() if isinstance(value, Tensor)}


@contextmanager
def untouched(hook: str, strategy: Strategy, *shown: Sequences | Step | PromptChunk | None) -> Iterator[None]:
    """Wraps a hook: raises DraftError if the hook writes to tensors in `shown`. Writes by ``.data`` and ``.numpy()`` go unnoticed."""
    tensors = {name: tensor for each in shown for name, tensor in tensors_of(each).items()}
    before = [writes_counted(tensor) for tensor in tensors.values()]
    yield
    for (name, tensor), version in zip(tensors.items(), before, strict=True):
        if writes_counted(tensor) != version:
            raise DraftError(
                f"{hook} of {strategy.name!r} wrote into {name}, which belongs to the loop: work on a copy"
            )


def check_tree(tree: TreeTensors, rows: Rows, strategy: str, wait: bool) -> None:
    """Raises DraftError unless the trees of unfinished rows are sound (:meth:`TreeTensors.sound`).

    Without `wait`, notes the fault in `rows` for :func:`raise_faults` instead.
    """
    sound = tree.sound(wait)
    if not wait:
        rows.faults.bitwise_or_(torch.where(sound | rows.finished, 0, int(Fault.TREE)))
    # Only for an unsound tree is `finished` read, which may be on another device than a tree of the host.
    elif not sound.all() and not (sound := sound | rows.finished.to(sound.device)).all():
        raise DraftError(f"{strategy} {_TREE} (row {int(sound.long().argmin())})")


def raise_faults(rows: Rows, strategy: str, verifier: str) -> None:
    """Raises the faults noted in `rows`. Waits for the device. strategy, verifier: names for error messages.

    Raises:
        DraftError: a tree was invalid. VerifierError: an outcome distribution was invalid.
    """
    for row, faults in enumerate(rows.faults.tolist()):
        if faults & Fault.TREE:
            raise DraftError(f"{strategy} {_TREE} (row {row})")
        if faults & Fault.OUTCOMES:
            raise VerifierError(f"{verifier} {_NO_DISTRIBUTION} (row {row})")
