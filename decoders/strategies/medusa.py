"""Medusa (Cai et al. 2024): extra heads on the target predict the tokens after the next token. Their best tokens form a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from ..costs import draft_budget
from ..errors import SettingsError, UnsupportedError, amount
from ..heads.medusa import DEFAULT_TREE, HeadWeights, MedusaHeads, check_fit, find_heads, head_scores, load_heads
from ..sampling import SamplingInputs, SamplingPlan, candidates
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import Topology


class MedusaSettings(Settings):
    """The heads, and the tree of their drafts."""

    heads: str | None = Field(
        None,
        description="Folder of the heads, in this package's format or the authors'; `demo`: the demo model's heads. None: the "
        "subfolder `medusa` of the model's folder.",
    )
    tree: tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="Paths of the tree, each a tuple of ranks, one per level; rank 0 is a head's best token. None: the tree "
        "saved with the heads, else the paper's tree of 63 paths.",
    )
    nodes: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Maximum number of draft tokens (nodes) in the tree, which keeps its first paths. None: as many as the "
        "measured costs of a step allow, or all without measured costs.",
    )


@dataclass
class _State:
    """The state of a call.

    Attributes:
        topology: the tree of ``N`` nodes.
        level: ``[N-1]`` int64, the index (from 0) of the head that predicts each node's token.
        rank: ``[N-1]`` int64, the rank of each node's token among its head's tokens.
        ranks: number of best tokens computed for each head.
        weights: the heads' weights.
        lm_head: ``[V, H]``, weight of the target's output head. Heads without their own output projection use it.
        lm_bias: ``[V]``, bias of the target's output head; None for a head without bias.
        hidden: ``[B, H]``, the heads' input: the hidden state from which each row's last token was chosen.
        known: ``[B, 1]`` bool, whether a row's hidden state is known.
        ahead: ``[K]`` int64, 0 … K-1: number of tokens between the row's last token and the token that each of ``K`` heads predicts.
        plan, sampling: see :class:`~decoders.strategy.Context`; `sampling` is None outside a call.
        keep_scores: whether drafts have scores, which verifiers with a rejection rule need.
        predict: :func:`draft_tokens`, compiled.
    """

    topology: Topology
    level: Tensor
    rank: Tensor
    ranks: int
    weights: HeadWeights
    lm_head: Tensor
    lm_bias: Tensor | None
    hidden: Tensor
    known: Tensor
    ahead: Tensor
    plan: SamplingPlan
    sampling: SamplingInputs | None
    keep_scores: bool
    predict: Callable[..., tuple[Tensor, Tensor | None]]


class Medusa(Strategy):
    """Head k = 1 … K predicts the token k places after the next token. The best tokens of all heads form a tree of fixed shape.

    All heads read the hidden state from which the next token was chosen. The first step of a call has no draft, because no hidden
    state is known yet. When sampling with the coupled verifier, the target's noise is added to a head's processed scores before the
    head's best tokens are taken, so that target and heads tend to draw the same tokens.

    Drafts are exact by default. ``verifier="typical"`` chooses the paper's typical acceptance, which is lossy.
    """

    name = "medusa"
    summary = "Small heads trained on the target draft several tokens ahead, as a tree."
    needs = "heads"
    settings_class = MedusaSettings
    auto_place = 40
    on_device = True
    rows_apart = False  # the tree's size depends on the number of rows
    rests = True

    def start(self, context: Context) -> _State:
        heads = self._heads(context)
        s: MedusaSettings = self.settings
        paths = s.tree or heads.config.tree or DEFAULT_TREE
        # The default tree has four levels, and there may be fewer heads. A user's tree is not cut: `_check_tree` raises an error.
        if s.tree is None:
            paths = tuple(path for path in paths if len(path) <= heads.config.heads)
        nodes = draft_budget(context.costs, s.nodes, len(paths))
        topology, picks = Topology.from_paths(budgeted(paths, nodes))
        plan, drawn = context.plan or SamplingPlan(), context.plan is not None and context.plan.sample
        _check_tree(topology, picks, heads)
        keep_scores = drawn and not context.coupled
        ranks = without_gaps(topology, picks) if keep_scores else picks
        output = context.model.get_output_embeddings()
        device, rows = context.device, context.rows
        return _State(
            topology=topology,
            level=torch.tensor([level for level, _ in ranks], device=device),
            rank=torch.tensor([rank for _, rank in ranks], device=device),
            ranks=max(rank for _, rank in ranks) + 1,
            weights=heads.weights(),
            lm_head=_whole(output.weight),
            lm_bias=None if getattr(output, "bias", None) is None else _whole(output.bias),
            hidden=torch.zeros(rows, heads.config.hidden_size, dtype=output.weight.dtype, device=device),
            known=torch.zeros(rows, 1, dtype=torch.bool, device=device),
            ahead=torch.arange(heads.config.heads, device=device),
            plan=plan,
            sampling=context.sampling,
            keep_scores=keep_scores,
            predict=context.compile(draft_tokens),
        )

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        """Rows that stay keep their hidden states. The hidden states of new rows are unknown until their first step."""
        before = rows.clamp(min=0)
        state.hidden, state.known = state.hidden[before], state.known[before] & (rows >= 0)[:, None]
        state.sampling = context.sampling
        return state

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        positions = (sequences.length - sequences.prompt_length)[:, None] + state.ahead
        best, scores = state.predict(
            state.hidden,
            positions,
            state.weights,
            state.lm_head,
            state.lm_bias,
            state.plan,
            state.sampling,
            state.ranks,
        )
        tokens = torch.where(state.known, best[:, state.level, state.rank], -1)
        return Draft(
            tokens, state.topology, scores[:, state.level] if state.keep_scores and scores is not None else None
        )

    def observe(self, state: _State, step: Step) -> None:
        # The last token was chosen from the hidden state of the path's node at this depth. Ended rows emit no tokens: depth 0.
        depth = (step.emitted - 1).clamp(min=0)[:, None]
        node = step.path.gather(1, depth)
        state.hidden.copy_(step.hidden.gather(1, node[..., None].expand(-1, 1, step.hidden.shape[2]))[:, 0])
        state.known.fill_(True)

    def _heads(self, context: Context) -> MedusaHeads:
        """The heads for the call's target, in its dtype.

        Raises:
            SettingsError: the heads' hidden size or vocabulary differs from the target's.
            UnsupportedError: there are no heads, or the strategy drafts for a draft model.
        """
        if context.level > 0:
            raise UnsupportedError("medusa cannot draft for a draft model: its heads read the target's hidden states")
        weight = context.model.get_output_embeddings().weight
        folder = find_heads(self.settings.heads, context.model)
        heads = load_heads(folder, context.device, weight.dtype)
        check_fit(heads, context.model, folder)
        return heads


def budgeted(paths: Sequence[Sequence[int]], nodes: int) -> tuple[tuple[int, ...], ...]:
    """The first paths of a tree, at most `nodes`. A path lists one rank per level. Paths whose parent is left out are left out, too."""
    chosen: list[tuple[int, ...]] = []
    for path in map(tuple, paths):
        if len(chosen) < nodes and (len(path) == 1 or path[:-1] in chosen):
            chosen.append(path)
    return tuple(chosen)


def _check_tree(topology: Topology, picks: Sequence[tuple[int, int]], heads: MedusaHeads) -> None:
    """Raises SettingsError for a tree that has more levels than there are heads, or ranks outside the vocabulary."""
    config = heads.config
    if not picks or topology.max_depth > config.heads:
        raise SettingsError(
            f"medusa: the tree is {topology.max_depth} levels deep, deeper than {amount(config.heads, 'head')} can draft: give a tree "
            "of one level per head at most"
        )
    if wrong := [rank for _, rank in picks if not 0 <= rank < config.vocab_size]:
        raise SettingsError(f"medusa: ranks in the tree must be 0 … {config.vocab_size - 1}, not {wrong[0]}")


def without_gaps(topology: Topology, picks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The level and rank of every node, with ranks changed so that siblings have the ranks 0, 1, 2 … without gaps.

    Rejection rules need this: they must see all tokens that a head has drawn, in the order of the draws.
    """
    children: dict[int, int] = {}
    closed = []
    for parent, (level, _) in zip(topology.parents[1:], picks, strict=True):
        closed.append((level, children.get(parent, 0)))
        children[parent] = children.get(parent, 0) + 1
    return closed


def draft_tokens(
    hidden: Tensor, positions: Tensor, weights: HeadWeights, lm_head: Tensor, lm_bias: Tensor | None, plan: SamplingPlan,
    sampling: SamplingInputs | None, ranks: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns every head's best tokens, ``[B, K, ranks]`` int64, and the scores ``[B, K, V]`` from which they were drawn.

    The scores are None if decoding is greedy. The draft tokens of a level are the same for every parent, because a head does not see
    the path. Rejection rules stay exact: the draws of a level are independent of the draws of the levels above.

    Args:
        hidden: ``[B, H]``, the heads' input.
        positions: ``[B, K]`` int64, number of tokens that the row has generated before each head's draft token.
    """
    scores = head_scores(hidden, weights, lm_head, lm_bias).float()
    if not plan.sample or sampling is None:
        return scores.topk(ranks).indices, None
    left = candidates(scores, plan, sampling, positions, at_least=ranks).settled()
    return left.best(ranks, plan, sampling, positions)[0], left.dense()


def _whole(weight: Tensor) -> Tensor:
    """The whole `weight`: gathered from all processes if it is sharded."""
    gather = getattr(weight, "full_tensor", None)
    return gather() if gather is not None else weight
