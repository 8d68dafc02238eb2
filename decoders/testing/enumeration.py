"""Every draft that a small drafter can make, with its probability: what a verifier's outcome distribution is checked against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..tree import TreeTensors
from ..verifiers.verifier import Block, Outcomes

#: A model as conditional tables: entry ``d`` is ``[V**d, V]``, the next token's distribution after each ``d`` tokens.
Tables = tuple[Tensor, ...]


@dataclass(frozen=True)
class Enumeration:
    """All drafts of one drafter on one tree, as the rows of one block.

    Attributes:
        block: ``R`` rows, one per draft.
        weight: ``[R]``, probability of each draft; sums to 1.
        prefix: ``[R, N]`` int64, the tokens down to each node as one number in base V; -1 where a draft token is missing.
    """

    block: Block
    weight: Tensor
    prefix: Tensor


@dataclass(frozen=True)
class EnumerationCase:
    """A target, a drafter and a tree.

    Attributes:
        name: for messages.
        parents: of each node; -1 for the root and for nodes that are no candidates.
        target: the target's tables, one more than the tree is deep.
        draft: the draft's tables.
        sure: nodes that take the likeliest token left instead of drawing one.
        silent: nodes that propose only after some prefixes (those whose number is odd).
    """

    name: str
    parents: tuple[int, ...]
    target: Tables
    draft: Tables
    sure: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()

    @property
    def vocab(self) -> int:
        return self.target[0].shape[1]

    @cached_property
    def depths(self) -> list[int]:
        """Of each node; -1 for those that are no candidates."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1 if parent >= 0 else -1)
        return depths

    def drafts(self) -> Enumeration:
        """Draws the nodes in order, following every possible token at once."""
        weight = torch.ones(1, dtype=self.target[0].dtype)
        nodes = torch.zeros(1, 1, dtype=torch.int64)
        prefix = torch.zeros(1, 1, dtype=torch.int64)
        draft = weight.new_empty(1, 0, self.vocab)
        for node, parent in enumerate(self.parents[1:], start=1):
            q, chances = self._proposal(node, nodes, prefix)
            row, token = chances.nonzero(as_tuple=True)
            weight = weight[row] * chances[row, token]
            token = torch.where(token < self.vocab, token, -1)
            before = prefix[row, max(parent, 0)]
            after = torch.where((before >= 0) & (token >= 0), before * self.vocab + token, -1)
            after = after if parent >= 0 else torch.full_like(after, -1)
            nodes = torch.cat([nodes[row], token[:, None]], 1)
            prefix = torch.cat([prefix[row], after[:, None]], 1)
            draft = torch.cat([draft[row], q[row][:, None]], 1)
        target = torch.stack([self._after(self.target, node, prefix[:, node]) for node in range(len(self.parents))], 1)
        tree = TreeTensors.from_parents(torch.tensor(self.parents).expand(len(weight), -1))
        return Enumeration(Block(nodes, tree, target, draft), weight, prefix)

    def _proposal(self, node: int, nodes: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """``q [R, V]`` that the block shows for a node, and the chances ``[R, V+1]`` of its tokens, or (last) of none."""
        parent = self.parents[node]
        rows, vocab = len(nodes), self.vocab
        if parent < 0:
            q = self._one_hot(torch.zeros(rows, dtype=torch.int64))
            return q, torch.nn.functional.pad(q, (0, 1))
        q = self._after(self.draft, parent, prefix[:, parent])
        left = q.clone()
        for sibling in range(1, node):
            if self.parents[sibling] == parent:
                taken = nodes[:, sibling, None]
                left = torch.where(torch.arange(vocab) == taken, 0.0, left)
        total = left.sum(1, keepdim=True)
        if node in self.sure:
            q = self._one_hot(left.argmax(1))
            left = torch.where(total > 0, q, left)
        else:
            left = torch.where(total > 0, left / total, left)
        # What continues a missing draft token still holds a token, to see that it is not accepted.
        orphan = prefix[:, parent, None] < 0
        left = torch.where(orphan, self._one_hot(torch.zeros(rows, dtype=torch.int64)), left)
        nothing = (total <= 0) & ~orphan
        if node in self.silent:
            nothing = nothing | (prefix[:, parent, None] % 2 == 0)
        return q, torch.cat([torch.where(nothing, 0.0, left), nothing.to(q.dtype)], 1)

    def _after(self, tables: Tables, node: int, prefix: Tensor) -> Tensor:
        """``[R, V]``: the distribution after `node`, uniform where that is not defined."""
        depth = self.depths[node]
        uniform = torch.full_like(tables[0], 1 / self.vocab)
        return uniform.expand(len(prefix), -1) if depth < 0 else torch.where(
            prefix[:, None] >= 0, tables[depth][prefix.clamp(min=0)], uniform
        )  # fmt: skip

    def _one_hot(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.vocab).to(self.target[0].dtype)

    def continued(self, weights: Tensor, depth: int) -> Tensor:
        """``[V**depth, V]`` weights of ``depth + 1`` tokens to those of all tokens, which the target continues."""
        joint = weights.flatten()
        for table in self.target[depth + 1 :]:
            joint = (joint[:, None] * table).flatten()
        return joint

    def wanted(self) -> Tensor:
        """The target's joint distribution of as many tokens as a step can emit."""
        return self.continued(self.target[0], 0)

    def emitted(self, drafts: Enumeration, outcomes: Outcomes) -> Tensor:
        """The joint distribution of as many tokens if every step follows `outcomes` and the target goes on from there."""
        joint = torch.zeros_like(self.wanted())
        for node, depth in enumerate(self.depths):
            reached = (drafts.prefix[:, node] >= 0).to(drafts.weight.dtype)
            mass = (drafts.weight * reached * outcomes.end[:, node])[:, None] * outcomes.next[:, node]
            if depth >= 0:
                weights = mass.new_zeros(self.vocab**depth, self.vocab)
                joint += self.continued(weights.index_add(0, drafts.prefix[:, node].clamp(min=0), mass), depth)
        return joint

    def accepted(self, drafts: Enumeration, outcomes: Outcomes) -> float:
        """How many draft tokens a step accepts on average."""
        depths = torch.tensor(self.depths).clamp(min=0).to(drafts.weight.dtype)
        return float((drafts.weight @ outcomes.end) @ depths)
