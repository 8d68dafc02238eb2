"""Which path of a block is accepted, by the target's own choices or a draw from outcomes, and how its tokens are appended."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...sampling.choice import candidates
from ...sampling.prefixes import Prefixes
from ...sampling.processors import Masks, SamplingInputs, SamplingPlan, first_best, gumbel_noise, mix64
from ...tree import TreeTensors
from ...verifiers.verifier import Outcomes

# Used as positions, which are never negative, so that the two draws of a step are independent of the draft's noise.
_END_NODE = -1
_NEXT_TOKEN = -2
#: Stands for a token where none could be drawn.
NOTHING_LEFT = -3
#: How far the sum of a verifier's probabilities may be from 1.
SUM_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of a block of ``N`` nodes.

    Attributes:
        path: ``[B, N]`` int64; entry ``d`` is the accepted node at depth ``d`` (0 is the root). Entries past the
            accepted depth are ``d`` itself, so that moving slots along the path leaves them where they are.
        depth: ``[B]`` int64, number of accepted proposals; ``depth + 1`` tokens come out of the step.
    """

    path: Tensor
    depth: Tensor


@dataclass(frozen=True)
class Verified:
    """The decision about a block.

    Attributes:
        chosen: ``[B, N]`` int64, the token after each node.
        scores: ``[B, N, V]``, processed scores, if the plan keeps them.
        acceptance: the accepted path; None for the path that matches `chosen`.
        most: ``[B]`` int64, how many tokens each row may commit, if that is limited.
    """

    chosen: Tensor
    scores: Tensor | None = None
    acceptance: Acceptance | None = None
    most: Tensor | None = None


def follow_matches(nodes: Tensor, chosen: Tensor, tree: TreeTensors) -> Acceptance:
    """The longest path whose tokens are all the target's own choices.

    Exact for greedy and for sampling with position-keyed noise (Daliri et al. 2024, "Coupling without Communication
    and Drafter-Invariant Speculative Decoding"): the target's choice at a position does not depend on the draft.

    Args:
        nodes: ``[B, N]`` int64; node 0 is the last committed token, others are draft tokens, ``-1`` marks "no draft token".
        chosen: ``[B, N]`` int64, the target's token after each node.
    """
    n = nodes.shape[1]
    index = torch.arange(n, device=nodes.device)
    match = nodes == chosen.gather(1, tree.parents)
    match = match | (index == 0)
    on_branch = tree.ancestors
    accepted = (~on_branch | match[:, None]).all(-1) & on_branch.any(-1)
    # Deepest first, then the lower index: ties (equal siblings) must not depend on how argmax breaks them.
    best = torch.where(accepted, tree.offsets * n + (n - 1 - index), -1).argmax(-1, keepdim=True)  # [B, 1]
    return _path_to(best, tree)


def step_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """``[B]`` int64 keys for the draws of one step, from the rows' keys ``[B]`` and their lengths ``[B]``.

    Every step adds a token, so no two steps of a row have the same key, and none has the row's own.
    """
    return mix64(mix64(keys) + positions)


