"""Draws the target's tokens, finds the longest path of a block on which every token is the target's own choice, and appends the path.

:class:`StepFunctions` runs these functions compiled if a step's pass is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...sampling.choice import candidates
from ...sampling.prefixes import Prefixes
from ...sampling.processors import Masks, SamplingInputs, SamplingPlan, mix64
from ...tree import Topology, TreeTensors
from ..model.compiled.forward_pass import ForwardPass
from ..model.compiled.functions import CompiledFunction, TieredFunction, kind_of
from ..model.compiled.regions import EXAMPLE_SLOTS, copied_whole
from ..model.compiled.tiers import Beside, Tiers
from ..model.target import Target

#: Replaces the token after a node if no token could be drawn.
NOTHING_LEFT = -3


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of a block of ``N`` nodes.

    Attributes:
        path: ``[B, N]`` int64; entry ``d`` is the accepted node at depth ``d`` (0 is the root). Beyond the accepted depth, entry ``d``
            is ``d``, so that copying slot ``path[d]`` to ``d`` changes nothing there.
        depth: ``[B]`` int64, number of accepted draft tokens; the step yields ``depth + 1`` tokens.
    """

    path: Tensor
    depth: Tensor


@dataclass(frozen=True)
class Verified:
    """What a rule (:class:`~decoders.engine.decode.core.Rule`) decides about a block.

    Attributes:
        chosen: ``[B, N]`` int64, the target's token after each node.
        scores: ``[B, N, V]``, the processed scores; None unless the plan keeps them.
        acceptance: the accepted path; None accepts the path whose tokens match `chosen`.
        most: ``[B]`` int64, greatest number of tokens that each row may commit; None for no limit.
    """

    chosen: Tensor
    scores: Tensor | None = None
    acceptance: Acceptance | None = None
    most: Tensor | None = None


@dataclass
class Outcome:
    """The results of a step that the host has read, as lists by row.

    Attributes:
        emitted: number of committed tokens.
        accepted: number of draft tokens among the committed tokens.
        drafted: number of verified draft tokens.
        ended: whether the row has ended, 0 or 1.
        new: the new tokens in order; only the first `emitted` are valid.
        drafters: name of the strategy that drafted each accepted token, if several strategies drafted; else an empty list.
    """

    emitted: list[int]
    accepted: list[int]
    drafted: list[int]
    ended: list[int]
    new: list[list[int]]
    drafters: list[list[str]] = field(default_factory=list)

    @staticmethod
    def of(summary: list[list[int]], new: list[list[int]], rows: int) -> Outcome:
        """The outcome of the first `rows` rows, from a :class:`~decoders.engine.decode.core.StepOutput`; other rows are padding."""
        emitted, accepted, drafted, ended = (figures[:rows] for figures in summary)
        return Outcome(emitted, accepted, drafted, ended, new[:rows])

    @property
    def written(self) -> list[list[int]]:
        """The committed tokens of every row."""
        return [tokens[:count] for tokens, count in zip(self.new, self.emitted, strict=True)]

    def part(self, first: int, count: int) -> Outcome:
        """A copy of the outcome of `count` rows from row `first` on."""
        return Outcome(*(figures[first : first + count] for figures in vars(self).values()))

    def put(self, first: int, part: Outcome) -> None:
        """Replaces the outcome of as many rows as `part` has, from row `first` on, by `part`."""
        for name, figures in vars(part).items():
            getattr(self, name)[first : first + len(figures)] = figures


def follow_matches(nodes: Tensor, chosen: Tensor, tree: TreeTensors) -> Acceptance:
    """The longest path on which every token is the target's own choice.

    This rule is exact for greedy decoding, and for sampling with noise that is a function of the position (Daliri et al. 2024,
    "Coupling without Communication and Drafter-Invariant Speculative Decoding"): the target's choice does not depend on the draft.

    Args:
        nodes: ``[B, N]`` int64; node 0 is the last committed token, the other nodes are draft tokens; -1 means "no draft token".
        chosen: ``[B, N]`` int64, the target's token after each node.
    """
    n = nodes.shape[1]
    if n == 1:
        return Acceptance(torch.zeros_like(nodes), torch.zeros_like(nodes[:, 0]))
    index = torch.arange(n, device=nodes.device)
    match = nodes == chosen.gather(1, tree.parents)
    match = match | (index == 0)
    on_branch = tree.ancestors
    accepted = (~on_branch | match[:, None]).all(-1) & on_branch.any(-1)
    # The deepest node is best; of equally deep nodes (equal siblings), the first. So the result never depends on argmax's tie-breaking.
    best = torch.where(accepted, tree.offsets * n + (n - 1 - index), -1).argmax(-1, keepdim=True)  # [B, 1]
    return path_to(best, tree, index)


