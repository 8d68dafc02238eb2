"""A design that has passed its check is not compared again, until anything changes that the verdict depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import decoders
from decoders.engine.model import attention, self_check, verdicts
from decoders.engine.model.self_check import target_of
from decoders.engine.model.weights.quantization import Precision
from decoders.errors import UnsupportedError
from decoders.testing import decode, prompts
from decoders.testing.models import tiny_model

KEY_OF = verdicts.key_of
FIRST_DAY = "2001-02-03"


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of this test's verdicts, which all bear an old date."""
    path = tmp_path / "folder" / "checks.json"
    monkeypatch.setattr(verdicts, "key_of", KEY_OF)
    monkeypatch.setattr(verdicts, "path", lambda: path)
    return path


def passed(model: nn.Module, path: Path) -> None:
    """Checks a model, and dates the verdicts back."""
    target_of(model)
    verdicts_kept = json.loads(path.read_text())
    for each in verdicts_kept["verdicts"].values():
        each["day"] = FIRST_DAY
    path.write_text(json.dumps(verdicts_kept))


def day_of(model: Any, **options: Any) -> str:
    return target_of(model, **options).checked


@pytest.mark.parametrize("name, dtype", [("llama", torch.float32), ("gemma3", torch.bfloat16), ("lfm2", torch.float32)])
def test_the_same_model_is_checked_once(name: str, dtype: torch.dtype, kept: Path) -> None:
    first = target_of(tiny_model(name).to(dtype))
    passed(tiny_model(name).to(dtype), kept)
    again = target_of(tiny_model(name, seed=1).to(dtype))  # the values of weights do not count
    assert again.checked == FIRST_DAY < first.checked
    assert (again.longest, again.invariance) == (first.longest, first.invariance)
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


def _helper(model: Any) -> None:
    model.model.layers[0].mlp.note = object()


@pytest.mark.parametrize("change", [_forward, _attribute, _table, _config, _helper])
def test_a_model_that_was_changed_is_checked_anew(change: Any, kept: Path) -> None:
    model = tiny_model("llama")
    passed(model, kept)
    assert day_of(model) == FIRST_DAY
    change(model)
    assert day_of(model) > FIRST_DAY
    if change in (_hook, _forward, _helper):  # what these do cannot be told
        assert KEY_OF(target_of(model), model) is None


def test_the_attention_of_a_layer_with_a_config_of_its_own_counts(kept: Path) -> None:
    model, donor = tiny_model("llama"), tiny_model("llama")
    model.model.layers[-1] = donor.model.layers[-1]
    passed(model, kept)
    assert day_of(model) == FIRST_DAY
    donor.set_attn_implementation("eager")  # it would need a mask, which transformers leaves out for the model's "sdpa"
    with pytest.raises(UnsupportedError, match="differ from a plain forward"):
        day_of(model)


@pytest.mark.parametrize(
    "what", ["a function", "a method", "a function of torch", "an attention function", "a constant"]
)
def test_code_that_was_changed_is_checked_anew(what: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama as modeling

    model = tiny_model("llama")
    passed(model, kept)
    assert day_of(model) == FIRST_DAY
    rotary, mlp, linear = modeling.rotate_half, modeling.LlamaMLP.forward, nn.functional.linear
    if what == "a function":
        monkeypatch.setattr(modeling, "rotate_half", lambda x: rotary(x))
    elif what == "a method":
        monkeypatch.setattr(modeling.LlamaMLP, "forward", lambda self, x: mlp(self, x))
    elif what == "a function of torch":
        monkeypatch.setattr(nn.functional, "linear", lambda *given: linear(*given))
    elif what == "an attention function":
        plain = attention.AttentionInterface().get("sdpa")
        monkeypatch.setitem(
            attention.AttentionInterface._global_mapping, "sdpa", lambda *given, **more: plain(*given, **more)
        )
    else:
        monkeypatch.setattr(self_check, "LONGEST_BRANCH", 3)
        assert day_of(model) == FIRST_DAY
        monkeypatch.setattr(attention, "STRETCH", 32)
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


def test_a_thread_may_write_to_modules_while_they_are_looked_at(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Dynamo does, which puts what it compiled among the globals of the function."""

    class Grows:
        @property
        def __class__(self) -> type:  # asked whether it runs
            vars(attention).setdefault("_compiled_meanwhile", None)
            return object

    monkeypatch.setattr(attention, "_compiled_meanwhile", None, raising=False)
    monkeypatch.delattr(attention, "_compiled_meanwhile")
    monkeypatch.setattr(attention, "_grows", Grows(), raising=False)
    passed(tiny_model("llama"), kept)
    assert hasattr(attention, "_compiled_meanwhile") and day_of(tiny_model("llama")) == FIRST_DAY


def test_a_verdict_against_a_model_is_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.LayerKind, "narrow", lambda kind, allowed, *_: allowed)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="differ"):
            target_of(tiny_model("mistral"), "sdpa")
    assert not kept.exists()


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"format": 1, "verdicts": 3}', "damaged"], ids=repr)
def test_a_file_that_cannot_be_read_is_no_file(content: bytes | str, kept: Path) -> None:
    model = tiny_model("llama")
    passed(model, kept)
    if isinstance(content, str):
        whole = json.loads(kept.read_text())
        whole["verdicts"] = {key: each | {"invariance": 5} for key, each in whole["verdicts"].items()}
        content = json.dumps(whole).encode()
    kept.write_bytes(content)
    assert day_of(model) > FIRST_DAY
    assert day_of(model) == json.loads(kept.read_text())["verdicts"].popitem()[1]["day"]
    kept.unlink()
    kept.parent.chmod(0o500)
    try:
        assert day_of(model) > FIRST_DAY
    finally:
        kept.parent.chmod(0o700)


def test_the_file_is_bounded(kept: Path) -> None:
    for number in range(verdicts.KEPT + 3):
        verdicts.keep(str(number), verdicts.Verdict(FIRST_DAY, number, None))
    assert len(json.loads(kept.read_text())["verdicts"]) == verdicts.KEPT
    assert verdicts.find("2") is None and verdicts.find("3") == verdicts.Verdict(FIRST_DAY, 3, None)
