"""Staged speculative decoding (Spector & Ré 2023, arXiv 2308.04623): the draft model has its own drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from ..costs import draft_budget
from ..drafters import Drafter
from ..settings import Table
from ..strategy import Context, Draft, Sequences, Step
from ..tree import Topology, TreeTensors
from .draft_model import DraftModelSettings, DraftModelStrategy
from .draft_tree import best_nodes, depth_bound

#: Greatest number of nodes of the tree, root excluded, if the costs of a step have not been measured; as in the paper.
NODES = 36


class StagedSettings(DraftModelSettings):
    """The strategy that drafts for the draft model, and the tree of the draft model's tokens."""

    stage: str = Field(
        "ngram",
        description="Strategy that drafts for the draft model; a+b merges the drafts of two. It may itself be staged.",
    )
    stage_config: Table = Field(Table(), description="Settings of that strategy, for instance its own draft_model.")
    passes: int = Field(4, ge=1, le=32, description="Number of forward passes of the draft model per step.")
    length: int = Field(
        16, ge=1, le=32, description="Maximum number of tokens on the likeliest path (the paper's depth)."
    )
    children: int = Field(
        4,
        ge=1,
        le=32,
        description="Number of continuations proposed at each node of the likeliest path; 1 gives a chain.",
    )
    nodes: int | None = Field(
        None,
        ge=2,
        le=256,
        description="Maximum number of draft tokens (nodes) in the tree. None: as many as the measured costs of a step allow, "
        "or the paper's 36 without measured costs.",
    )


@dataclass
class _State:
    """The state of a call.

    Attributes:
        drafter: the draft model.
        collect: :func:`collect`, compiled.
        leaves: :func:`path_with_leaves`, compiled.
        fixed: the tree's shape if it is the same in every step, else None.
        nodes: greatest number of nodes of a tree of varying shape, root excluded.
        own_nodes: number of nodes in the last draft, root included.
    """

    drafter: Drafter
    collect: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    leaves: Callable[..., tuple[Tensor, ...]]
    fixed: Topology | None
    nodes: int
    own_nodes: int = 1


