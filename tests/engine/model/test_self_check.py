"""Faults that are planted in a target: the check at its start sees each, and a wrong kernel is left for sdpa."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import decoders
from decoders.cli import app
from decoders.engine.model import attention, self_check
from decoders.engine.model.attention import LayerKind
from decoders.engine.model.kernels import attention as kernel
from decoders.engine.model.kernels import chosen, interpreted, products
from decoders.engine.model.self_check import target_of
from decoders.engine.model.slot_cache import SlotCache
from decoders.engine.model.target import Target
from decoders.engine.model.weights.quantization import Precision
from decoders.engine.model.weights.twin import share_weights
from decoders.errors import UnsupportedError
from decoders.testing import assert_same_tokens, decode, prompts
from decoders.testing.models import tiny_model
from decoders.tree import TreeTensors

with_kernels = pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is off: a GPU is here, or no Triton")


def one_further(kind: LayerKind, allowed: Any, position_q: Any, position_k: Any) -> Any:
    return plain_narrow(LayerKind(kind.window and kind.window + 1, kind.chunk), allowed, position_q, position_k)


def without_chunks(kind: LayerKind, allowed: Any, position_q: Any, position_k: Any) -> Any:
    return plain_narrow(LayerKind(kind.window), allowed, position_q, position_k)


plain_narrow, plain_mask, plain_bits, plain_attend, plain_layer = (
    LayerKind.narrow,
    attention.build_mask,
    kernel.pack_mask,
    kernel.attend,
    products.decoder_layers,
)


def seeing_a_sibling(kinds: Any, base: Any, offsets: Any, visible: Any, view: int, dtype: Any) -> Any:
    """The last node of blocks of ten and more sees the second one too."""
    if visible.shape[1] >= 10:
        visible = visible.clone()
        visible[:, -1, 1] = True
    return plain_mask(kinds, base, offsets, visible, view, dtype)


def blind_to_long_texts(kinds: Any, base: Any, offsets: Any, visible: Any, view: int, dtype: Any) -> Any:
    mask = plain_mask(kinds, base, offsets, visible, view, dtype)
    if visible.shape[1] == 16:
        mask[:, :, :, 10:12] = torch.finfo(dtype).min
    return mask


def of_the_first_row(kinds: Any, base: Any, offsets: Any, visible: Any, view: int, dtype: Any) -> Any:
    return plain_mask(kinds, base[:1].expand(len(base)), offsets, visible, view, dtype)


@pytest.mark.parametrize(
    "model, owner, name, fault",
    [
        ("gemma3", LayerKind, "narrow", one_further),
        ("mistral", LayerKind, "narrow", one_further),
        ("llama4", LayerKind, "narrow", without_chunks),
        ("llama", attention, "build_mask", seeing_a_sibling),
        ("llama", attention, "build_mask", blind_to_long_texts),
        ("llama", attention, "build_mask", of_the_first_row),
    ],
)
def test_a_planted_fault_is_seen(
    model: str, owner: Any, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_model(model)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(UnsupportedError, match="logits verified through a token tree of"):
        target_of(tiny, "sdpa")


def reaching_further(query: Any, key: Any, value: Any, mask: Any, sinks: Any, kind: LayerKind, *more: Any) -> Any:
    return plain_attend(query, key, value, mask, sinks, LayerKind(kind.window and kind.window + 1), *more)


def layer_reaching_further(*given: Any) -> Any:
    *first, windows, chunks, scale, softcap, kind = given
    return plain_layer(*first, [window and window + 1 for window in windows], chunks, scale, softcap, kind)


def with_bits_of_a_sibling(base: Any, offsets: Any, visible: Any) -> Any:
    if visible is not None and visible.shape[1] >= 10:
        visible = visible.clone()
        visible[:, -1, 1] = True
    return plain_bits(base, offsets, visible)


def with_bits_of_the_first_row(base: Any, offsets: Any, visible: Any) -> Any:
    return plain_bits(base[:1].expand(len(base)), offsets, visible)


@pytest.mark.parametrize(
    "model, module, name, fault",
    [
        ("gemma3", products, "decoder_layers", layer_reaching_further),
        ("llama4", kernel, "attend", reaching_further),
        ("llama", kernel, "pack_mask", with_bits_of_a_sibling),
        ("llama", kernel, "pack_mask", with_bits_of_the_first_row),
    ],
    ids=["whole layer", "attention", "tree", "rows"],
)
def test_a_fault_planted_in_what_a_kernel_is_told_is_seen_and_the_kernel_is_left(
    model: str, module: Any, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_model(model)
    monkeypatch.setattr(module, name, fault)
    with pytest.warns(UserWarning, match="logits verified through a token tree of"):
        assert target_of(tiny).attends == "sdpa"


def blind_from_slot_256(kinds: Any, base: Any, offsets: Any, visible: Any, view: int, dtype: Any) -> Any:
    mask = plain_mask(kinds, base, offsets, visible, view, dtype)
    mask[..., 256:-16] = torch.finfo(dtype).min
    return mask


def test_what_goes_wrong_at_256_slots_is_seen_where_kernels_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "ON_CPU", self_check.ON_CUDA)
    tiny = tiny_model("llama", max_position_embeddings=512)
    monkeypatch.setattr(attention, "build_mask", blind_from_slot_256)
    with pytest.raises(UnsupportedError, match="after 300 tokens"):
        target_of(tiny, "sdpa")


def test_a_text_that_goes_on_in_the_wrong_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Target.prefill

    def prefill(target: Target, tokens: Any, start: torch.Tensor, buffers: Any, view: Any, latest: int) -> None:
        plain(target, tokens, start + (latest > 0), buffers, view, latest)

    tiny = tiny_model("llama")
    monkeypatch.setattr(Target, "prefill", prefill)
    with pytest.raises(UnsupportedError, match="differ"):
        target_of(tiny)


def test_a_branch_at_the_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Target.inputs

    def inputs(target: Target, nodes: Any, base: Any, tree: TreeTensors, *rest: Any, **more: Any) -> dict:
        if nodes.shape[1] > 10:
            tree = replace(tree, offsets=torch.arange(len(tree)).expand_as(tree.offsets))
        return plain(target, nodes, base, tree, *rest, **more)

    tiny = tiny_model("llama")
    monkeypatch.setattr(Target, "inputs", inputs)
    with pytest.raises(UnsupportedError, match="16 nodes"):
        target_of(tiny)


def test_keys_of_another_layer_are_seen_where_layers_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SlotCache.update

    def update(cache: SlotCache, keys: Any, values: Any, layer: int, *rest: Any, **more: Any) -> Any:
        own = plain(cache, keys, values, layer, *rest, **more)
        return (cache.buffers.keys[0][:, :, : cache.view], own[1]) if layer == 1 else own

    tiny = tiny_model("gemma4", global_head_dim=8)
    monkeypatch.setattr(SlotCache, "update", update)
    with pytest.raises(UnsupportedError, match="differ"):
        target_of(tiny)


@pytest.mark.parametrize("fault", ["in the first pass", "in the check"])
def test_a_design_that_raises_is_refused_in_one_sentence(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoders.enable(tiny_model("llama"))
    plain = type(model.model.layers[0].mlp).forward

    def forward(layer: Any, hidden: torch.Tensor) -> Any:
        if hidden.shape[1] > (1 if fault == "in the check" else 0):
            raise AssertionError
        return plain(layer, hidden)

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", forward)
    with pytest.raises(UnsupportedError, match=r"\(AssertionError\)\. Call generate without strategy="):
        model.generate(torch.arange(5, 9)[None], strategy="prompt_lookup", max_new_tokens=4)


@pytest.mark.parametrize("wrong_texts", [1, self_check.TEXTS])
def test_in_low_precision_a_fault_shows_in_every_text(wrong_texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = self_check._plain_logits, list[int]()

    def logits(*given: Any) -> list[Tensor]:
        calls.append(len(calls))
        return [own * (1 + (len(calls) <= wrong_texts)) for own in plain(*given)]

    monkeypatch.setattr(self_check, "_plain_logits", logits)
    target, reference = Target(model := tiny_model("mixtral").bfloat16()), share_weights(model)
    difference = self_check._difference(target, reference, target.layout, self_check.ON_CPU)
    assert (difference is None) == (wrong_texts == 1) and len(calls) == min(wrong_texts + 1, self_check.TEXTS)


def test_windows_are_as_long_as_before_when_the_check_is_over() -> None:
    model = tiny_model("gemma3", sliding_window=4096)
    target = target_of(model)
    assert (
        LayerKind(window=4096) in target.attending.kinds
        and getattr(target.model.model.layers[0].self_attn, attention.KIND_ATTRIBUTE) in target.attending.kinds
    )
    assert model.config.sliding_window == 4096 == target.model.config.sliding_window


def test_the_check_shortens_windows_that_no_text_of_its_own_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_model("gemma3", sliding_window=4096)
    monkeypatch.setattr(LayerKind, "narrow", one_further)
    with pytest.raises(UnsupportedError, match="differ"):
        target_of(tiny, "sdpa")


def small() -> Any:
    """One layer and one key head: the interpreter is slow."""
    return tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=2)


@pytest.fixture
def kernel_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU takes the kernel as CUDA does, interpreted, and a check runs little."""
    monkeypatch.setattr(chosen, "preferred", lambda device: "triton")
    monkeypatch.setattr(self_check, "ON_CPU", self_check.Sizes((12, 7), ((5, 3),), 8))


