"""The rules that verify a block where the target's own choices (`CoupledRule`) do not: a verifier, or processors on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import DraftError, UnsupportedError
from ...sampling.choice import candidates
from ...sampling.processors import SamplingPlan
from ...strategy import Draft
from ...tree import Topology
from ...verifiers.verifier import Block, Verifier, check_outcomes
from ..model.blocks import NodeBlock
from ..model.compiled.forward_pass import ForwardPass
from ..model.target import ForwardResult
from .core import CoupledRule, Rule
from .criteria import NOT_REACHED, choose_along_path
from .request import Request, RequestOutput
from .rows import Fault, Rows
from .verify import Verified, draw


@dataclass(frozen=True)
class VerifierRule:
    """Draws the accepted path from a verifier's outcome distribution; the rows' noise keys must be fresh in this step.

    Attributes:
        strategy: its name, for messages.
    """

    verifier: Verifier
    plan: SamplingPlan
    strategy: str
    on_device: ClassVar[bool] = False

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        """The path drawn from the verifier's outcomes."""
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
        """
        Args:
            drawn_from: ``[B, N-1, V]``, scores that the draft tokens were drawn from, None if they were not drawn.
            siblings: most children of a node, None if the host does not know.
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
        # The decision as chosen tokens: after each accepted parent its accepted child, after the deepest node `last`.
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
    """Verifies with logits processors that need the host: follows the target's choices from node to node, request by request.

    Attributes:
        plan: the operations that all members have in common.
        members: the requests whose rows are decoded, and the first row of each; read in every step.
        shared: whether an exception of a request's processors ends that request alone.
    """

    plan: SamplingPlan
    members: Sequence[tuple[RequestOutput, int]]
    shared: bool
    on_device: ClassVar[bool] = False

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        """The target's choices along each row's path."""
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
            except Exception as error:
                if not self.shared:
                    raise
                member.error = error
        return Verified(chosen, scores, most=most)


def rule_of(
    forward_pass: ForwardPass, request: Request, verifier: Verifier | None, members: Sequence[tuple[RequestOutput, int]], shared: bool
) -> Rule:  # fmt: skip
    """The rule that verifies the blocks of a batch.

    Args:
        verifier: None where the built-in rule decides.
        members, shared: as of :class:`HostRule`.
    """
    if verifier is not None:
        return VerifierRule(verifier, request.plan, request.strategy.name)
    if request.processors is not None:
        return HostRule(request.plan, members, shared)
    return CoupledRule(forward_pass, request.plan)


def one_hot(tokens: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """``[…, V]``: all of the probability on one token, none anywhere for -1."""
    return (tokens[..., None] == torch.arange(vocab, device=tokens.device)).to(dtype)
