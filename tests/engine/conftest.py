"""What steps were made of, and a CPU that is taken for a device which records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoders.common import host_reads
from decoders.engine.decode import engine
from decoders.engine.decode.batch import Batch
from decoders.engine.model.blocks import NodeBlock
from decoders.engine.model.compiled import functions, tiers

from ..tape_recorder import TapeRecorder


class NotingCompiler:
    """In the place of ``torch.compile``: what it is given runs as it is; notes by name what ran, and in which threads."""

    def __init__(self) -> None:
        self.threads: dict[str, set[threading.Thread]] = {}

    def __call__(self, function: Callable, dynamic: bool | None = None, **options: Any) -> Callable:
        assert dynamic, "sizes are dynamic, or bucket changes would be compiled for"
        threads = self.threads.setdefault(function.__name__.rsplit("_", 1)[0], set())

        def compiled(*args: Any) -> Any:
            threads.add(threading.current_thread())
            return function(*args)

        return compiled


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """From here on the CPU is a device with static sizes that records."""
    recorder = TapeRecorder()
    monkeypatch.setattr(host_reads, "static_shapes", lambda device: True)
    monkeypatch.setattr(engine, "recorder_of", lambda device: recorder)
    monkeypatch.setattr(torch, "compile", NotingCompiler())
    for module in (tiers, functions):  # by the clock: a busy machine would compile, and record anew
        monkeypatch.setattr(module, "worth_compiling", lambda spent, expected: False)
    return recorder


@pytest.fixture
def block_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes per row of every step from here on."""
    sizes: list[int] = []
    plain = Batch.block_of

    def block_of(batch: Batch, draft: Any) -> NodeBlock:
        block = plain(batch, draft)
        sizes.append(block.draft_tokens.shape[1] + 1)
        return block

    monkeypatch.setattr(Batch, "block_of", block_of)
    return sizes
