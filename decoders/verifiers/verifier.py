"""The contract of a verifier: from a draft and both models' distributions it computes the outcome distribution of a step.

A verifier draws nothing. It computes the probability that the accepted path ends at each node, and the distribution of the next token
after each node. The engine draws from these distributions (:func:`decoders.engine.decode.rules.draw`). So a verifier is a pure function
of tensors, and a check can compute whether the output follows the target's distribution (:func:`decoders.testing.check_verifier`).

Letters: ``B`` rows, ``N`` nodes of a block, ``V`` vocabulary, ``p`` the target's distribution, ``q`` the draft's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import VerifierError
from ..settings import Configured
from ..tree import TreeTensors, described


@dataclass(frozen=True)
class Block:
    """A draft to verify, with the distributions of both models.

    A node's token may depend only on the ``q`` from which it was drawn. Whether a node has a token may depend only on the tokens before
    the node. For example, a drafter that draws a token and then leaves it out as unlikely has not drawn from ``q``.

    Attributes:
        nodes: ``[B, N]`` int64; node 0 is the last committed token, ``-1`` means "no draft token".
        tree: the block's tree.
        target: ``[B, N, V]`` float32, p: the target's processed distribution of the token after each node; it sums to 1.
        draft: ``[B, N-1, V]`` float32, q: entry ``i`` is the processed distribution after the parent of node ``i+1``, from which
            the node's token was drawn. Siblings share one ``q`` and are drawn without replacement, in the order of the nodes. A
            draft token that was not sampled has a one-hot ``q``. Entries of ``-1`` nodes are not read.
        siblings: the greatest number of children of a node, if the host knows it (:attr:`~decoders.tree.Topology.max_siblings`). As
            verifiers may ignore further children, too small a number costs accepted tokens, but not exactness. ``None``: unknown,
            at most ``N - 1``.
    """

    nodes: Tensor
    tree: TreeTensors
    target: Tensor
    draft: Tensor
    siblings: int | None = None

    @property
    def drawn(self) -> Tensor:
        """``[B, N-1]``: the probability q of the token of each node after the root; 0 for nodes without a draft token."""
        tokens = self.nodes[:, 1:]
        mass = self.draft.gather(2, tokens.clamp(min=0)[..., None])[..., 0]
        return torch.where(tokens >= 0, mass, 0.0)

    @property
    def drafted(self) -> Tensor:
        """``[B, N]`` bool: whether each node has a draft token; False for the root.

        False also for a token with probability 0 in ``q``, because it cannot have been drawn from ``q``. This keeps every rule exact.
        """
        # Padded as floats: inductor's C++ code for combined padded masks does not compile (torch 2.13).
        drawn = torch.nn.functional.pad(self.drawn, (1, 0))
        return self.tree.candidates & (drawn > 0)

    @property
    def chain(self) -> Tensor:
        """``[B, N-1]`` bool: entry ``i`` is True if nodes ``0 … i+1`` are an unbroken chain. For rules that judge only chains."""
        index = torch.arange(self.nodes.shape[1] - 1, device=self.nodes.device)
        links = self.drafted[:, 1:] & (self.tree.parents[:, 1:] == index)
        return links.long().cumprod(1).bool()

    def reach(self, edges: Tensor) -> Tensor:
        """``[B, N]``: probability that the accepted path reaches each node.

        Args:
            edges: ``[B, N]``, probability that a path that reaches a node's parent continues to the node; the root's entry is not read.
        """
        root = torch.arange(edges.shape[1], device=edges.device) == 0
        arrived = torch.where(self.tree.ancestors & ~root, edges[:, None, :], 1.0).prod(-1)
        return torch.where(self.tree.candidates, arrived, 0.0)


@dataclass(frozen=True)
class Outcomes:
    """The outcome distribution of a step.

    Attributes:
        end: ``[B, N]``, probability that the accepted path ends at each node; rows sum to 1. Apart from the root, it is
            zero for nodes without a draft token and for nodes that are not candidates.
        next: ``[B, N, V]``, distribution of the token after each node if the path ends there. It is finite everywhere
            and sums to 1 wherever ``end > 0``.
    """

    end: Tensor
    next: Tensor


def check_outcomes(outcomes: Outcomes, block: Block, verifier: str) -> None:
    """Raises VerifierError unless the `outcomes` of `verifier` have the right types and shapes; values are checked when drawn."""
    if not isinstance(outcomes, Outcomes):
        raise VerifierError(f"outcomes of verifier {verifier!r} must return Outcomes, not {described(outcomes)}")
    for name, wanted in (("end", block.nodes), ("next", block.target)):
        given = getattr(outcomes, name)
        if not isinstance(given, Tensor) or given.shape != wanted.shape or given.dtype != block.target.dtype:
            raise VerifierError(
                f"outcomes of verifier {verifier!r}: `{name}` must be {block.target.dtype} {list(wanted.shape)}, not {described(given)}"
            )


class Verifier(Configured, ABC):
    """Base class of all verifiers. Instances hold settings only.

    Args:
        settings: an instance of the class's `settings_class`; or its values as keywords.

    Class attributes:
        settings_class: pydantic model of the settings, which ``verifier_config={…}`` fills.
        name: registry name, ``snake_case``.
        summary: one line for listings.
        exact: whether the committed tokens follow the target's distribution. A lossy rule is marked in every report.
        trees: whether the rule judges trees. If False, it judges only chains: node ``i+1`` continues node ``i``, and shorter rows end
            in ``-1``.
        coupled: whether the engine verifies without :meth:`outcomes`: it accepts draft tokens that equal the target's own draw, made
            with the same noise as the draft. :meth:`outcomes` then only serves comparisons, for drafts made without the noise.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    exact: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    coupled: ClassVar[bool] = False

    @abstractmethod
    def outcomes(self, block: Block) -> Outcomes:
        """The outcome distribution of `block`, in the dtype of ``block.target``.

        Implementations are plain tensor code on the block's device. They compute rows independently, read no values on the host, and
        leave their inputs unchanged.
        """


def normalised(mass: Tensor, otherwise: Tensor | float) -> Tensor:
    """`mass` scaled to sum to 1 over the last axis; `otherwise` where the sum is zero.

    If ``q`` equals ``p``, the residual ``max(p - q, 0)`` is zero or rounding noise. The probability of drawing from such a residual is
    close to zero, but the residual must stay finite.
    """
    total = mass.sum(-1, keepdim=True)
    # Not `> 0`: compiled code may divide by multiplying with the reciprocal, which overflows for subnormal numbers.
    return torch.where(total > torch.finfo(mass.dtype).tiny, mass / total, otherwise)
