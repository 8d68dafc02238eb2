"""A design that has passed its check is not compared again, until something changes that the verdict depends on."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import decoders
from decoders.engine.model import attention, kept_checks
from decoders.engine.model.self_check import target_of
from decoders.engine.model.weights.quantization import Precision
from decoders.errors import UnsupportedError
from decoders.testing import decode, prompts
from decoders.testing.models import tiny_model

KEY_OF = kept_checks.key_of
FIRST_DAY = "2001-02-03"


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of this test's verdicts, which all bear an old date."""
    folder = tmp_path / "cache" / "checks"
    monkeypatch.setattr(kept_checks, "key_of", KEY_OF)
    monkeypatch.setattr(kept_checks, "folder", lambda: folder)
    return folder


def passed(model: nn.Module, folder: Path) -> Path:
    """Checks a model, and dates the verdict back; its file."""
    target_of(model)
    (file,) = folder.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"day": FIRST_DAY}))
    return file


def day_of(model: Any, **options: Any) -> str:
    return target_of(model, **options).checks.day


@pytest.mark.parametrize("name, dtype", [("llama", torch.float32), ("gemma3", torch.bfloat16), ("lfm2", torch.float32)])
def test_the_same_model_is_checked_once(name: str, dtype: torch.dtype, kept: Path) -> None:
    first = target_of(tiny_model(name).to(dtype))
    passed(tiny_model(name).to(dtype), kept)
    again = target_of(tiny_model(name, seed=1).to(dtype))  # the values of weights do not count
    assert again.checks.day == FIRST_DAY < first.checks.day
    assert (again.checks.longest, again.checks.invariance) == (first.checks.longest, first.checks.invariance)
    out = decode(decoders.enable(tiny_model(name).to(dtype)), prompts(), "prompt_lookup", max_new_tokens=2)
    assert out.report.checked == FIRST_DAY and f"(checked on {FIRST_DAY})" in str(out.report)


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def _forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    plain = type(mlp).forward
    mlp.forward = lambda hidden: plain(mlp, hidden)


def _attribute(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def _table(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.01


def _config(model: Any) -> None:
    model.config.rms_norm_eps = 0.1


def _module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def _class(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = type("LlamaMLP", (type(model.model.layers[0].mlp),), {"__module__": __name__})


def _helper(model: Any) -> None:
    model.model.layers[0].mlp.note = object()


@pytest.mark.parametrize("change", [_hook, _forward, _attribute, _table, _config, _module, _class, _helper])
def test_a_model_that_was_changed_is_checked_anew(change: Any, kept: Path) -> None:
    model = tiny_model("llama")
    passed(model, kept)
    assert day_of(model) == FIRST_DAY
    change(model)
    assert day_of(model) > FIRST_DAY
    if change in (_hook, _forward, _class, _helper):  # what these do cannot be told
        assert KEY_OF(target_of(model), model) is None


def test_the_attention_of_a_layer_with_a_config_of_its_own_counts(kept: Path) -> None:
    model, donor = tiny_model("llama"), tiny_model("llama")
    model.model.layers[-1] = donor.model.layers[-1]
    passed(model, kept)
    assert day_of(model) == FIRST_DAY
    donor.set_attn_implementation("eager")  # it would need a mask, which transformers leaves out for the model's "sdpa"
    with pytest.raises(UnsupportedError, match="differ from a plain forward"):
        day_of(model)


@pytest.mark.parametrize("what", ["a function", "a method", "an attention function"])
def test_a_model_whose_code_was_patched_is_checked_anew(what: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama as modeling

    model = tiny_model("llama")
    passed(model, kept)
    assert day_of(model) == FIRST_DAY
    rotary, mlp, plain = modeling.rotate_half, modeling.LlamaMLP.forward, attention.AttentionInterface().get("sdpa")
    if what == "a function":
        monkeypatch.setattr(modeling, "rotate_half", lambda x: rotary(x))
    elif what == "a method":
        monkeypatch.setattr(modeling.LlamaMLP, "forward", functools.wraps(mlp)(lambda self, x: mlp(self, x)))
    else:
        known = attention.AttentionInterface._global_mapping
        monkeypatch.setitem(known, "sdpa", lambda *given, **more: plain(*given, **more))
    assert day_of(model) > FIRST_DAY and KEY_OF(target_of(model), model) is None


def test_a_file_of_code_that_was_written_since_counts(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    passed(model, kept)
    monkeypatch.setattr(kept_checks, "_stamp", lambda path: (0, path.stat().st_size))
    assert day_of(model) > FIRST_DAY


def test_what_an_engine_computes_with_counts(kept: Path) -> None:
    model = tiny_model("llama")
    passed(model, kept)
    assert day_of(model) == FIRST_DAY
    assert day_of(model, precision=Precision("int8")) > FIRST_DAY
    assert day_of(tiny_model("llama").bfloat16()) > FIRST_DAY
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert day_of(model) > FIRST_DAY
    finally:
        torch.set_num_threads(threads)


def test_how_the_cpu_multiplies_float32_counts(kept: Path) -> None:
    """Once CUDA's precision alone was set, PyTorch raises where it is asked for that of all devices."""
    model = tiny_model("llama")
    passed(model, kept)
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    usual = cuda.fp32_precision, cpu.fp32_precision
    try:
        cuda.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="precision"):
            torch.get_float32_matmul_precision()
        assert day_of(model) == FIRST_DAY
        cpu.fp32_precision = "bf16"
        assert day_of(model) > FIRST_DAY
    finally:
        cuda.fp32_precision, cpu.fp32_precision = usual


def test_a_verdict_against_a_model_is_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.LayerKind, "narrow", lambda kind, allowed, *_: allowed)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="differ"):
            target_of(tiny_model("mistral"), "sdpa")
    assert not kept.exists()


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"day": 3}', None], ids=repr)
def test_a_file_that_cannot_be_read_is_no_file(content: bytes | None, kept: Path) -> None:
    model = tiny_model("llama")
    file = passed(model, kept)
    damaged = json.dumps(json.loads(file.read_text()) | {"invariance": 5}).encode()
    file.write_bytes(damaged if content is None else content)
    assert day_of(model) > FIRST_DAY
    assert day_of(model) == json.loads(file.read_text())["day"]
    file.unlink()
    kept.chmod(0o500)
    try:
        assert day_of(model) > FIRST_DAY
    finally:
        kept.chmod(0o700)
