"""GGUF files are loaded like any other checkpoint: dense weights that decode."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from torch import nn
from transformers import PreTrainedModel
from typer.testing import CliRunner

from decoders.cli import app, models
from decoders.testing.models import ARCHITECTURES, VOCAB, Architecture


def written_by_the_lab(name: str) -> ModuleType:
    """A module of the distribution that writes such files, from the checkout."""
    file = Path(__file__).parents[2] / f"plugins/decoders-lab/src/decoders_lab/{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gguf_files = written_by_the_lab("gguf_files")


def model(seed: int = 1) -> PreTrainedModel:
    """A model whose rows are whole blocks of quantized numbers."""
    return Architecture("llama", MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"intermediate_size": 64}))(
        seed
    )


def write(path: Path, number_format: str = "f32") -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 2]
    # Two merges: transformers 5.17 misreads lists of one.
    gguf_files.write_uniformly(model(), path, number_format, [*alphabet, "ab", "cd"], ["a b", "c d"])


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    pytest.importorskip("accelerate", reason="the extra gguf is not installed")
    write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_gguf_file_holds_the_same_model(gguf_file: Path, capfd: Any) -> None:
    loaded, tokenizer = models.load(str(gguf_file))
    ids = torch.arange(1, 20)[None]
    assert torch.equal(loaded(ids).logits, model()(ids).logits)
    assert len(tokenizer("cabc")["input_ids"]) == 3, "the merge in the file is applied"
    assert capfd.readouterr().err == "", "no progress bars"


def test_quantized_blocks_become_dense_matrices(gguf_file: Path) -> None:
    write(gguf_file.with_name("small.gguf"), "q8_0")
    loaded, _ = models.load(str(gguf_file.with_name("small.gguf")), "bfloat16")
    linears = [m for m in loaded.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 15
    assert {(type(m), m.weight.dtype) for m in linears} == {(nn.Linear, torch.bfloat16)}
    assert not getattr(loaded, "is_quantized", False)
    assert loaded.float().dtype == torch.float32, "transformers refuses to convert models that it takes for quantized"
    ids = torch.arange(1, 20)[None]
    theirs, own = model()(ids).logits, loaded(ids).logits
    assert 0 < (own - theirs).abs().max() < 0.2 * theirs.abs().max()


def test_a_gguf_file_decodes_on_the_command_line(gguf_file: Path) -> None:
    common = ["generate", str(gguf_file), "abcabc", "-n", "12", "--no-compile", "--json"]
    drafted, plain = (CliRunner().invoke(app, [*common, "-s", name]) for name in ("prompt_lookup", "autoregressive"))
    assert drafted.exit_code == 0, drafted.output
    assert json.loads(drafted.stdout)["text"] == json.loads(plain.stdout)["text"]
    assert json.loads(drafted.stdout)["report"]["new_tokens"] == [12]


def test_a_missing_reader_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    result = CliRunner().invoke(app, ["generate", "somewhere/model.gguf", "hello"])
    assert result.exit_code == 2
    assert "needs gguf" in result.stderr and "hf-decoders[gguf]" in result.stderr


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "no.gguf"), "hello"])
    assert result.exit_code == 2
    assert "no.gguf" in result.stderr and "cannot be loaded" in result.stderr
