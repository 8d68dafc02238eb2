"""Decoder layers whose sums, norms, rotary positions and writes to the cache follow products; the CPU is taken for CUDA."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from transformers.models.llama import modeling_llama

from decoders.engine.decode.rows import no_sampling
from decoders.engine.decode.verify import _settle_examples, draw_tokens, settle
from decoders.engine.model import target as targets
from decoders.engine.model import torch_compat
from decoders.engine.model.blocks import PassInput, causal_block
from decoders.engine.model.compiled import regions
from decoders.engine.model.compiled.functions import CompiledFunction, private
from decoders.engine.model.kernels import Operands, interpreted, products
from decoders.engine.model.slot_cache import SlotCache
from decoders.engine.model.target import Target
from decoders.engine.model.weights import few_rows, quantized, same_bits
from decoders.sampling import SamplingPlan
from decoders.testing.models import tiny_model

from ...turns import slow_but
from .triton_code import unaligned, written_for_triton

if not interpreted():
    pytest.skip("kernels are interpreted where there is no GPU and Triton is installed", allow_module_level=True)

SIZES: dict[str, Any] = dict(
    hidden_size=128,
    head_dim=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=128,
    num_hidden_layers=2,
)
DESIGNS = ("llama", "qwen3", "gemma3")
#: Launches of a layer, uncompiled: queries, keys and values; their sum; attention and its merge; the output; its sum, with the
#: residual and the norm; gate and up; what they feed; its sum, with the residual and the next layer's norm.
LAUNCHES = 9
#: Compiled, without attention's merge, which short views do not need: keys and values are written by two kernels of the compiler's.
COMPILED = 11
#: Of a step of 16 layers, uncompiled, with the draw and the acceptance.
OF_A_STEP = 320
#: Compiled, without those that read weights, or keys and values.
SMALL, LARGE = 145, ("_multiply", "attend_kernel")
#: Those before the pass: the last token, the block's, and the positions that it begins at.
INPUT = ["aten::gather", "aten::cat", "aten::sub"]


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {torch.bfloat16, torch.float16}
    monkeypatch.setitem(products._operators, "cpu", products.few_rows_on_cuda)
    monkeypatch.setattr(quantized, "take_cpu_kernels", lambda: None)
    monkeypatch.setattr(few_rows, "multiplies", lambda weight, exact: exact and weight.dtype in half)
    monkeypatch.setattr(
        same_bits, "rms_norm_for", lambda weight: products.rms_norm_on_cuda if weight.dtype in half else None
    )


def made(design: str, **more: Any) -> Any:
    return tiny_model(design, **SIZES | more).half()


def fused(target: Target) -> list[bool]:
    return ["decoders_block" in vars(layer) for layer in targets.decoder_layers(target.model)]


def read(target: Target, count: int = 5) -> tuple[Tensor, list[Tensor]]:
    """Logits and the cache after a block of nodes of two rows."""
    tokens, base = torch.arange(2 * count).view(2, count) + 3, torch.tensor([4, 0])
    buffers = target.buffers(2, 32)
    with torch.no_grad():
        out = target.forward(PassInput(tokens, base, causal_block(2, count, target.device), buffers, torch.arange(16)))
    return out.logits, [*buffers.keys, *buffers.values]


@pytest.mark.parametrize("design", slow_but(["qwen3"], DESIGNS))
def test_layers_are_known_by_what_they_compute_and_computed_likewise(
    design: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(design)
    target = Target(model, "triton")
    assert all(fused(target))
    with monkeypatch.context() as patched:
        patched.setattr(targets, "fuse_blocks", lambda *_: 0)
        plain = Target(model, "triton")
    assert not any(fused(plain))
    (ours, cache), (other, own) = read(target), read(plain)
    torch.testing.assert_close(ours, other, rtol=0.02, atol=0.02)
    for one, two in zip(cache, own, strict=True):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)
    # On another tree of modules, whose layers are its own.
    assert torch.equal(read(target.sibling())[0], ours)


class Shifted(modeling_llama.LlamaDecoderLayer):
    """Looks like the layer that it is made of, and computes something else."""

    def forward(self, *given: Any, **options: Any) -> Tensor:
        return super().forward(*given, **options) * 1.5


@pytest.mark.slow  # as the attention below
def test_a_layer_that_computes_more_is_left_alone() -> None:
    model = made("llama")
    model.model.layers[0].__class__ = Shifted
    assert fused(Target(model, "triton")) == [False, True]


class Bounded(modeling_llama.LlamaAttention):
    """Bounds what it writes, which few texts reach."""

    def forward(self, *given: Any, **options: Any) -> Any:
        cache = next((value for value in options.values() if isinstance(value, SlotCache)), None)
        if cache is None:
            return super().forward(*given, **options)
        update = cache.update
        cache.update = lambda keys, values, *more, **rest: update(keys, values.clamp(-BOUND, BOUND), *more, **rest)  # type: ignore[method-assign]
        try:
            return super().forward(*given, **options)
        finally:
            cache.update = update  # type: ignore[method-assign]


#: Of values that a loud text alone has.
BOUND = 20.0


class Positioned(modeling_llama.LlamaAttention):
    """Scales by a position that no trial reaches."""

    def forward(self, hidden_states: Tensor, *given: Any, position_ids: Tensor, **options: Any) -> Any:  # type: ignore[override]
        far = 1 + (position_ids[..., None] // 1000)
        return super().forward(hidden_states * far.to(hidden_states.dtype), *given, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Positioned, Bounded])
def test_attention_that_computes_more_for_other_texts_is_left_alone(kind: type) -> None:
    model = made("llama")
    model.model.layers[0].self_attn.__class__ = kind
    target = Target(model, "triton")
    assert fused(target) == [False, True] and "decoders_block" not in vars(target.model.model.layers[0].self_attn)


def test_layers_with_a_hook_on_a_part_are_left_alone() -> None:
    model = made("llama")
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, given, out: 2 * out)
    assert not any(fused(Target(model, "triton")))


@pytest.mark.slow
def test_layers_are_traced_without_their_neighbours_and_give_the_same() -> None:
    target = Target(made("llama"), "triton")
    tokens, base, tree = torch.arange(10).view(2, 5), torch.tensor([4, 0]), causal_block(2, 5, target.device)
    caches = [target.buffers(2, 32) for _ in range(2)]

    def run(cache: Any) -> Tensor:
        return target.forward(PassInput(tokens, base, tree, cache, torch.arange(16))).logits

    operators: Counter[str] = Counter()

    def noted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        operators.update(name.split(".")[1] for name in names if name.startswith("decoders."))
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(run, backend=noted, fullgraph=True)(caches[0])
        torch.testing.assert_close(compiled, run(caches[1]), rtol=0.02, atol=0.02)
    # Per layer a norm, and what follows products.
    assert (
        operators.pop("few_rows_linear") == 1 and operators.pop("rms_norm") == 3
    )  # the output head, and the last norm
    assert operators == {"linear_rotated": 2, "tree_attention": 2, "linear_to_residual": 4, "gated_linear": 2}


def test_results_of_our_operators_are_loaded_many_numbers_at_a_time_by_compiled_code(tmp_path: Path) -> None:
    """Compilers take what an operator gives for unaligned if one of its inputs is, and loads from it one number after the other."""

    def follow(x: Tensor, matrix: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        sums = products.linear_to_residual(x * 2, Operands([matrix], [], []), residual)
        gated = products.gated_linear(x, Operands([matrix, matrix], [], []), 0)
        assert sums is not None and gated is not None
        normed = products.rms_norm_on_cuda(gated, matrix[0], 1e-6, False, True)
        return sums[0] + 1, normed.float(), gated[:, 1:].sigmoid()

    given = (torch.randn(2, 5, 64).half(), torch.randn(64, 64).half(), torch.randn(2, 5, 64).half())
    with written_for_triton(tmp_path) as sources:
        torch.compile(private(follow), fullgraph=True, dynamic=True)(*given)
    assert len(sources) > 3 and not any(map(unaligned, sources))


class Launches(torch_compat.TorchDispatchMode):
    """Counts what would be a kernel on a device: operations that compute, and launches of ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.runtime.interpreter import GridExecutor

        self.names: list[str] = []
        launch = GridExecutor.__call__

        def noted(executor: Any, *given: Any, **options: Any) -> Any:
            self.names.append(executor.fn.__name__)
            return launch(executor, *given, **options)

        monkeypatch.setattr(GridExecutor, "__call__", noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        name = func._schema.name
        if not view and not name.startswith("decoders::") and "empty" not in name and name != "aten::_unsafe_view":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launched(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    with monkeypatch.context() as patched, torch.no_grad(), Launches(patched) as launches:
        run()
    return launches.names


def of_a_layer(two_layers: list[str], one_layer: list[str]) -> list[str]:
    for name in one_layer:
        two_layers.remove(name)
    return two_layers


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_a_layer_is_so_many_launches(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(made(design), "triton")
    tokens, base, buffers = torch.arange(4)[None], torch.tensor([4]), target.buffers(1, 512)
    counts: list[list[str]] = []
    for _ in range(2):  # with two layers, and with one
        given = PassInput(tokens, base, causal_block(1, 4, target.device), buffers, torch.arange(256))
        counts.append(launched(lambda given=given: target.forward(given), monkeypatch))
        del targets.decoder_layers(target.model)[-1]  # type: ignore[attr-defined]
    rest = len(counts[1])
    layer = of_a_layer(*counts)
    assert len(layer) <= LAUNCHES, layer
    logits, plan = torch.zeros(1, 4, 128), SamplingPlan()
    positions, sampling = torch.arange(4)[None], no_sampling(1, target.device)
    rest += len(launched(lambda: draw_tokens(logits, plan, sampling, positions), monkeypatch))
    rest += len(launched(lambda: settle(*_settle_examples(target, 1, 4)), monkeypatch))
    assert 15 * len(layer) + rest <= OF_A_STEP, rest


def launched_compiled(
    compiled: Callable[..., Any], run: Callable[..., Any], arguments: tuple, folder: Path
) -> list[str]:
    """What `run` launches where `compiled`, which may be the same, was compiled for CUDA with `arguments`."""
    with written_for_triton(folder), torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        _, codes = run_and_get_code(compiled, *arguments)
        launches = Launches(patched)
        run(*arguments)
    outside = re.findall(r"(?:extern_kernels|torch\.ops\.(?!decoders\.))[\w.]+(?=\()", "\n".join(codes))
    return [*launches.names, *outside]


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_a_compiled_layer_and_step_are_so_many_launches(design: str, tmp_path: Path) -> None:
    counts: list[list[str]] = []
    for layers in (2, 1):
        kinds = {"layer_types": ["sliding_attention", "full_attention"][-layers:]} if design == "gemma3" else {}
        target = Target(made(design, num_hidden_layers=layers, **kinds), "triton")
        forward, arguments = regions.regional_forward(target), regions.examples(target, 1, 5)
        counts.append(launched_compiled(forward.compile, forward, arguments, tmp_path))
    assert len(counts[0]) - len(counts[1]) <= COMPILED, counts[0]
    draw, plan = CompiledFunction(draw_tokens).compiled, SamplingPlan()
    positions, sampling = torch.arange(4)[None], no_sampling(1, target.device)
    given = torch.zeros(1, 4, 128), plan, sampling, positions
    rest = [*INPUT, *launched_compiled(draw, draw, given, tmp_path)]
    accept = CompiledFunction(settle).compiled
    rest += launched_compiled(accept, accept, _settle_examples(target, 1, 4), tmp_path)
    two, one, outside = ([name for name in names if name not in LARGE] for names in (*counts, rest))
    assert len(one) + 15 * (len(two) - len(one)) + len(outside) <= SMALL, (one, outside)