class Staged(DraftModelStrategy):
    """The draft model itself decodes speculatively, with any strategy as its drafter.

    One pass of the draft model then yields several tokens, so that drafts are longer at equal cost. The tokens that the draft model
    chooses form a path. At every node of the path, the draft model's next best tokens, known from the same pass, become leaves. The
    target verifies the likeliest nodes of path and leaves, as many as the setting ``nodes`` allows.
    """

    name = "staged"
    summary = "A draft model, itself sped up by n-grams or a smaller model, drafts a tree."
    settings_class = StagedSettings
    on_device = True
    rows_apart = False

    def start(self, context: Context) -> _State:
        s: StagedSettings = self.settings
        stage = context.strategy(s.stage, s.stage_config)
        nodes = draft_budget(context.costs, s.nodes, NODES)
        # Without the coupled verifier, all nodes get the same number of leaves: drawn tokens must not decide which nodes get leaves.
        children = s.children if context.coupled else max(1, min(s.children, nodes // s.length))
        drafter = context.draft(self.draft_model(context), ahead=s.length, children=children, stage=stage)
        children, fixed = drafter.children, None  # fewer children if the vocabulary is smaller
        if children == 1 or not context.coupled:
            fixed = Topology.from_paths([(0,) * j + (r,) for j in range(s.length) for r in range(children)])[0]
        return _State(drafter, context.compile(collect), context.compile(path_with_leaves), fixed, nodes)

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        return state  # of the state, only the drafter has data per row

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        s: StagedSettings = self.settings
        drafter = state.drafter
        drafter.begin(sequences)
        # Tokens beyond `length` are written to an additional last index.
        shape = (len(drafter.length), s.length + 1, drafter.children)
        tokens = torch.full(shape, -1, dtype=torch.int64, device=drafter.length.device)
        weights = torch.full(shape, float("-inf"), device=tokens.device)
        scores: Tensor | None = None
        for _ in range(s.passes):
            written = drafter.length - sequences.length
            advance = drafter.advance()
            expansion = advance.expansion
            if scores is None and expansion.scores is not None:
                scores = expansion.scores.new_zeros(*shape[:2], expansion.scores.shape[-1])
            tokens, weights, scores = state.collect(
                advance.path,
                advance.emitted,
                written,
                expansion.tokens,
                expansion.weights,
                expansion.scores,
                tokens,
                weights,
                scores,
            )
        path = drafter.drafted(s.length)
        if state.fixed is None:
            chosen, _, *tree = state.leaves(path, tokens, weights, state.nodes, depth_bound(s.length))
            draft = Draft(chosen, TreeTensors(*tree), depth=s.length)
        else:
            tokens[:, :-1, 0] = path
            if scores is not None:
                scores = scores[:, :-1].repeat_interleave(shape[2], dim=1)
            draft = Draft(tokens[:, :-1].flatten(1), state.fixed, scores)
        state.own_nodes = draft.tokens.shape[1] + 1
        return draft

    def observe(self, state: _State, step: Step) -> None:
        # `displaced` is 0: the nodes of the path are in the cache slots of their positions. An accepted leaf may be elsewhere, but
        # the leaf is the last accepted node, which the draft model reads again anyway.
        state.drafter.observe(step, state.own_nodes)


def collect(
    path: Tensor, emitted: Tensor, written: Tensor, tokens: Tensor, weights: Tensor, scores: Tensor | None,
    all_tokens: Tensor, all_weights: Tensor, all_scores: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Adds the continuations of the nodes on the accepted path of a pass to the continuations of earlier passes, and returns all.

    Args:
        path: ``[B, n]``, the accepted node at each depth of the pass's block.
        emitted: ``[B]``, number of tokens that this pass has appended.
        written: ``[B]``, number of tokens that the earlier passes have appended.
        tokens, weights, scores: ``[B, n, C]``, ``[B, n, C]`` and ``[B, n, V]``, the continuations of all nodes of the pass.
        all_tokens, all_weights, all_scores: ``[B, L+1, C]``, ``[B, L+1, C]`` and ``[B, L+1, V]``, the continuations of earlier
            passes. Index ``L`` holds entries that are not used.
    """
    index = torch.arange(path.shape[1], device=path.device)
    last = all_tokens.shape[1] - 1
    depth = torch.where(index < emitted[:, None], written[:, None] + index, last).clamp(max=last)

    def placed(source: Tensor, into: Tensor) -> Tensor:
        along = source.gather(1, path[..., None].expand(-1, -1, source.shape[2]))
        return into.scatter(1, depth[..., None].expand_as(along), along)

    with_scores = placed(scores, all_scores) if scores is not None and all_scores is not None else None
    return placed(tokens, all_tokens), placed(weights, all_weights), with_scores


def path_with_leaves(path: Tensor, tokens: Tensor, weights: Tensor, nodes: int, depth: int) -> tuple[Tensor, ...]:
    """Selects the likeliest nodes of a path and its leaves, at most `nodes`. Returns the same values as :func:`best_nodes`.

    Args:
        path: ``[B, L]``, the path's tokens, -1 after its end.
        tokens, weights: ``[B, L+1, C]``, at each depth the path's node, then the leaves, which are its siblings. Depth ``L`` is not
            read.
        depth: an upper bound of the number of levels, see :func:`best_nodes`.
    """
    rows, length = path.shape
    children = tokens.shape[2]
    tokens = torch.cat([path[..., None], tokens[:, :-1, 1:]], dim=2)
    weights = torch.where(path[..., None] >= 0, weights[:, :-1], float("-inf"))
    reached = torch.nn.functional.pad(weights[:, :-1, 0].cumsum(1), (1, 0))
    # All nodes of a level have the same parent: the path's node one level up. `above` is the parent's index among the flattened nodes.
    above = torch.arange(length, device=path.device) * children - children
    parents = torch.where(above < 0, -1, above)[:, None].expand(length, children).reshape(1, -1).expand(rows, -1)
    return best_nodes(
        tokens.flatten(1), (reached[..., None] + weights).flatten(1), parents, min(nodes, length * children), depth
    )
