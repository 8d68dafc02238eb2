"""Token recycling (Luo et al. 2024, arXiv 2408.08696): what the target thought likely after a token is drafted when it comes again."""

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
    """The matrix and the tree."""

    k: int = Field(
        4,
        ge=1,
        le=16,
        description="The paper's k, 8 there: successors kept of every token. 4 take 1.6 MB for a vocabulary of 100,000.",
    )
    nodes: int = Field(
        16,
        ge=1,
        le=256,
        description="Draft tokens of the tree. The paper's has about 80, for hardware where they are free.",
    )
    length: int = Field(6, ge=1, le=32, description="Most draft tokens on a path of the tree, as in the paper.")
    tree: tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="Paths of ranks, level by level, best first. None: the tree of `nodes` nodes that is likeliest to be right.",
    )
    prompt_logits: bool = Field(
        False,
        description="Learn from the logits of the prompt as well: the output head runs over every token of it. If not, tokens "
        "that nothing is known of get what followed them in the prompt.",
    )


@dataclass
class _State:
    """What a call keeps.

    Attributes:
        matrix: ``[V + 1, k]`` int32, the likeliest successors of every token, best first, -1 where there are none; the last row is that
            of no token.
        levels: per level of the tree, which nodes of the level before its nodes continue, and with which rank, int64.
        topology: of the tree.
        fill: :func:`fill`, compiled.
        learn: :func:`learn`, compiled.
    """

    matrix: Tensor
    levels: list[tuple[Tensor, Tensor]]
    topology: Topology
    fill: Callable[..., Tensor]
    learn: Callable[..., None]


class TokenRecycling(Strategy):
    """Keeps the ``k`` likeliest successors of every token, as the target's logits had them where the token was last verified,
    accepted or not, and fills a static tree by looking up row after row.

    One matrix serves all rows and later calls on the model: what it holds was once computed anyway.
    """

    name = "token_recycling"
    summary = "Proposes what the target thought likely when it last met the same tokens, as a static tree."
    settings_class = TokenRecyclingSettings
    on_device = True
    rests = True

    def __init__(self, settings: TokenRecyclingSettings | None = None, /, **values: object) -> None:
        super().__init__(settings, **values)
        self.prompt_logits = self.settings.prompt_logits

    @property
    def reads_prompt(self) -> bool:
        return self.prompt_logits

    def start(self, context: Context) -> _State:
        s: TokenRecyclingSettings = self.settings
        device, shape = context.device, (context.vocab_size + 1, s.k)
        matrix: Tensor = context.memory(
            f"matrix on {device}", lambda: torch.full(shape, -1, dtype=torch.int32, device=device)
        )
        if context.sequences is not None and not self.prompt_logits:
            follow(matrix, context.sequences.tokens.tolist(), context.sequences.length.tolist())
        topology, levels = static_tree(s.tree or likely_paths(s.length, s.k, s.nodes), device)
        return _State(matrix, levels, topology, context.compile(fill), context.compile(learn))

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        return state  # nothing in it belongs to a row

    def prefill(self, state: _State, chunk: PromptChunk) -> None:
        assert chunk.logits is not None
        shown = chunk.valid.any(1)  # of a batch that others come to, their rows alone
        tokens = torch.where(chunk.valid, chunk.tokens, -1)
        state.learn(state.matrix, tokens[shown], chunk.logits[shown], chunk.positions[shown])

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        return Draft(state.fill(state.matrix, sequences.last, state.levels), state.topology)

    def observe(self, state: _State, step: Step) -> None:
        index = torch.arange(step.path.shape[1], device=step.path.device)
        kept = index <= step.accepted[:, None]
        worth = torch.zeros_like(step.path).scatter(1, torch.where(kept, step.path, 0), torch.where(kept, index, 0))
        nodes = torch.where(step.emitted[:, None] > 0, step.nodes, -1)  # rows that had ended have no logits
        state.learn(state.matrix, nodes, step.logits, worth)


def static_tree(paths: Sequence[Sequence[int]], device: torch.device) -> tuple[Topology, list[tuple[Tensor, Tensor]]]:
    """The tree in Medusa's notation, and per level the place of each node's parent in the level before, and its rank."""
    topology, picks = Topology.from_paths(paths)
    levels, before = [], [0]
    for depth in range(1, topology.max_depth + 1):
        nodes = [node for node in range(1, len(topology)) if topology.offsets[node] == depth]
        above = [before.index(topology.parents[node]) for node in nodes]
        ranks = [picks[node - 1][1] for node in nodes]
        levels.append((torch.tensor(above, device=device), torch.tensor(ranks, device=device)))
        before = nodes
    return topology, levels


def fill(matrix: Tensor, last: Tensor, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The tree's draft tokens ``[B, N-1]`` int64, level by level; -1 where nothing is known of a parent.

    Args:
        last: ``[B, 1]`` int64, the rows' last tokens.
    """
    nothing = matrix.shape[0] - 1
    tokens, level = [], last
    for above, ranks in levels:
        level = matrix[torch.where(level < 0, nothing, level)[:, above], ranks].long()
        tokens.append(level)
    return torch.cat(tokens, 1)


def learn(matrix: Tensor, nodes: Tensor, logits: Tensor, worth: Tensor) -> None:
    """Writes the likeliest successors of all `nodes` into `matrix`, in place.

    Where a token is there more than once, the node that is worth most counts, of equal ones the last: one writer per row of the
    matrix, so that every device writes the same.

    Args:
        nodes: ``[B, N]`` int64, -1 where there is none.
        logits: ``[B, N, V]``.
        worth: ``[B, N]`` int64.
    """
    tokens = nodes.flatten()
    scores, k = logits.flatten(0, 1), matrix.shape[1]
    best = largest(scores, k)[1] if scores.device.type == "cpu" else scores.topk(k).indices
    place = torch.arange(len(tokens), device=tokens.device)
    order = worth.flatten() * len(tokens) + place
    beaten = ((tokens[:, None] == tokens) & (order[:, None] < order)).any(1)
    nothing = matrix.shape[0] - 1
    rows = torch.where(beaten | (tokens < 0), nothing, tokens)
    values = torch.where((rows == nothing)[:, None], -1, best).int()
    matrix.index_put_((rows,), values)  # all that is beaten writes the same into the row of no token


def follow(matrix: Tensor, texts: list[list[int]], lengths: list[int]) -> None:
    """Gives the tokens of `texts` of which nothing is known the last different ones that followed them, the latest first."""
    successors: dict[int, dict[int, None]] = {}
    for text, length in zip(texts, lengths, strict=True):
        for token, successor in itertools.pairwise(text[:length]):
            known = successors.setdefault(token, {})
            known.pop(successor, None)
            known[successor] = None
    if not successors:
        return
    k = matrix.shape[1]
    latest = [(list(reversed(known)) + [-1] * k)[:k] for known in successors.values()]
    rows = torch.tensor(list(successors), device=matrix.device)
    values = torch.tensor(latest, dtype=torch.int32, device=matrix.device)
    present = matrix[rows]
    matrix[rows] = torch.where(present[:, :1] < 0, values, present)
