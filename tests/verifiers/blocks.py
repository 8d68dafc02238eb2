"""Blocks of random distributions."""

from __future__ import annotations

import torch

from decoders.tree import Topology
from decoders.verifiers import Block

VOCAB = 6
CPU = torch.device("cpu")


def random_block(rows: int, topology: Topology) -> Block:
    generator = torch.Generator().manual_seed(len(topology))
    n = len(topology)
    p, q = ((2 * torch.randn(rows, k, VOCAB, generator=generator)).softmax(-1) for k in (n, n - 1))
    nodes = torch.randint(-1, VOCAB, (rows, n), generator=generator)
    nodes[:, 0] = 0
    return Block(nodes, topology.tensors(rows, CPU), p, q, siblings=2)
