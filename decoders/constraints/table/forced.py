"""What a regular language forces: bytes without a choice, and masks of the one token that begins them."""

from __future__ import annotations

from functools import cached_property

import torch

from ..base import pack
from ..vocabulary import Vocabulary
from .automaton import Automaton


class Forced:
    """The bytes that every text goes on with, by state; found when asked for, and remembered."""

    def __init__(self, automaton: Automaton) -> None:
        self._accepting: list[bool] = automaton.accepting.tolist()
        self._after: list[list[int]] = automaton.tables.next.tolist()
        self._kind: list[int] = automaton.tables.classes.tolist()
        self._known: dict[int, bytes] = {}

    def __getitem__(self, state: int) -> bytes:
        text = self._known.get(state)
        if text is None:
            found, at = bytearray(), state
            while not self._accepting[at] and (way := self._only[at]) >= 0:
                found.append(way)
                at = self._after[at][self._kind[way]]
            text = self._known[state] = bytes(found)
        return text

    @cached_property
    def _only(self) -> list[int]:
        """The only byte that may follow each state; -1 if there is a choice, or none."""
        bytes_of: dict[int, list[int]] = {}
        for byte, kind in enumerate(self._kind):
            bytes_of.setdefault(kind, []).append(byte)
        only = []
        for row in self._after:
            ways = [kind for kind, after in enumerate(row) if after]
            single = len(ways) == 1 and len(bytes_of[ways[0]]) == 1
            only.append(bytes_of[ways[0]][0] if single else -1)
        return only


def canonical(automaton: Automaton, vocabulary: Vocabulary) -> Automaton:
    """With masks of one token where bytes are forced: that with which the tokenizer itself begins them."""
    tables, forced = automaton.tables, Forced(automaton)
    of: list[int] = tables.mask_of.tolist()
    rows: dict[int, int] = {}
    begins: dict[bytes, list[int]] = {}
    for state in range(1, tables.stopped):
        text = forced[state]
        if text not in begins:
            begins[text] = vocabulary.canonical(text)[:1]
        if begins[text]:
            of[state] = rows.setdefault(begins[text][0], len(tables.masks) + len(rows))
    single = torch.zeros(len(rows), len(vocabulary), dtype=torch.bool)
    single[torch.arange(len(rows)), torch.tensor([*rows], dtype=torch.int64)] = True
    used, numbers = torch.tensor(of).unique(return_inverse=True)
    return automaton.with_masks(torch.cat([tables.masks, pack(single)])[used], numbers)
