"""``decoders bench precision`` compares quantized weights and caches with the model's own precision."""

from __future__ import annotations

import json

import pytest
import torch
from decoders_lab.precision import measure, precision_of
from typer.testing import CliRunner

from decoders.cli import app
from decoders.engine.model import self_check, target
from decoders.engine.model.weights.quantization import Precision, quantize
from decoders.testing.models import tiny_model


def test_precisions_are_compared_with_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "quantize", lambda *given, **more: quantize(*given, **more, smallest=0))
    monkeypatch.setattr(self_check, "quantize", lambda *given, **more: quantize(*given, **more, smallest=0))
    text = torch.arange(70) * 7 % 90
    wide = tiny_model("llama", hidden_size=128, intermediate_size=256)  # 4 bits are stored in blocks of 128 inputs
    own, int8, both = measure(wide, ["int8", "int4+kv:int8"], [text], [4], 1, compile=False, length=20)
    assert (own.divergence, own.agreement, own.logit_error) == (0, 1, 0)
    assert 0 < int8.logit_error < both.logit_error
    assert both.matrix_bytes < int8.matrix_bytes < own.matrix_bytes
    assert both.slot_bytes < own.slot_bytes == int8.slot_bytes
    assert both.same_bits is int8.same_bits is True
    assert own.perplexity == pytest.approx(int8.perplexity, rel=0.05) and own.step_seconds[4] > 0


def test_precisions_have_names() -> None:
    assert precision_of("own") == Precision()
    assert precision_of("int4+kv:int8") == Precision("int4", "int8")


def test_mistakes_end_in_one_line() -> None:
    done = CliRunner().invoke(app, ["bench", "precision", "-p", "int3"])
    assert done.exit_code == 2 and "int4" in done.output


def test_the_command_writes_what_it_measured() -> None:
    options = ["--tokens", "64", "--nodes", "4", "--repeats", "1", "-p", "kv:int8", "--json", "-"]
    done = CliRunner().invoke(app, ["bench", "precision", "demo", *options])
    assert done.exit_code == 0, done.output
    assert [cost["name"] for cost in json.loads(done.stdout)["precisions"]] == ["own", "kv:int8"]
