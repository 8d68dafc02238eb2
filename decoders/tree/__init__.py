"""Token trees: each node's parent, the nodes it attends to, and its position.

Letters used everywhere: ``N`` nodes of a block (node 0 is the last committed token, the *root*), ``B`` rows.
A node is a *candidate* if it may be accepted: the root, and every node that descends from it. Other nodes
(a lookahead window, padding) take part in the forward pass only.
"""

from __future__ import annotations

from .tensors import MAX_NODES, NO_PARENT, TreeTensors, described
from .topology import Topology, parents_by_row

__all__ = ["MAX_NODES", "NO_PARENT", "Topology", "TreeTensors", "described", "parents_by_row"]
