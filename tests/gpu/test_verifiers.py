"""Verification on the device: recorded as a CUDA graph it gives what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch

from decoders.engine.decode.rules import draw
from decoders.sampling.processors import row_keys
from decoders.tree import Topology
from decoders.verifiers import Block, BlockVerification, Coupled, Rejection, TreeRejection

from ..verifiers.blocks import random_block

CPU = torch.device("cpu")


@pytest.mark.parametrize("verifier", [Coupled, Rejection, TreeRejection, BlockVerification], ids=lambda v: v.name)
def test_step_is_captured_as_a_cuda_graph_and_equals_the_cpu(verifier, cuda: torch.device) -> None:
    block, keys = random_block(64, Topology.branches(2, 3)), row_keys(3, 64, CPU)
    tree = Topology.branches(2, 3).tensors(64, torch.device("cuda"))
    there = Block(block.nodes.cuda(), tree, block.target.cuda(), block.draft.cuda(), block.siblings)

    def step(block: Block, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outcomes = verifier().outcomes(block)
        acceptance, token, _ = draw(block.nodes, block.tree, outcomes, keys)
        return outcomes.end, outcomes.next, acceptance.path, token

    keys_there = keys.cuda()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(there, keys_there)  # kernels load outside the capture
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # refuses anything that waits for the device
        got = step(there, keys_there)
    graph.replay()
    for one, other in zip(got, step(block, keys), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)
