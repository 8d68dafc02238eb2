"""Writes that PyTorch does not count are seen in a sample of the content."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoders.engine.weights.fingerprints import DeviceSamples, Fingerprint, Fingerprints, sampled

KINDS = [Fingerprint, lambda tensor: DeviceSamples([tensor])]
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
    sample = Fingerprint(matrix.t())
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
    sample, samples = Fingerprint(tensor), Fingerprints([tensor])
    tensor.data = torch.zeros(3)
    assert sample.changed and samples is not None
    assert storage() is None
