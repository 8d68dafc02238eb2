"""A table as bytes and back: safetensors, checked before anything is looked up in it."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors import torch as tensors

from ...errors import GrammarError
from ..base import mask_words
from ..vocabulary import Vocabulary
from .automaton import MaskedAutomaton
from .rows import MaskRows, Row

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
