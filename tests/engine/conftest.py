"""What steps were made of."""

from __future__ import annotations

from typing import Any

import pytest

from decoders.engine.blocks import NodeBlock
from decoders.engine.loop import Call


@pytest.fixture
def block_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes per row of every step from here on."""
    sizes: list[int] = []
    plain = Call.block_of

    def block_of(call: Call, draft: Any) -> NodeBlock:
        block = plain(call, draft)
        sizes.append(block.draft_tokens.shape[1] + 1)
        return block

    monkeypatch.setattr(Call, "block_of", block_of)
    return sizes
