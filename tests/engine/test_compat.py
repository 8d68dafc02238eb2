"""Every private part of torch and transformers that the engine uses, one test each: a version that moves one fails here first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

import decoders
from decoders.engine import torch_compat, transformers_compat
from decoders.testing import tiny_model

PACKAGE = Path(decoders.__file__).parent
VERSION = f"torch {torch.__version__}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_multiply_as_dense_ones(dtype: torch.dtype) -> None:
    if not torch_compat.multiplies_packed(dtype):
        pytest.skip(f"oneDNN multiplies no {dtype} on this machine")
    weight, x, bias = torch.randn(48, 32, dtype=dtype), torch.randn(3, 32, dtype=dtype), torch.randn(48, dtype=dtype)
    packed = torch_compat.reorder_linear_weight(weight)
    for term in (bias, None):
        expected = torch.nn.functional.linear(x, weight, term)
        torch.testing.assert_close(
            torch_compat.multiply_packed(x, packed, term), expected, atol=0.1, rtol=0.02, msg=VERSION
        )


def test_float64_is_not_packed() -> None:
    assert not torch_compat.multiplies_packed(torch.float64)


def test_inductor_has_a_lowering_for_the_packed_kernel() -> None:
    library = torch.library.Library("decoders_test_compat", "FRAGMENT")
    library.define("packed(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
    assert torch_compat.lower_to_packed_kernel(torch.ops.decoders_test_compat.packed.default), VERSION


def test_quantized_products_multiply_as_dense_ones() -> None:
    x, levels = torch.randn(3, 64), torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    scale, zero = torch.rand(32) + 0.5, torch.zeros(32, dtype=torch.int32)
    product = torch_compat.multiply_weight_int8(x, levels, scale)
    torch.testing.assert_close(product, x @ levels.float().T * scale, atol=1e-2, rtol=1e-4, msg=VERSION)
    nibbles, scales = torch.randint(0, 16, (32, 64), dtype=torch.int32), torch.rand(2, 32, 2)
    step, offset = (part.T.repeat_interleave(32, dim=1) for part in scales.unbind(-1))
    product = torch_compat.multiply_int4(x, torch_compat.reorder_int4(nibbles), 32, scales)
    torch.testing.assert_close(product, x @ ((nibbles - 8) * step + offset).T, atol=1e-2, rtol=1e-4, msg=VERSION)
    if torch_compat.multiplies_int8():
        rows = torch.randint(0, 256, (3, 64), dtype=torch.uint8)
        product = torch_compat.multiply_int8(rows, torch_compat.reorder_int8(levels), scale, zero, 32)
        torch.testing.assert_close(product, (rows.float() - 128) @ levels.float().T * scale, msg=VERSION)


def test_inductor_has_lowerings_for_the_quantized_kernels() -> None:
    library = torch.library.Library("decoders_test_quantized", "FRAGMENT")
    library.define("int8(Tensor x, Tensor packed, Tensor scale, Tensor zero, int out_features) -> Tensor")
    library.define("weight_int8(Tensor x, Tensor weight, Tensor scale) -> Tensor")
    library.define("int4(Tensor x, Tensor packed, int group, Tensor scales) -> Tensor")
    operators = torch.ops.decoders_test_quantized
    made = torch_compat.lower_to_quantized_kernels(
        operators.int8.default, operators.weight_int8.default, operators.int4.default
    )
    assert made, VERSION


def test_writes_in_place_are_counted_and_inference_tensors_are_none() -> None:
    tensor = torch.zeros(2)
    before = torch_compat.writes_counted(tensor)
    tensor.add_(1)
    assert torch_compat.writes_counted(tensor) == before + 1
    with torch.inference_mode():
        assert torch_compat.writes_counted(torch.zeros(2)) == 0


def test_subclasses_are_not_asked_within() -> None:
    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object) -> object:
            raise AssertionError

    tensor = torch.zeros(2).as_subclass(Asked)
    with torch_compat.as_plain_tensors():
        assert tensor.sum().item() == 0
    with pytest.raises(AssertionError):
        tensor.sum()


def test_switches_of_dynamo_are_there() -> None:
    before = torch_compat.graphs_compiled()
    with torch_compat.floats_as_constants(), torch_compat.sizes_of_their_own():
        x = torch.ones(2, 3)
        torch_compat.mark_static(x, 0)
        function = torch_compat.compiled_whole(lambda x: x * 2, dynamic=True, options={"size_asserts": False})
        assert torch.equal(function(x), x * 2)
    assert torch_compat.graphs_compiled() == before + 1, VERSION
    assert torch_compat.skip_module_guards()([]) == []
    assert torch.equal(torch_compat.compiled_region(lambda x: x + 1)(x), x + 1)


def test_what_dynamo_raises_is_known() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch_compat.COMPILER_ERRORS):
        torch.compile(broken, fullgraph=True, backend="eager")(torch.ones(1))


def test_tracing_leaves_modules_of_other_threads_alone() -> None:
    from threading import Thread

    seen: list[torch.Tensor] = []
    module = torch.nn.Linear(2, 2)

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = Thread(target=lambda: seen.append(module(torch.ones(1, 2))))
            thread.start()
            thread.join()
            return x

    with torch_compat.traced_by_one_thread():
        torch.fx.symbolic_trace(Waits())
    assert type(seen[0]) is torch.Tensor


def test_flex_decoding_uses_several_programs_where_torch_does() -> None:
    newer = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
    assert torch_compat.flex_decoding_takes_several_programs() or not newer, VERSION


def test_prepared_configs_tell_the_token_that_fills_ended_rows() -> None:
    model = tiny_model("llama")
    config = GenerationConfig(eos_token_id=[5, 6])
    assert transformers_compat.pad_token_of(config) == 0, "not prepared yet"
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
    assert transformers_compat.pad_token_of(config) == 5
    config = GenerationConfig(eos_token_id=5, pad_token_id=9)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
    assert transformers_compat.pad_token_of(config) == 9


def test_recurrent_designs_are_told_from_others() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4))
    assert transformers_compat.keeps_recurrent_state(mamba)
    assert not transformers_compat.keeps_recurrent_state(tiny_model("llama"))


#: Files of the engine room and of hf that may name private parts.
COMPAT = ("torch_compat.py", "transformers_compat.py")


def test_no_other_file_of_engine_hf_and_sampling_names_a_private_part() -> None:
    found = []
    for path in [
        p for room in ("engine", "hf", "sampling", "strategies", "registry") for p in (PACKAGE / room).rglob("*.py")
    ]:
        if path.name in COMPAT:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in ("torch", "transformers"):
                    found.append(f"{path.name}:{node.lineno} {node.attr}")
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.split(".")[0] in ("torch", "transformers")
            ):
                found += [
                    f"{path.name}:{node.lineno} {node.module}" for part in node.module.split(".") if part[0] == "_"
                ]
    assert found == []
