"""What operations leave of a large vocabulary on the device: what they leave on the CPU, and the same in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoders.common.host_reads import as_recorded
from decoders.sampling.processors import SamplingInputs, SamplingPlan, process, row_keys

VOCAB, NODES = 128_256, 16
VALUES = {"temperature": 0.8, "top_k": 50.0, "large_top_k": 5000.0, "top_p": 0.07, "typical_p": 0.8, "min_p": 0.02}
PLANS = [("temperature", "top_k", "top_p"), ("temperature", "top_p"), ("large_top_k",), ("typical_p",), ("min_p",)]


def left(names: tuple[str, ...], logits: Tensor) -> Tensor:
    """The processed scores, found as in a recorded step."""
    device = logits.device
    values = torch.tensor([VALUES[name] for name in names], device=device)
    inputs = SamplingInputs(values, row_keys(3, 1, device), torch.tensor([-1], device=device))
    with as_recorded():
        return process(logits, SamplingPlan(names, sample=True), inputs, torch.arange(NODES, device=device)[None])


@pytest.mark.parametrize("names", PLANS, ids="-".join)
def test_what_is_left_of_a_vocabulary_is_the_same_as_on_the_cpu(names: tuple[str, ...], device: torch.device) -> None:
    logits = 3 * torch.randn(1, NODES, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 2000:] = float("-inf")  # as a grammar masks them
    logits[0, 1, 7] = 1e4
    there = logits.to(device)
    kept = left(names, there)
    assert all(torch.equal(left(names, there), kept) for _ in range(3))
    differing = ((kept.cpu() > float("-inf")) != (left(names, logits) > float("-inf"))).sum(-1)
    # A sum may end at a border but for rounding; of typical_p the order depends on a rounded entropy as well.
    assert int(differing.max()) <= (4 if "typical_p" in names else 1)


@pytest.mark.parametrize("names", PLANS, ids="-".join)
def test_it_is_captured_as_a_cuda_graph(names: tuple[str, ...], cuda: torch.device) -> None:
    logits = 3 * torch.randn(1, NODES, VOCAB, device=cuda, generator=torch.Generator(cuda).manual_seed(0))
    values = torch.tensor([VALUES[name] for name in names], device=cuda)
    inputs = SamplingInputs(values, row_keys(3, 1, cuda), torch.tensor([-1], device=cuda))
    positions, plan = torch.arange(NODES, device=cuda)[None], SamplingPlan(names, sample=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = process(logits, plan, inputs, positions)  # kernels load outside the capture
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = process(logits, plan, inputs, positions)
    graph.replay()
    assert torch.equal(got, expected)
