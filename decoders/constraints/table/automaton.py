"""A compiled language as arrays, the automaton and its masks; as bytes and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import torch as tensors

from ...errors import GrammarError
from ..base import Tables, mask_words
from ..vocabulary import Vocabulary
from .masks import MaskRows, Row, StateMasks


@dataclass(frozen=True)
class MaskedAutomaton:
    """A byte automaton with a mask for each state; :class:`Tables` are made of it.

    Attributes:
        next: ``[S, C]`` int32.
        classes: ``[256]`` int64.
        mask_of: ``[S]`` int64.
        start: see :class:`Tables`.
        stopped: likewise; it is the last state.
        rows: the masks.
        accepting: ``[S]`` bool.
    """

    next: NDArray[np.int32]
    classes: NDArray[np.int64]
    mask_of: NDArray[np.int64]
    rows: MaskRows
    accepting: NDArray[np.bool_]
    start: int
    stopped: int

    @staticmethod
    def of(
        transitions: NDArray[np.int32],
        byte_class: NDArray[np.int64],
        accepting: NDArray[np.bool_],
        start: int,
        masks: StateMasks,
    ) -> MaskedAutomaton:
        """From arrays ``[S, C]``, ``[256]``, ``[S]``; adds the state after a stop token."""
        next = np.concatenate([transitions, np.zeros((1, transitions.shape[1]), np.int32)])
        mask_of = np.concatenate([masks.of, [masks.stops]])
        return MaskedAutomaton(
            next, byte_class, mask_of, masks.rows, np.concatenate([accepting, [True]]), start, len(transitions)
        )

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(part.nbytes for part in (self.next, self.classes, self.mask_of, self.rows, self.accepting))

    def tables(self) -> Tables:
        """The automaton as tensors; each call expands the masks."""
        next, classes, mask_of = map(torch.from_numpy, (self.next, self.classes, self.mask_of))
        return Tables(next, classes, mask_of, self.rows.all(), start=self.start, stopped=self.stopped)

    def with_masks(self, rows: MaskRows, mask_of: NDArray[np.int64]) -> MaskedAutomaton:
        """The same automaton with other masks."""
        return replace(self, rows=rows, mask_of=mask_of)


_TYPES = {
    "next": torch.int32, "classes": torch.int64, "mask_of": torch.int64, "masks": torch.int32,
    "accepting": torch.bool, "ends": torch.int64,
}  # fmt: skip


def dumped(automaton: MaskedAutomaton) -> bytes:
    """`automaton` as bytes."""
    tables = automaton.tables()
    return tensors.save(
        {
            "next": tables.next, "classes": tables.classes, "mask_of": tables.mask_of, "masks": tables.masks,
            "accepting": torch.from_numpy(automaton.accepting), "ends": torch.tensor([tables.start, tables.stopped]),
        }
    )  # fmt: skip


def restored(content: bytes, vocabulary: Vocabulary) -> MaskedAutomaton:
    """The automaton that was dumped as `content`.

    Raises:
        GrammarError: it is something else, or not for `vocabulary`.
    """
    try:
        parts = tensors.load(content)
    except (SafetensorError, ValueError) as error:
        raise GrammarError(f"it holds no tensors: {error}") from error
    if {name: tensor.dtype for name, tensor in parts.items()} != _TYPES:
        raise GrammarError("its tensors are not those of a table")
    next, masks, ends = parts["next"], parts["masks"], parts["ends"]
    states, kinds = next.shape if next.ndim == 2 else (0, 0)
    shapes = {
        "next": (states, kinds), "classes": (256,), "mask_of": (states,), "accepting": (states,), "ends": (2,),
        "masks": (len(masks), mask_words(len(vocabulary))),
    }  # fmt: skip
    if not states or {name: tuple(tensor.shape) for name, tensor in parts.items()} != shapes:
        raise GrammarError("its tensors do not fit each other or the vocabulary")
    for name, limit in (("next", states), ("classes", kinds), ("mask_of", len(masks)), ("ends", states)):
        if int(parts[name].min()) < 0 or int(parts[name].max()) >= limit:
            raise GrammarError(f"{name} points out of the table")
    if bool(next[0].any()):
        raise GrammarError("state 0 is not dead")
    start, stopped = ends.tolist()
    rows = MaskRows(masks.shape[1], map(Row.of, masks.numpy()))
    classes, mask_of, accepting = (parts[name].numpy() for name in ("classes", "mask_of", "accepting"))
    return MaskedAutomaton(next.numpy(), classes, mask_of, rows, accepting, start, stopped)
