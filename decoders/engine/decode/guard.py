"""What hooks may not do, noticed without a sync: writing into what they are shown, trees and outcome distributions that are none."""

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
    "proposed a tree that is none: a parent comes before its child, that of the root is -1, and visible, ancestors and offsets follow "
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
    """Raises DraftError if a hook of `strategy` writes into what it is shown; writes through ``.data`` or ``.numpy()`` are not seen."""
    tensors = {name: tensor for each in shown for name, tensor in tensors_of(each).items()}
    before = [writes_counted(tensor) for tensor in tensors.values()]
    yield
    for (name, tensor), version in zip(tensors.items(), before, strict=True):
        if writes_counted(tensor) != version:
            raise DraftError(
                f"{hook} of {strategy.name!r} wrote into {name}, which belongs to the loop: work on a copy"
            )


def check_tree(tree: TreeTensors, rows: Rows, strategy: str, wait: bool) -> None:
    """Raises DraftError unless the trees of rows that go on are sound (:meth:`TreeTensors.sound`).

    Without `wait` that is noted in `rows` instead, for :func:`raise_faults`.
    """
    sound = tree.sound(wait) | rows.finished
    if not wait:
        rows.faults.bitwise_or_(torch.where(sound, 0, int(Fault.TREE)))
    elif not sound.all():
        raise DraftError(f"{strategy} {_TREE} (row {int(sound.long().argmin())})")


def raise_faults(rows: Rows, strategy: str, verifier: str) -> None:
    """Raises what was noted; waits for the device.

    Args:
        strategy, verifier: as messages call them.

    Raises:
        DraftError: a strategy's trees. VerifierError: a verifier's outcome distribution.
    """
    for row, faults in enumerate(rows.faults.tolist()):
        if faults & Fault.TREE:
            raise DraftError(f"{strategy} {_TREE} (row {row})")
        if faults & Fault.OUTCOMES:
            raise VerifierError(f"{verifier} {_NO_DISTRIBUTION} (row {row})")
