"""Token recycling (Luo et al. 2024, arXiv 2408.08696): drafts tokens that the target found likely after the same token earlier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from ..sampling import largest
from ..settings import Settings
from ..strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy
from ..tree import Topology
from .draft_tree import likely_paths


class TokenRecyclingSettings(Settings):
    """The size of the matrix, and the shape of the tree."""

    k: int = Field(
        4,
        ge=1,
        le=16,
        description="Number of candidate successors kept for each token (the paper's k, there 8). 4 take 1.6 MB for a "
        "vocabulary of 100,000 tokens.",
    )
    nodes: int = Field(
        16,
        ge=1,
        le=256,
        description="Number of draft tokens in the tree. The paper's tree has about 80, for hardware that verifies them at no "
        "extra cost.",
    )
    length: int = Field(
        6,
        ge=1,
        le=32,
        description="Maximum depth of the tree: number of draft tokens on a path. The default is the paper's.",
    )
    tree: tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="Paths of the tree, each a tuple of ranks, one per level. None: the `nodes` paths that are likeliest to "
        "be accepted.",
    )
    prompt_logits: bool = Field(
        False,
        description="true: also learn from the logits of the prompt, for which the output head runs over all prompt tokens. "
        "false: a token without successors gets the tokens that followed it in the prompt.",
    )


@dataclass
class _State:
    """The state of a call.

    Attributes:
        matrix: ``[V+1, k+1]`` int32. Row ``t`` holds the ``k`` likeliest successors of token ``t``, then one grade for all of them.
            Row ``V`` is for "no token".
        topology: the tree.
        ranks: for each draft token, its rank among its parent's successors.
        levels, parents: the tree as arguments of :func:`fill`: its :data:`Levels`, and the parents of the draft tokens.
        fill, learn: :func:`fill` and :func:`learn`, compiled.
    """

    matrix: Tensor
    topology: Topology
    ranks: tuple[int, ...]
    levels: Levels
    parents: Tensor
    fill: Callable[..., tuple[Tensor, Tensor]]
    learn: Callable[..., None]


class TokenRecycling(Strategy):
    """Stores a matrix with the ``k`` likeliest successors of every token, and fills a static tree from it, level by level.

    A token's successors come from the target's logits at the latest node with this token, whether the node was accepted or not. All
    rows, and later calls on the model, share one matrix. Unlike in the paper, draft tokens are graded: by the difference between the
    logits of the best two successors.
    """

    name = "token_recycling"
    summary = "Proposes, as a static tree, the tokens that the target found likely when it last read the same tokens."
    settings_class = TokenRecyclingSettings
    on_device = True
    # By the difference between the logits of the best two successors (SUREST). The last grade is for successors from prompts.
    grade_rates = (0.45, 0.6, 0.7, 0.75, 0.6)
    rests = True
    rows_apart = False
    misses_steps = True

    def __init__(self, settings: TokenRecyclingSettings | None = None, /, **values: object) -> None:
        super().__init__(settings, **values)
        self.prompt_logits = self.reads_prompt = self.settings.prompt_logits

    def start(self, context: Context) -> _State:
        s: TokenRecyclingSettings = self.settings
        device, shape = context.device, (context.vocab_size + 1, s.k + 1)
        matrix: Tensor = context.memory(
            f"successors on {device}", lambda: torch.full(shape, -1, dtype=torch.int32, device=device)
        )
        if context.sequences is not None and not self.prompt_logits:
            follow(matrix, context.sequences.tokens.tolist(), context.sequences.length.tolist())
        topology, picks = Topology.from_paths(s.tree or likely_paths(s.length, s.k, s.nodes))
        ranks = tuple(rank for _, rank in picks)
        levels, parents = levels_of(topology, ranks, device), torch.tensor(topology.parents[1:], device=device)
        return _State(matrix, topology, ranks, levels, parents, context.compile(fill), context.compile(learn))

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        return state  # the matrix does not depend on the rows

    def prefill(self, state: _State, chunk: PromptChunk) -> None:
        assert chunk.logits is not None
        shown = chunk.valid.any(1)  # if rows join a batch, only the new rows have valid tokens
        tokens = torch.where(chunk.valid, chunk.tokens, -1)
        state.learn(state.matrix, tokens[shown], chunk.logits[shown], chunk.positions[shown])

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        last = sequences.last
        if sequences.on_host:
            listed = filled(state.matrix, last.flatten().tolist(), state.topology.parents[1:], state.ranks)
            tokens, grades = (torch.tensor(values) for values in listed)
        else:
            tokens, grades = state.fill(state.matrix, last, state.levels, state.parents)
        return Draft(tokens, state.topology, grades=grades)

    def observe(self, state: _State, step: Step) -> None:
        if step.sequences.on_host:
            learn_listed(state.matrix, _verified(step), step.logits.flatten(0, 1))
            return
        index = torch.arange(step.path.shape[1], device=step.path.device)
        kept = index <= step.accepted[:, None]
        worth = torch.zeros_like(step.path).scatter(1, torch.where(kept, step.path, 0), torch.where(kept, index, 0))
        nodes = torch.where(step.emitted[:, None] > 0, step.nodes, -1)  # ended rows have no logits
        state.learn(state.matrix, nodes, step.logits, worth)


def _verified(step: Step) -> list[tuple[int, int, int]]:
    """Lists every node that has logits as ``(worth, place, token)``: its depth (0 if rejected), the index of its logits, its token."""
    nodes: list[tuple[int, int, int]] = []
    parts = (part.tolist() for part in (step.nodes, step.path, step.accepted, step.emitted))
    for row, (tokens, path, accepted, emitted) in enumerate(zip(*parts, strict=True)):
        if not emitted:  # the row has ended
            continue
        depth = {node: depth for depth, node in enumerate(path[: accepted + 1])}
        first = row * len(tokens)
        nodes += [(depth.get(node, 0), first + node, token) for node, token in enumerate(tokens) if token >= 0]
    return nodes


def levels_of(topology: Topology, ranks: Sequence[int], device: torch.device) -> Levels:
    """The :data:`Levels` of a tree. ranks: for each draft token, its rank among its parent's successors."""
    levels, before = [], [0]
    for depth in range(1, topology.max_depth + 1):
        nodes = [node for node in range(1, len(topology)) if topology.offsets[node] == depth]
        above = [before.index(topology.parents[node]) for node in nodes]
        levels.append((torch.tensor(above, device=device), torch.tensor([ranks[n - 1] for n in nodes], device=device)))
        before = nodes
    return levels


