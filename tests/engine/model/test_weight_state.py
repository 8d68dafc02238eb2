"""Writes to weights are seen, those that PyTorch does not count in a sample of the content."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoders.engine.model.weights import state
from decoders.engine.model.weights.state import WeightState, values_of
from decoders.testing import tiny_model

WRITES: dict[str, Callable[[Tensor], object]] = {
    "counted": lambda t: t.detach().neg_(),
    "data.neg_": lambda t: t.data.neg_(),
    "data.copy_": lambda t: t.data.copy_(torch.ones_like(t)),
    "numpy": lambda t: t.detach().numpy().__imul__(2),
    "other memory": lambda t: setattr(t, "data", t.data.clone()),
}


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors whose memory is read where it is, and such as have to be copied."""
    monkeypatch.setattr(state, "_READABLE", {"cpu"} if request.param == "host" else set())


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("shape", [(1,), (7, 9), (81,), (64, 65), (100, 37)], ids=str)
def test_a_write_is_seen(write: Callable[[Tensor], object], shape: tuple[int, ...]) -> None:
    tensor = nn.Parameter(torch.randn(shape) + 3)
    before = values_of([tensor])
    assert values_of([tensor]) == before
    write(tensor)
    assert values_of([tensor]) != before


@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("shape", [(1,), (7, 9), (64, 65)], ids=str)
def test_the_first_and_the_last_entry_are_in_the_sample(end: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    before = values_of([tensor])
    tensor.data.view(-1)[end] += 1
    assert values_of([tensor]) != before


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_compared_by_its_bits(dtype: torch.dtype) -> None:
    tensor = torch.zeros(50, 50)
    if dtype.is_floating_point:
        tensor[0, 0] = torch.nan
    tensor = tensor.to(dtype)
    before = values_of([tensor])
    assert values_of([tensor]) == before, "not a number is equal to itself here"
    tensor.data.copy_(torch.full_like(tensor, -0.0 if dtype.is_floating_point else 1))
    assert values_of([tensor]) != before


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    "part", [lambda m: m.t(), lambda m: m[:, :7], lambda m: m[:1].expand(5, 30), lambda m: m[:0]], ids=range(4)
)
def test_only_memory_of_the_tensor_is_read(part: Callable[[Tensor], Tensor]) -> None:
    whole = torch.randn(42, 30)
    tensor = part(whole[1:-1])
    before = values_of([tensor])
    whole.data[0], whole.data[-1] = 7, 7
    assert values_of([tensor]) == before
    whole.data.zero_()
    assert (values_of([tensor]) != before) == bool(tensor.numel())


def test_a_tensor_without_memory_is_compared() -> None:
    assert values_of([torch.empty(3, device="meta")]) == values_of([torch.empty(3, device="meta")])


def test_a_write_to_one_of_many_is_seen() -> None:
    tensors = [torch.randn(30, 40) for _ in range(5)] + [torch.randn(7), torch.empty(0)]
    before = values_of(tensors)
    tensors[3].data.neg_()
    assert values_of(tensors) != before


def test_a_sample_does_not_keep_memory_alive() -> None:
    tensor = nn.Parameter(torch.randn(100, 100))
    storage = weakref.ref(tensor.untyped_storage())
    before = values_of([tensor])
    tensor.data = torch.zeros(3)
    assert values_of([tensor]) != before and storage() is None


class Levels(torch.Tensor):
    """A quantized matrix as libraries have them: a tensor that consists of others."""

    levels: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, levels: Tensor, scale: Tensor) -> Levels:
        made = torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=scale.dtype)
        made.levels, made.scale = levels, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["levels", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise NotImplementedError("no product is computed with it here")


@pytest.mark.parametrize("part", ["levels", "scale"])
@pytest.mark.parametrize("write", [lambda t: t.neg_(), lambda t: t.data.neg_()], ids=["counted", "data"])
def test_a_write_to_a_part_of_a_quantized_matrix_is_seen(part: str, write: Callable[[Tensor], object]) -> None:
    matrix = Levels(torch.ones(30, 40, dtype=torch.int8), torch.ones(30))
    before = values_of([matrix])
    write(getattr(matrix, part))
    assert values_of([matrix]) != before


@pytest.mark.filterwarnings("ignore")  # transformers and peft disagree about a deprecated name
def test_what_adapters_do_counts() -> None:
    """They write through ``.data``, switch attributes, and keep names and scales in lists and dicts."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    layer = next(m for m in model.modules() if hasattr(m, "lora_A") and "default" in m.lora_A)
    states = [WeightState.of(model)]
    for change in (
        model.merge_adapter, model.unmerge_adapter, model.disable_adapter_layers, lambda: layer.scaling.update(default=0.5),
        lambda: model.add_adapter("other", config), lambda: model.set_adapter("other"),
    ):  # fmt: skip
        change()
        states.append(WeightState.of(model))
        assert states[-1] != states[-2]


class Steers:
    """A hook with a vector of its own."""

    def __init__(self) -> None:
        self.vector = torch.zeros(16)

    def __call__(self, module: nn.Module, given: tuple, output: Tensor) -> None: ...


def steers(module: nn.Module, given: tuple, output: Tensor, *, vector: Tensor) -> None: ...


def with_default() -> tuple[Callable, Tensor]:
    vector = torch.zeros(16)

    def hook(module: nn.Module, given: tuple, output: Tensor, *, vector: Tensor = vector) -> None: ...

    return hook, vector


def with_partial() -> tuple[Callable, Tensor]:
    vector = torch.zeros(16)
    return functools.partial(steers, vector=vector), vector


def with_object() -> tuple[Callable, Tensor]:
    hook = Steers()
    return hook, hook.vector


@pytest.mark.parametrize("made", [with_default, with_partial, with_object])
def test_a_write_to_a_tensor_of_a_hook_is_seen(made: Callable[[], tuple[Callable, Tensor]]) -> None:
    model = tiny_model("llama")
    hook, vector = made()
    model.model.layers[0].register_forward_hook(hook)
    before = WeightState.of(model)
    assert WeightState.of(model) == before
    vector.add_(1)
    assert WeightState.of(model) != before
