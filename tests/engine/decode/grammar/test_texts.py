"""The table of masks: every row as it was given, however few are held unpacked."""

from __future__ import annotations

import pytest
import torch

from decoders.constraints.base import mask_words, unpack
from decoders.engine.decode.grammar.texts import FREE, MaskTable

VOCABULARY = 77


@pytest.mark.parametrize("held", [1, 3, 100])
def test_rows_come_unpacked(monkeypatch, held):
    monkeypatch.setattr("decoders.engine.decode.grammar.texts.OPEN", held * VOCABULARY)
    table = MaskTable(VOCABULARY, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    given = torch.randint(-(2**31), 2**31, (8, mask_words(VOCABULARY)), dtype=torch.int32, generator=draw)
    first = table.add(given)
    allowed = unpack(given, VOCABULARY)
    for _ in range(2):
        for rows in [[first]], [[first + 2, FREE, first + 2]], [[first, first + 1], [first + 7, first + 5]]:
            masks = table.unpacked(rows)
            for some, mask in zip(rows, masks, strict=True):
                for row, one in zip(some, mask, strict=True):
                    assert one.all() if row == FREE else torch.equal(one, allowed[row - first])
        row = table.new()
        table.words[row] = given[3]
        masks = table.unpacked([[row, first + 4]])
        assert torch.equal(masks[0], allowed[[3, 4]])
        table.clear()
    masks = table.unpacked([[first]])
    masks.zero_()
    assert torch.equal(table.unpacked([[first]])[0, 0], allowed[0]), "masks that were handed out are the caller's"