def step_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns keys ``[B]`` int64 for the draws of one step, from the rows' keys ``[B]`` and lengths ``[B]`` (`positions`).

    Every step adds a token, so no two steps of a row have the same key. A step's key also differs from the row's key.
    """
    return mix64(mix64(keys) + positions)


def path_to(best: Tensor, tree: TreeTensors, index: Tensor) -> Acceptance:
    """The path from the root to node `best` ``[B, 1]``. index: ``[N]``, 0 … N-1."""
    deepest = tree.offsets.gather(1, best)  # [B, 1]
    on_path = tree.ancestors.gather(1, best[:, :, None].expand(-1, 1, len(index)))  # [B, 1, N]
    at_depth = tree.offsets[:, None, :] == index[None, :, None]  # [B, depth, node]
    path = torch.where(on_path & at_depth, index, 0).sum(-1)
    return Acceptance(torch.where(index[None] <= deepest, path, index), deepest[:, 0])


def draw_tokens(
    logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor, masks: Masks | None = None,
    prefixes: Prefixes | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Draws the target's token after each node. Returns the tokens ``[B, N]`` int64, and the scores (None unless the plan keeps them).

    Args:
        logits: ``[B, N, V]``.
        positions: ``[B, N]`` int64, for each node the number of generated tokens before the token that is drawn after the node.
        prefixes: the text that ends with each node; None unless the plan reads text.
    """
    left = candidates(logits, plan, inputs, positions, masks, prefixes=prefixes)
    if plan.keep_scores:
        left = left.settled()
    tokens = left.choose(plan, inputs, positions)
    if plan.sample and plan.reads_text:  # bans of words and n-grams may have removed all tokens
        tokens = torch.where(left.scores.amax(-1) > float("-inf"), tokens, NOTHING_LEFT)
    return tokens if masks is None else masks.written(tokens), left.dense() if plan.keep_scores else None