#: The grade of a token's successors is the difference between the logits of the best two, rounded down, at most SUREST. Successors from
#: prompts have no logits: their grade is FOLLOWED.
SUREST, FOLLOWED = 3, 4

#: For each level of a tree two int64 tensors: the indices of the nodes' parents in the level before, and the nodes' ranks.
Levels = list[tuple[Tensor, Tensor]]


def fill(matrix: Tensor, last: Tensor, levels: Levels, parents: Tensor) -> tuple[Tensor, Tensor]:
    """The tree's draft tokens, level by level, and their grades, both ``[B, N-1]`` int64.

    A token is -1 if its parent has too few successors.

    Args:
        last: ``[B, 1]`` int64, the rows' last tokens.
        parents: ``[N-1]`` int64, the parents of the draft tokens.
    """
    tokens, level = [last], last
    for above, ranks in levels:
        level = matrix[level[:, above], ranks].long()  # token -1 selects the last row, which is for "no token"
        tokens.append(level)
    nodes = torch.cat(tokens, 1)
    return nodes[:, 1:], matrix[nodes[:, parents], -1].long()


def filled(
    matrix: Tensor, last: Sequence[int], parents: Sequence[int], ranks: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """The result of :func:`fill` as lists, computed on the host.

    Args:
        parents, ranks: parents and ranks of the draft tokens.
    """
    successors = matrix.numpy()
    all_tokens, all_grades = [], []
    for root in last:
        rows: dict[int, list[int]] = {}
        nodes, grades = [root], []
        for parent, rank in zip(parents, ranks, strict=True):
            token = nodes[parent]
            if token not in rows:
                rows[token] = successors[token].tolist()
            nodes.append(rows[token][rank])
            grades.append(rows[token][-1])
        all_tokens.append(nodes[1:])
        all_grades.append(grades)
    return all_tokens, all_grades


def learn(matrix: Tensor, nodes: Tensor, logits: Tensor, worth: Tensor) -> None:
    """Writes the likeliest successors of all `nodes` into `matrix`, in place.

    If several nodes have the same token, the node with the largest `worth` is used, and among nodes with equal `worth` the last. So
    each row of the matrix is written once, and every device writes the same values.

    Args:
        nodes: ``[B, N]`` int64, tokens of the nodes, -1 for nodes that are ignored.
        logits: ``[B, N, V]``.
        worth: ``[B, N]`` int64, depth of accepted nodes, 0 for rejected nodes.
    """
    tokens = nodes.flatten()
    scores, k = logits.flatten(0, 1), matrix.shape[1] - 1
    values, best = (largest if scores.device.type == "cpu" else torch.topk)(scores, max(k, 2))
    margin = values[:, :1] - values[:, 1:2]
    grade = torch.where(margin > 0, margin, 0).clamp(max=SUREST)  # NaN, the difference of infinities, becomes 0, too
    place = torch.arange(len(tokens), device=tokens.device)
    order = worth.flatten() * len(tokens) + place
    beaten = ((tokens[:, None] == tokens) & (order[:, None] < order)).any(1)
    nothing = matrix.shape[0] - 1
    rows = torch.where(beaten | (tokens < 0), nothing, tokens)
    learnt = torch.where((rows == nothing)[:, None], -1, torch.cat([best[:, :k], grade.long()], 1)).int()
    matrix.index_put_((rows,), learnt)  # the nodes that are not used write -1 to the row for "no token"


def learn_listed(matrix: Tensor, nodes: Sequence[tuple[int, int, int]], logits: Tensor) -> None:
    """Writes the likeliest successors of `nodes` into `matrix`, as :func:`learn` does, but on the host.

    Args:
        nodes: ``(worth, place, token)`` of each node; its logits are ``logits[place]``.
        logits: ``[R, V]``, for ``R`` nodes of all rows.
    """
    if not nodes:
        return
    places = {token: place for _, place, token in sorted(nodes)}
    k, shown = matrix.shape[1] - 1, max(places.values()) + 1
    values, best = (part.tolist() for part in largest(logits[:shown], max(k, 2)))
    successors = matrix.numpy()
    for token, place in places.items():
        margin = max(0.0, values[place][0] - values[place][1])
        successors[token] = [*best[place][:k], int(min(margin, SUREST))]


def follow(matrix: Tensor, texts: list[list[int]], lengths: list[int]) -> None:
    """Gives each token without successors in `matrix` the tokens that followed it in `texts`, each once, the latest first.

    lengths: number of valid tokens of each text.
    """
    successors: dict[int, dict[int, None]] = {}
    for text, length in zip(texts, lengths, strict=True):
        for token, successor in itertools.pairwise(text[:length]):
            if token < 0 or successor < 0:  # a position without a token id, for instance of an image
                continue
            known = successors.setdefault(token, {})
            known.pop(successor, None)
            known[successor] = None
    if not successors:
        return
    k = matrix.shape[1] - 1
    latest = [[*(list(reversed(known)) + [-1] * k)[:k], FOLLOWED] for known in successors.values()]
    rows = torch.tensor(list(successors), device=matrix.device)
    values = torch.tensor(latest, dtype=torch.int32, device=matrix.device)
    present = matrix[rows]
    matrix[rows] = torch.where(present[:, :1] < 0, values, present)
