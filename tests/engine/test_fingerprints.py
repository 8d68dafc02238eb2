"""Writes that PyTorch does not count are seen in a sample of the content."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import decoders
from decoders.engine.model.weights.fingerprints import DeviceSamples, Fingerprints, Snapshot, sampled

KINDS = [lambda tensor: Snapshot([tensor]), lambda tensor: DeviceSamples([tensor])]
WRITES: dict[str, Callable[[Tensor], object]] = {
    "data.neg_": lambda t: t.data.neg_(),
    "data.copy_": lambda t: t.data.copy_(torch.ones_like(t)),
    "numpy": lambda t: t.detach().numpy().__imul__(2),
    "the first entry": lambda t: t.data.view(-1)[:1].add_(1),
    "the last entry": lambda t: t.data.view(-1)[-1:].add_(1),
    "other memory": lambda t: setattr(t, "data", t.data.clone()),
}


@pytest.mark.parametrize("kind", KINDS, ids=["host", "device"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("shape", [(1,), (7, 9), (81,), (64, 65), (100, 37)], ids=str)
def test_a_write_is_seen(kind: Callable, write: Callable[[Tensor], object], shape: tuple[int, ...]) -> None:
    tensor = nn.Parameter(torch.randn(shape) + 3)
    sample = kind(tensor)
    assert not sample.changed
    write(tensor)
    assert sample.changed
    assert not kind(tensor).changed


@pytest.mark.parametrize("kind", KINDS, ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool], ids=str)
def test_every_type_is_compared_by_its_bits(kind: Callable, dtype: torch.dtype) -> None:
    tensor = torch.zeros(50, 50).to(dtype)
    if dtype.is_floating_point:
        tensor[0, 0] = torch.nan
    sample = kind(tensor)
    assert not sample.changed, "not a number is equal to itself here"
    tensor.data[-1, -1] = -0.0 if dtype.is_floating_point else 1
    assert sample.changed


def test_a_transposed_matrix_is_sampled_and_a_part_of_one_is_not() -> None:
    matrix = torch.randn(40, 30)
    assert sampled(matrix.t())
    assert not sampled(matrix[:, :7]) and not sampled(matrix[:1].expand(5, 30)) and not sampled(torch.empty(0))
    assert not sampled(torch.empty(3, device="meta"))
    sample = Fingerprints([matrix.t()])
    matrix[-1, -1] += 1
    assert sample.changed


def test_a_write_to_one_of_many_is_seen() -> None:
    tensors = [torch.randn(30, 40) for _ in range(5)] + [torch.randn(7), torch.empty(0)]
    samples = Fingerprints(tensors)
    assert not samples.changed
    tensors[3].data.neg_()
    assert samples.changed and not Fingerprints(tensors).changed


def test_a_sample_does_not_keep_memory_alive() -> None:
    import weakref

    tensor = nn.Parameter(torch.randn(100, 100))
    storage = weakref.ref(tensor.untyped_storage())
    snapshot, samples = Snapshot([tensor]), Fingerprints([tensor])
    tensor.data = torch.zeros(3)
    assert snapshot.changed and samples is not None
    assert storage() is None


def test_a_snapshot_is_of_these_very_tensors() -> None:
    first, second = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(40))
    snapshot = Snapshot([first])
    assert snapshot.shows([first])
    assert not snapshot.shows([second]) and not snapshot.shows([first, second])
    first.data.neg_()
    assert not snapshot.shows([first])


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
    snapshot = Snapshot([matrix])
    assert not snapshot.changed
    write(getattr(matrix, part))
    assert snapshot.changed


def test_only_fingerprints_tell_what_was_written_to() -> None:
    """PyTorch's counter alone misses writes through ``.data``: who keeps a copy of weights takes a :class:`Snapshot`."""
    package = Path(decoders.__file__).parent
    asks = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"writes_counted\(|\._version\b", path.read_text())
    }
    assert asks == {
        "engine/model/torch_compat.py", "engine/model/weights/fingerprints.py",
        "engine/model/weights/fused.py",  # products of one step, of tensors that no caller holds
        "engine/decode/rows.py", "testing/conditions.py",  # who look for writes by hooks, and say that they miss those through .data
    }  # fmt: skip