def settle(
    nodes: Tensor, chosen: Tensor, tree: TreeTensors, tokens: Tensor, length: Tensor, limit: Tensor, finished: Tensor,
    stop_tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Accepts the path that matches `chosen`, and appends its tokens to the rows. Returns path, new tokens and the step's summary."""
    acceptance = follow_matches(nodes, chosen, tree)
    return acceptance.path, *append(nodes, chosen, tree, acceptance, tokens, length, limit, finished, stop_tokens)


def append(
    nodes: Tensor, chosen: Tensor, tree: TreeTensors, acceptance: Acceptance, tokens: Tensor, length: Tensor,
    limit: Tensor, finished: Tensor, stop_tokens: Tensor, most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends an accepted path's tokens to the rows, in place. stop_tokens: ``[E]`` or ``[B, E]``; other tensors: see ``Rows``.

    Returns:
        the new tokens ``[B, N]`` and the summary ``[4, B]`` of the step, see :class:`~decoders.engine.decode.core.StepOutput`.
    """
    n = nodes.shape[1]
    index = torch.arange(n, device=nodes.device)
    new = chosen.gather(1, acceptance.path)
    room = torch.where(finished, 0, limit - length)
    if most is not None:
        room = torch.minimum(room, most)
    candidate = tree.ancestors[:, 1:, 0]  # tokens of a lookahead window are never accepted: they are not counted
    drafted = torch.where(finished, 0, ((nodes[:, 1:] >= 0) & candidate).sum(-1))
    emitted = torch.minimum(acceptance.depth + 1, room)
    is_stop = (new[:, :, None] == stop_tokens[..., None, :]).any(-1) & (index < emitted[:, None])
    first_stop = torch.where(is_stop, index, n).amin(-1)
    emitted = torch.minimum(emitted, first_stop + 1)
    # Rejected tokens are written past the new length, where the next step overwrites them.
    tokens.scatter_(1, length[:, None] + index, new)
    length.add_(emitted)
    finished.logical_or_((first_stop < n) | (length >= limit))
    accepted = torch.minimum(acceptance.depth, emitted)  # an accepted stop token has no bonus token after it
    return new, torch.stack([emitted, accepted, drafted, finished.long()])


class StepFunctions(Beside):
    """The functions that draw tokens and accept a path. Whether they run compiled depends on the forward pass (:class:`Tiers`)."""

    def __init__(self) -> None:
        self.forget()

    @staticmethod
    def of(forward_pass: ForwardPass) -> StepFunctions:
        """The functions for the steps of `forward_pass`; created once and stored in its tiers."""
        tiers = forward_pass.tiers
        if not isinstance(tiers.beside, StepFunctions):
            tiers.beside = StepFunctions()
        return tiers.beside

    def forget(self) -> None:
        self._settle = CompiledFunction(settle)
        self._draws: dict[SamplingPlan, TieredFunction] = {}

    def settle(
        self, tiers: Tiers, nodes: Tensor, chosen: Tensor, tree: TreeTensors, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accepts and appends the matching path (:func:`settle`). Runs compiled if the passes do."""
        if tiers.runs_compiled(len(nodes) > 1):
            return self._settle(copied_whole(nodes), chosen, _laid_out(tree), *arguments)
        return settle(nodes, chosen, tree, *arguments)

    def compiling(self, target: Target) -> Callable[[int, int], object]:
        compiled = self._settle
        return lambda rows, count: compiled(*_settle_examples(target, rows, count))

    def draw(
        self, tiers: Tiers, logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor,
        masks: Masks | None = None, prefixes: Prefixes | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Draws the target's token after each node (:func:`draw_tokens`).

        On the CPU the function runs uncompiled, which is faster. On other devices uncompiled code launches many small kernels, so the
        function runs compiled if the passes do.
        """
        arguments = logits, plan, inputs, positions, masks, prefixes
        if not tiers.target.static or not tiers.mode:
            return draw_tokens(*arguments)
        if plan not in self._draws:
            self._draws[plan] = TieredFunction(draw_tokens, CompiledFunction(draw_tokens), tiers.worth_compiling)
        draw, kind = self._draws[plan], kind_of(arguments)
        if tiers.mode is True:
            return draw.now(kind, arguments, tiers.report.waited)
        return draw(*arguments) if tiers.allows((plan, kind)) else draw.uncompiled(kind, *arguments)

    def ready(self, plan: SamplingPlan | None = None) -> frozenset[Hashable]:
        chosen = [(own, draw) for own, draw in self._draws.items() if plan is None or own == plan]
        return frozenset((own, kind) for own, draw in chosen for kind in draw.ready)


def _laid_out(tree: TreeTensors) -> TreeTensors:
    """A copy of `tree` for the compiled :func:`settle`. Its `visible`, which :func:`settle` never reads, is the tensor of ancestors."""
    ancestors = copied_whole(tree.ancestors)
    return TreeTensors(copied_whole(tree.parents), copied_whole(tree.offsets), ancestors, ancestors)


def _settle_examples(target: Target, rows: int, count: int) -> tuple:
    """Example arguments for compiling :func:`settle`, with the sizes of :func:`~decoders.engine.model.compiled.regions.examples`."""
    device, tree = target.device, Topology.chain(count + 1 if count > 1 else 0).tensors(rows, target.device)
    block = torch.zeros(rows, len(tree), dtype=torch.int64, device=device)
    lengths, stops = torch.full((rows,), 20, device=device), torch.full((rows, 8), -1, device=device)
    tokens = torch.zeros(rows, EXAMPLE_SLOTS, dtype=torch.int64, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    return block, block.clone(), _laid_out(tree), tokens, lengths, lengths + 39, finished, stops