def draw(nodes: Tensor, tree: TreeTensors, outcomes: Outcomes, keys: Tensor) -> tuple[Acceptance, Tensor, Tensor]:
    """Draws the accepted path and the next token from a verifier's outcome distribution.

    Args:
        nodes: ``[B, N]`` int64, as verified. A node without a draft token is never accepted, even if `outcomes` allows it.
        outcomes: the outcome distribution.
        keys: ``[B]`` int64, a key per row *and step* (:func:`step_keys`): equal keys give equal draws.

    Returns:
        the accepted path, the token after it ``[B]`` int64, and whether the distribution was valid, ``[B]`` bool:
        not where probabilities are negative, infinite or do not sum to 1.
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
    return _path_to(best, tree), token, sound


def _is_outcomes(mass: Tensor) -> Tensor:
    """``[B]`` bool: whether ``[B, n]`` are probabilities, up to rounding."""
    return (mass >= 0).all(-1) & ((mass.sum(-1) - 1).abs() < SUM_TOLERANCE)  # NaN is neither positive nor negative


def _salt(keys: Tensor, value: int) -> Tensor:
    """`value` as a position for every row, ``[B, 1]``."""
    return torch.full_like(keys, value)[:, None]


def _path_to(best: Tensor, tree: TreeTensors) -> Acceptance:
    """The path from the root to node `best` ``[B, 1]``."""
    n = len(tree)
    index = torch.arange(n, device=best.device)
    deepest = tree.offsets.gather(1, best)  # [B, 1]
    on_path = tree.ancestors.gather(1, best[:, :, None].expand(-1, 1, n))  # [B, 1, N]
    at_depth = tree.offsets[:, None, :] == index[None, :, None]  # [B, depth, node]
    path = torch.where(on_path & at_depth, index, 0).sum(-1)
    return Acceptance(torch.where(index[None] <= deepest, path, index), deepest[:, 0])


def draw_tokens(
    logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor, masks: Masks | None = None,
    prefixes: Prefixes | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The target's token after each node, ``[B, N]`` int64, and the processed scores if the plan keeps them.

    Args:
        logits: ``[B, N, V]``.
        positions: ``[B, N]`` int64, how many tokens were generated before each.
        prefixes: the nodes' texts, if the plan reads them.
    """
    left = candidates(logits, plan, inputs, positions, masks, prefixes=prefixes)
    if plan.keep_scores:
        left = left.settled()
    tokens = left.choose(plan, inputs, positions)
    if plan.sample and plan.reads_text:  # bad words and n-grams may rule out everything
        tokens = torch.where(left.scores.amax(-1) > float("-inf"), tokens, NOTHING_LEFT)
    return tokens if masks is None else masks.written(tokens), left.dense() if plan.keep_scores else None


def settle(
    nodes: Tensor, chosen: Tensor, tree: TreeTensors, tokens: Tensor, length: Tensor, limit: Tensor, finished: Tensor,
    stop_tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Accepts the path that matches `chosen` and appends its tokens; returns path, new tokens and summary of the step."""
    acceptance = follow_matches(nodes, chosen, tree)
    return acceptance.path, *append(nodes, chosen, tree, acceptance, tokens, length, limit, finished, stop_tokens)


def append(
    nodes: Tensor, chosen: Tensor, tree: TreeTensors, acceptance: Acceptance, tokens: Tensor, length: Tensor,
    limit: Tensor, finished: Tensor, stop_tokens: Tensor, most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends an accepted path's tokens to the rows, in place; see ``Rows`` for the tensors, stop_tokens: ``[E]`` or ``[B, E]``.

    Returns:
        the new tokens ``[B, N]`` and the summary ``[4, B]`` of the step, as in :class:`~decoders.engine.decode.core.StepOutput`.
    """
    n = nodes.shape[1]
    index = torch.arange(n, device=nodes.device)
    new = chosen.gather(1, acceptance.path)
    room = torch.where(finished, 0, limit - length)
    if most is not None:
        room = torch.minimum(room, most)
    candidate = tree.ancestors[:, 1:, 0]  # tokens of a lookahead window are never accepted: they do not count
    drafted = torch.where(finished, 0, ((nodes[:, 1:] >= 0) & candidate).sum(-1))
    emitted = torch.minimum(acceptance.depth + 1, room)
    is_stop = (new[:, :, None] == stop_tokens[..., None, :]).any(-1) & (index < emitted[:, None])
    first_stop = torch.where(is_stop, index, n).amin(-1)
    emitted = torch.minimum(emitted, first_stop + 1)
    # Rejected tokens land behind the new length, where the next step overwrites them.
    row = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    tokens[row, length[:, None] + index] = new
    length.add_(emitted)
    finished.logical_or_((first_stop < n) | (length >= limit))
    accepted = torch.minimum(acceptance.depth, emitted)  # an accepted stop token has no bonus token after it
    return new, torch.stack([emitted, accepted, drafted, finished.long()])
