"""Static sizes and kept recordings, with the switch between the paths turned on a CPU: the same tokens, few shapes, much reuse."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.engine import buckets, capture, engine
from decoders.engine.buckets import block_shapes, prefill_shapes
from decoders.engine.session import Session
from decoders.engine.target import Target
from decoders.strategies import Lookahead, PromptLookup, Speculative
from decoders.testing import decode, prompts, tiny_model
from decoders.testing.tape import TapeRecorder


class CountingCompiler:
    """In the place of ``torch.compile``: what should be compiled for one size is held to it; counts graphs by method."""

    def __init__(self) -> None:
        self.graphs: Counter[str] = Counter()

    def __call__(self, function: Callable, dynamic: bool | None = None, **options: Any) -> Callable:
        if dynamic is not False:
            return function
        self.graphs[function.__name__.rsplit("_", 1)[0]] += 1
        known: list = []

        def compiled(*args: Any) -> Any:
            shapes = [tuple(t.shape) for t in tensors_in(args)]
            known.append(shapes)
            assert known[0] == shapes, "another shape for the same graph"
            return function(*args)

        return compiled


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(list(vars(value).values()))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """From here on the CPU is a device with static sizes that records."""
    recorder = TapeRecorder()
    monkeypatch.setattr(buckets, "static_shapes", lambda device: True)
    monkeypatch.setattr(engine, "recorder_of", lambda device: recorder)
    monkeypatch.setattr(torch, "compile", CountingCompiler())
    return recorder


def model(seed: int = 0) -> PreTrainedModel:
    return decoders.enable(tiny_model("llama", seed))


def recordings(model: PreTrainedModel) -> list[capture.Recordings]:
    return [s.recordings for s in model.generate.engine().sessions._free if s.recordings is not None]
