"""Checks of hooks, without a device sync: writes to the loop's tensors, invalid trees, and invalid outcome distributions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...errors import DraftError, VerifierError
from ...strategy import PromptChunk, Sequences, Step, Strategy
from ...tree import TreeTensors
from ..model.torch_compat import writes_counted
from .rows import Fault, Rows

_TREE = (
    "proposed an invalid tree: a parent comes before its child, that of the root is -1, and visible, ancestors and offsets follow "
    "from the parents as in TreeTensors.from_parents"
)
_NO_DISTRIBUTION = "gave probabilities that are negative, not finite, or do not sum to 1"


def tensors_of(shown: Sequences | Step | PromptChunk | None) -> dict[str, Tensor]:
    """The tensors in what a hook is shown, by the names of their fields."""
    if shown is None:
        return {}
    return {name: value for name, value in vars(shown).items() if isinstance(value, Tensor)}


@contextmanager
def untouched(hook: str, strategy: Strategy, *shown: Sequences | Step | PromptChunk | None) -> Iterator[None]:
    """Raises DraftError if a hook of `strategy` writes to the tensors it is shown, except through ``.data`` or ``.numpy()``."""
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

    Without `wait` the fault is noted in `rows` instead, for :func:`raise_faults`.
    """
    sound = tree.sound(wait) | rows.finished
    if not wait:
        rows.faults.bitwise_or_(torch.where(sound, 0, int(Fault.TREE)))
    elif not sound.all():
        raise DraftError(f"{strategy} {_TREE} (row {int(sound.long().argmin())})")


def raise_faults(rows: Rows, strategy: str, verifier: str) -> None:
    """Raises the faults noted in `rows`; waits for the device.

    Args:
        strategy, verifier: how messages name them.

    Raises:
        DraftError: a tree was invalid. VerifierError: an outcome distribution was.
    """
    for row, faults in enumerate(rows.faults.tolist()):
        if faults & Fault.TREE:
            raise DraftError(f"{strategy} {_TREE} (row {row})")
        if faults & Fault.OUTCOMES:
            raise VerifierError(f"{verifier} {_NO_DISTRIBUTION} (row {row})")