@pytest.mark.parametrize("context", [5, 9, 16])
def test_a_model_of_few_positions_is_checked_within_them(context: int) -> None:
    target_of(tiny_model("gpt2", n_positions=context))


@with_kernels
@pytest.mark.usefixtures("kernel_preferred")
def test_the_kernel_is_checked_and_taken() -> None:
    target = target_of(small(), "auto", Precision())
    assert target.attends == "triton" and target.checks.rejected is None


@with_kernels
@pytest.mark.usefixtures("kernel_preferred")
@pytest.mark.parametrize("fault", [pytest.param("wrong", marks=pytest.mark.slow), "raises"])
def test_a_kernel_that_does_not_work_is_left_for_sdpa_with_one_warning_and_is_a_problem_for_doctor(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = kernel.attend

    def wrong(query: Any, *rest: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        out = plain(query, *rest)
        return out * 1.5 if query.shape[2] == 16 else out  # right for other sizes

    monkeypatch.setattr(kernel, "attend", wrong)
    reason = "16 nodes" if fault == "wrong" else "no kernel image"
    model, ids = decoders.enable(small()), torch.arange(6, 16)[None]
    given = dict(input_ids=ids, max_new_tokens=4, do_sample=False)
    with pytest.warns(UserWarning, match=f"a kernel of this package does not work here.*attention is sdpa.*{reason}"):
        ours = model.generate(**given, strategy="prompt_lookup")
    assert torch.equal(ours, model.generate(**given))
    model.generate(**given, strategy="prompt_lookup")  # the warning came once
    if fault == "wrong":  # found by a check of some seconds
        return
    with pytest.raises((UnsupportedError, RuntimeError), match=reason):
        target_of(small(), "triton")
    monkeypatch.setattr("decoders.cli.models.load", lambda *_: (small(), None))
    with pytest.warns(UserWarning, match="kernel"):
        out = CliRunner().invoke(app, ["doctor", "any", "--json"])
    found = {finding["name"]: finding for finding in json.loads(out.stdout)}
    assert found["attention"]["status"] == "problem" and reason in found["attention"]["detail"]


def test_what_the_kernel_cannot_do_is_named() -> None:
    layout = target_of(tiny_model("llama")).layout
    count, cpu = len(layout), torch.device("cpu")
    if interpreted():
        assert chosen.unfit("triton", layout, count, cpu) is None
        assert "their own attention" in str(chosen.unfit("triton", layout, count - 1, cpu))
        assert "512 wide" in str(chosen.unfit("triton", [replace(spec, key_dim=512) for spec in layout], count, cpu))
        assert "float64" in str(
            chosen.unfit("triton", [replace(spec, dtype=torch.float64) for spec in layout], count, cpu)
        )


@pytest.mark.parametrize("design", ["gpt2", "llama"])
@pytest.mark.parametrize("context", [5, 6, 7])
def test_short_contexts_decode_to_their_end(design: str, context: int) -> None:
    model, inputs = (
        decoders.enable(
            tiny_model(design, **{"n_positions" if design == "gpt2" else "max_position_embeddings": context})
        ),
        prompts(2, length=4),
    )
    inputs = {name: value[:, -3:] for name, value in inputs.items()}
    expected = decode(model, inputs, max_new_tokens=context - 2).sequences
    out = decode(model, inputs, "prompt_lookup", max_new_tokens=context - 2, decoders_config={"compile": False})
    assert_same_tokens(model, inputs, expected, out.sequences, design)


def test_a_context_that_leaves_no_room_for_the_check_is_refused_with_its_length() -> None:
    model = decoders.enable(tiny_model("llama", max_position_embeddings=4))
    with pytest.raises(
        UnsupportedError, match="context of LlamaForCausalLM has 4 positions, and checking the model needs 5"
    ):
        model.generate(torch.tensor([[5, 6]]), strategy="prompt_lookup", max_new_tokens=2)
