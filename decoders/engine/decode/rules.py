"""Rules that accept draft tokens, besides `CoupledRule`: `VerifierRule` calls a verifier, `HostRule` runs processors on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import DraftError, UnsupportedError
from ...sampling.choice import candidates
from ...sampling.processors import SamplingPlan, first_best, gumbel_noise
from ...strategy import Draft
from ...tree import Topology, TreeTensors
from ...verifiers.verifier import Block, Outcomes, Verifier, check_outcomes
from ..model.blocks import ForwardResult, NodeBlock
from ..model.compiled.forward_pass import ForwardPass
from .core import CoupledRule, Rule
from .criteria import NOT_REACHED, choose_along_path
from .hook_checks import Fault
from .output import RequestOutput
from .request import Request
from .rows import Rows
from .verify import Acceptance, Verified, path_to

# Noise depends on positions. A step's two draws use these negative positions, which no token has, so that they are independent of the
# noise with which the draft was drawn.
_END_NODE = -1
_NEXT_TOKEN = -2
#: How far the sum of a verifier's probabilities may be from 1.
SUM_TOLERANCE = 1e-2


@dataclass(frozen=True)
class VerifierRule:
    """Draws the accepted path from a verifier's outcome distribution. The rows' noise keys must be new in each step.

    Attributes:
        strategy: the strategy's name, for error messages.
    """

    verifier: Verifier
    plan: SamplingPlan
    strategy: str
    on_device: ClassVar[bool] = False

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        assert draft is not None
        verifier, shape = self.verifier, draft.topology
        if not verifier.trees and shape != Topology.chain(draft.tokens.shape[1]):
            raise UnsupportedError(
                f"verifier {verifier.name!r} judges chains, and {self.strategy!r} proposes a tree: take "
                "verifier='tree_rejection', or 'coupled'"
            )
        drawn_from, vocab = draft.scores, forwarded.logits.shape[-1]
        if drawn_from is not None:
            padding = block.draft_tokens.shape[1] - draft.tokens.shape[1]
            drawn_from = torch.nn.functional.pad(drawn_from, (0, 0, 0, padding)) if padding else drawn_from
            if drawn_from.shape[-1] != vocab:
                raise DraftError(
                    f"propose of {self.strategy!r}: scores are over {drawn_from.shape[-1]} tokens, the vocabulary has {vocab}"
                )
        siblings = shape.max_siblings if isinstance(shape, Topology) else None
        try:
            return self._verified(block, nodes, forwarded, rows, drawn_from, siblings)
        except Exception as error:
            error.add_note(f"decoders: verifier {verifier.name!r} ({type(verifier).__module__})")
            raise

    def _verified(
        self, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows, drawn_from: Tensor | None,
        siblings: int | None,
    ) -> Verified:  # fmt: skip
        """Computes the distributions of target and draft, and draws the path from the verifier's outcomes.

        Args:
            drawn_from: ``[B, N-1, V]``, the scores that the draft tokens were drawn from; None if they were not drawn.
            siblings: greatest number of children of a node; None if it is unknown on the host.
        """
        plan, tree = self.plan, block.tree
        positions = rows.length[:, None] - rows.prompt_length[:, None] + tree.offsets
        prefixes = rows.prefixes(nodes, tree, block.view) if plan.reads_text else None
        left = candidates(forwarded.logits, plan, rows.sampling, positions, block.masks, prefixes=prefixes).settled()
        scores = left.dense()
        vocab, dtype = scores.shape[-1], scores.dtype
        target = scores.softmax(-1) if plan.sample else one_hot(scores.argmax(-1), vocab, dtype)
        replacements = block.masks.replacements if block.masks is not None else None
        target = target if replacements is None else replacements.moved(target)
        drafted = one_hot(nodes[:, 1:], vocab, dtype) if drawn_from is None else drawn_from.softmax(-1)
        judged = Block(nodes, tree, target, drafted, siblings)
        outcomes = self.verifier.outcomes(judged)
        check_outcomes(outcomes, judged, self.verifier.name)
        acceptance, last, sound = draw(nodes, tree, outcomes, rows.sampling.keys)
        rows.faults.bitwise_or_(torch.where(sound | rows.finished, 0, int(Fault.OUTCOMES)))
        # `chosen` must record the decision: each accepted node's token after its parent, and `last` after the deepest accepted node.
        end = acceptance.path.gather(1, acceptance.depth[:, None])
        accepted = tree.ancestors.gather(1, end[..., None].expand(-1, 1, len(tree)))[:, 0]
        accepted = accepted & (torch.arange(len(tree), device=nodes.device) > 0)
        drawn = left.choose(plan, rows.sampling, positions)
        chosen = torch.nn.functional.pad(drawn if replacements is None else replacements.of(drawn), (0, 1))
        chosen = chosen.scatter(1, torch.where(accepted, tree.parents, len(tree)), nodes)[:, :-1]
        chosen = chosen.scatter(1, end, last[:, None])
        return Verified(chosen, scores if plan.keep_scores else None, acceptance)


@dataclass(frozen=True)
class HostRule:
    """The rule for logits processors that run on the host. For each request, it follows the target's choices from node to node.

    Attributes:
        plan: the sampling plan, which all members share.
        members: each request's output and the index of its first row. The batch changes this list when requests join or leave.
        shared: whether an exception of a request's processors ends only that request.
    """

    plan: SamplingPlan
    members: Sequence[tuple[RequestOutput, int]]
    shared: bool
    on_device: ClassVar[bool] = False

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        tree, plan = block.tree, self.plan
        logits = forwarded.logits if block.masks is None else block.masks.allow(forwarded.logits)
        chosen = torch.full(nodes.shape, NOT_REACHED, dtype=torch.int64, device=nodes.device)
        scores = torch.zeros_like(logits) if plan.keep_scores else None
        most = torch.zeros_like(rows.length)
        for member, first in self.members:
            end, processors = first + member.rows, member.request.processors
            own = slice(first, end)
            if all(member.finished) or processors is None:
                continue
            try:
                chosen[own], most[own] = choose_along_path(
                    nodes[own], tree.of_rows(first, end), logits[own], rows.of_rows(first, end), member.padded_rows, processors, plan,
                    block.masks and block.masks.of_rows(first, end), scores[own] if scores is not None else None,
                )  # fmt: skip
            except BaseException as error:  # in a scheduler's thread, only a processor can have raised SystemExit
                if not self.shared:
                    raise
                member.error = error
        return Verified(chosen, scores, most=most)


def rule_of(
    forward_pass: ForwardPass, request: Request, verifier: Verifier | None, members: Sequence[tuple[RequestOutput, int]], shared: bool
) -> Rule:  # fmt: skip
    """The rule that verifies the blocks of a batch.

    Args:
        verifier: the verifier that decides; None for the built-in rule.
        members, shared: see :class:`HostRule`.
    """
    if verifier is not None:
        return VerifierRule(verifier, request.plan, request.strategy.name)
    if request.processors is not None:
        return HostRule(request.plan, members, shared)
    return CoupledRule(forward_pass, request.plan)


def draw(nodes: Tensor, tree: TreeTensors, outcomes: Outcomes, keys: Tensor) -> tuple[Acceptance, Tensor, Tensor]:
    """Draws the accepted path and the next token from a verifier's outcome distribution.

    Args:
        nodes: ``[B, N]`` int64, the block's nodes. A node without a draft token is never accepted, even if `outcomes` allows it.
        outcomes: the outcome distribution.
        keys: ``[B]`` int64, a key per row *and step* (:func:`step_keys`): equal keys give equal draws.

    Returns:
        the accepted path, the token after it ``[B]`` int64, and whether the distribution was valid, ``[B]`` bool. Valid probabilities
        are finite, not negative, and sum to 1.
    """
    n = nodes.shape[1]
    index = torch.arange(n, device=nodes.device)
    possible = tree.candidates & ((nodes >= 0) | (index == 0))
    end = torch.where(possible, outcomes.end, 0.0)
    sound = _is_outcomes(outcomes.end) & _is_outcomes(end)
    end = end.log()
    best = first_best(end + gumbel_noise(keys, _salt(keys, _END_NODE), n)[:, 0])[:, None]  # [B, 1]
    vocab = outcomes.next.shape[-1]
    after = outcomes.next.gather(1, best[..., None].expand(-1, 1, vocab))[:, 0]
    sound = sound & _is_outcomes(after)
    token = first_best(after.log() + gumbel_noise(keys, _salt(keys, _NEXT_TOKEN), vocab)[:, 0])
    return path_to(best, tree, index), token, sound


def _is_outcomes(mass: Tensor) -> Tensor:
    """``[B]`` bool: whether each row of `mass` ``[B, n]`` is a distribution, up to rounding."""
    return (mass >= 0).all(-1) & ((mass.sum(-1) - 1).abs() < SUM_TOLERANCE)  # comparisons with NaN are false


def _salt(keys: Tensor, value: int) -> Tensor:
    """``[B, 1]``: `value` for every row, to be passed to :func:`gumbel_noise` as `positions`."""
    return torch.full_like(keys, value)[:, None]


def one_hot(tokens: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """``[…, V]``: 1 at each token's id, else 0; all zeros for token -1."""
    return (tokens[..., None] == torch.arange(vocab, device=tokens.device)).to(dtype)
