"""Bytes, bandwidth and the facts of the machine."""

from __future__ import annotations

import json
import sys
from mmap import PAGESIZE, mmap
from typing import Any

import pytest
import torch

from decoders.bench.machine import copy_bandwidth, facts, resident, weight_bytes, with_peak_memory
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


def test_peak_memory_sees_what_was_freed_again() -> None:
    def work(size: int) -> None:
        with mmap(-1, size) as pages:  # not by malloc, which may have as much that was freed before
            for begin in range(0, len(pages), PAGESIZE):
                pages[begin] = 1

    _, before = with_peak_memory(torch.device("cpu"), lambda: work(PAGESIZE))
    _, peak = with_peak_memory(torch.device("cpu"), lambda: work(64 << 20))
    if peak is not None:  # the system may tell nothing
        assert before is not None and peak - before > 32 << 20


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
