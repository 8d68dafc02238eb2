"""Bytes, bandwidth and the facts of the machine."""

from __future__ import annotations

import json
import sys
from mmap import PAGESIZE, mmap
from typing import Any

import pytest
import torch

from decoders.bench import machine
from decoders.bench.machine import PeakMemory, copy_bandwidth, facts, resident, weight_bytes
from decoders.testing import tiny_model


def test_an_embedding_that_is_only_looked_up_is_not_read() -> None:
    model = tiny_model("llama")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    everything = sum(p.numel() * 4 for p in model.parameters())
    tied = embedding is head
    assert weight_bytes(model) == everything - (0 if tied else embedding.numel() * 4)
    model.config.tie_word_embeddings = True
    model.get_output_embeddings().weight = embedding
    assert weight_bytes(model) == sum(p.numel() * 4 for p in model.parameters())


def test_bandwidth_is_positive() -> None:
    assert copy_bandwidth(torch.device("cpu"), size=1 << 16, repeats=1) > 0


def test_facts_are_json_safe_and_name_the_versions() -> None:
    found: dict[str, Any] = json.loads(json.dumps(facts(torch.device("cpu"))))
    assert {"date", "cpu", "threads", "device", "torch", "transformers", "decoders"} <= set(found)
    assert found["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("waits", "threads", "said"),
    [
        (0.5, 2, "waits 50% of its time. That slows transformers more"),
        (0.5, 1, "of its time. Speeds vary"),
        (0.0, 2, ""),
    ],
)
def test_a_busy_machine_is_said_to_be_busy(
    waits: float, threads: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr(machine, "busy_share", lambda seconds: waits)
    assert said in machine.busy() and bool(machine.busy()) == bool(said)


def test_peak_memory_sees_what_was_freed_again() -> None:
    with PeakMemory(torch.device("cpu")) as before:
        pass
    # Not by malloc, which may have as much that was freed before.
    with PeakMemory(torch.device("cpu")) as memory, mmap(-1, 64 << 20) as pages:
        for begin in range(0, len(pages), PAGESIZE):
            pages[begin] = 1
    if memory.kind == "process":  # the system may tell nothing
        assert memory.bytes - before.bytes > 32 << 20
    else:
        assert (memory.kind, memory.bytes) == ("unknown", None)


def test_memory_of_the_process_grows_with_what_it_holds() -> None:
    before = resident()
    pages = mmap(-1, 64 << 20)
    for begin in range(0, len(pages), PAGESIZE):
        pages[begin] = 1
    after = resident()
    pages.close()
    assert before is not None and after is not None and after - before > 32 << 20


def test_without_psutil_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert resident() is None
    assert not facts(torch.device("cpu"))["memory"]
