"""Bytes, bandwidth and the facts of the machine."""

from __future__ import annotations

import json
from typing import Any

import torch

from decoders.bench.machine import copy_bandwidth, facts, weight_bytes
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
