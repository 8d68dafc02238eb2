"""Lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding").

The target drafts for itself. Its forward pass verifies draft tokens, and beside them runs a *window*: a Jacobi iteration over future
positions, with ``W`` columns. The window keeps the results of the last ``N-1`` rounds, its *levels*. A column's tokens on all levels
and the target's next token after them form an n-gram of ``N`` tokens. A pool stores these n-grams. In each step, up to ``G`` n-grams
that begin with the row's last token are verified (*candidates*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ..costs import node_budget
from ..errors import UnsupportedError
from ..sampling import mix64
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import NO_PARENT, Topology


class LookaheadSettings(Settings):
    """Shape of the block, which has ``(W + G) · (N - 1)`` nodes, and size of the pool.

    Unset values depend on the measured costs of a step: cheaper nodes allow a wider window. Without measured costs the values are
    W = 2, N = 8 and G = 2, because narrow blocks suit small models on a CPU. W is above 1, so that the window itself finds n-grams. Of
    the shapes with W above 1, this shape is among the fastest on the demo target.
    """

    window: int | None = Field(
        None,
        ge=1,
        le=64,
        description="W, the width of the lookahead window: number of future positions. Paper, 7B model: 15. None: by the "
        "measured costs of a step.",
    )
    ngram: int | None = Field(
        None,
        ge=2,
        le=16,
        description="N, tokens per n-gram; a step accepts at most N - 1 of them. Paper, 7B model: 5. None: by the measured "
        "costs of a step, 8 at most.",
    )
    candidates: int | None = Field(
        None,
        ge=1,
        le=64,
        description="G, maximum number of n-grams verified per step, and kept per first token. Paper, 7B model: 15. None: by "
        "the measured costs of a step.",
    )
    capacity: int = Field(512, ge=16, le=4096, description="Maximum number of n-grams in the n-gram pool, per row.")
    seed_from_prompt: bool = Field(True, description="Add the n-grams of the prompt to the pool.")
    keep_output: bool = Field(True, description="Add the n-grams of the generated text to the pool.")


class BlockShape(NamedTuple):
    """W, the number of columns of the window; N, the number of tokens of an n-gram; G, the number of n-grams verified per step."""

    window: int
    ngram: int
    candidates: int


#: The block's shape without measured costs.
SHAPE = BlockShape(2, 8, 2)
#: Upper bound of the numbers of columns and of candidates that measured costs choose. Both are 15 in the paper, for a 7B model.
WIDEST = 15


@dataclass
class LookaheadState:
    """The state of a call; its tensors are updated in place.

    Attributes:
        block: ``[B, (W + G)(N - 1) - 1]`` int64, tokens of the next draft: the window without the root, then the candidates.
        pool: ``[B, N + 1, C]`` int64: ``C`` n-grams. Each n-gram has ``N`` tokens and a rank among the n-grams that begin with the same
            token. See :func:`make_pool`.
        advance: the compiled function that updates the state after a step, from :func:`advance_for`.
        shape: the block's shape.
    """

    block: Tensor
    pool: Tensor
    advance: Callable[..., None]
    shape: BlockShape


class Lookahead(Strategy):
    """Verifies n-grams that the target itself generated in a Jacobi iteration over future positions.

    It needs no draft model and no repetition in the text. Each step has ``(W + G) · (N - 1)`` nodes, so it is fast only if a forward
    pass over that many nodes takes little more time than a pass over one node.
    """

    name = "lookahead"
    summary = "Collects n-grams from a Jacobi iteration that runs beside verification; needs no draft model."
    settings_class = LookaheadSettings
    on_device = True
    rows_apart = False

    def start(self, context: Context) -> LookaheadState:
        s: LookaheadSettings = self.settings
        text = context.sequences
        if text is None:
            raise UnsupportedError("lookahead reads the prompts: create the Context with sequences")
        shape = block_shape(context, s)
        block, pool = self._first(text.tokens, text.length, shape)
        advance = context.compile(advance_for(shape.window, shape.ngram, s.keep_output))
        return LookaheadState(block, pool, advance, shape)

    def rebatch(self, state: LookaheadState, rows: Tensor, context: Context) -> LookaheadState:
        """Rows that stay keep their windows and pools. New rows get windows and pools from their prompts."""
        text, new = context.sequences, rows < 0
        assert text is not None
        state.block, state.pool = state.block[rows.clamp(min=0)], state.pool[rows.clamp(min=0)]
        if bool(new.any()):
            state.block[new], state.pool[new] = self._first(text.tokens[new], text.length[new], state.shape)
        return state

    def _first(self, tokens: Tensor, length: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor]:
        """The first block of the rows, and a pool with the n-grams of their prompts. tokens: ``[B, L]``, length: ``[B]``."""
        s: LookaheadSettings = self.settings
        window = first_window(tokens, length, shape.window, shape.ngram)
        # At most as many n-grams as the pool can hold, because `make_pool` compares all pairs.
        new, valid = last_ngrams(tokens, length, shape.ngram, min(tokens.shape[1], s.capacity))
        pool = make_pool(new, valid & s.seed_from_prompt, shape.candidates, s.capacity).contiguous()
        candidates = recall(pool, tokens.gather(1, length[:, None] - 1), shape.candidates)
        return torch.cat([window.flatten(1)[:, 1:], candidates.flatten(1)], 1), pool

    def propose(self, state: LookaheadState, sequences: Sequences) -> Draft:
        # A copy, because `observe` writes the next block in place.
        return Draft(state.block.clone(), lookahead_block(*state.shape))

    def observe(self, state: LookaheadState, step: Step) -> None:
        text = step.sequences
        state.advance(
            state.block, state.pool, step.nodes, step.chosen, step.logits, text.tokens, text.length, step.emitted
        )


def block_shape(context: Context, settings: LookaheadSettings) -> BlockShape:
    """The block's shape. Chooses unset settings, first N, then W, then G, by the number of nodes that the costs of a step allow."""
    set_by_hand = settings.window, settings.ngram, settings.candidates
    window, ngram, candidates = (own or plain for own, plain in zip(set_by_hand, SHAPE, strict=True))
    if None in set_by_hand and context.costs() is not None:
        nodes = node_budget(context.costs, None, len(lookahead_block(*SHAPE)))
        if settings.ngram is None:
            ngram = min(SHAPE.ngram, max(nodes // (SHAPE.window + SHAPE.candidates), 1) + 1)
        columns = nodes // (ngram - 1)
        window = settings.window or min(max((columns - (settings.candidates or columns // 2)), SHAPE.window), WIDEST)
        candidates = settings.candidates or min(max(columns - window, 1), WIDEST)
    return BlockShape(window, ngram, candidates)


@lru_cache
def lookahead_block(window: int, ngram: int, candidates: int) -> Topology:
    """The block of a step, ``(W + G) · (N - 1)`` nodes. Nodes of the window are never accepted.

    Node ``j·W + i`` is level ``j``, column ``i`` of the window, at position ``i + j`` after the root; the root is level 0, column 0.
    The node sees columns 0 … ``i`` of level 0, and its own column up to level ``j``. The candidates are branches of the root, and
    come after the window in the block. The window and the candidates do not see each other.
    """
    levels = [(j, i) for j in range(ngram - 1) for i in range(window)]
    extra = tuple((*range(i + 1), *(k * window + i for k in range(1, j))) for j, i in levels)
    lookahead = Topology((NO_PARENT,) * len(levels), tuple(j + i for j, i in levels), extra)
    return lookahead.merge(Topology.branches(candidates, ngram - 1))


def first_window(tokens: Tensor, length: Tensor, window: int, ngram: int) -> Tensor:
    """The window of the first step, ``[B, N-1, W]`` int64: tokens of each row's prompt, chosen by a fixed hash.

    The paper begins with random tokens. The choice matters in the first few steps only.
    """
    cell = torch.arange((ngram - 1) * window, device=tokens.device)
    place = torch.remainder(mix64(cell + 1), length[:, None])
    return tokens.gather(1, place).unflatten(1, (ngram - 1, window))


def last_ngrams(tokens: Tensor, length: Tensor, ngram: int, count: int) -> tuple[Tensor, Tensor]:
    """The last `count` n-grams (of `ngram` tokens) of every row, the latest first.

    Args:
        tokens: ``[B, L]`` int64, the rows.
        length: ``[B]`` int64, number of tokens in each row.

    Returns:
        the n-grams ``[B, N, count]`` int64, and ``[B, count]`` bool, false for n-grams that a short row does not have.
    """
    first = length[:, None] - ngram - torch.arange(count, device=tokens.device)  # [B, count]
    place = first[:, None] + torch.arange(ngram, device=tokens.device)[:, None]  # [B, N, count]
    ngrams = tokens.gather(1, place.clamp(min=0).flatten(1)).unflatten(1, (ngram, count))
    return ngrams, first >= 0


@lru_cache
def advance_for(window: int, ngram: int, keep_output: bool) -> Callable[..., None]:
    """The function that updates the state after a step.

    Each window and n-gram length has its own function, because compilation unrolls the loops.
    """

    def advance(
        block: Tensor, pool: Tensor, nodes: Tensor, chosen: Tensor, logits: Tensor, tokens: Tensor, length: Tensor,
        emitted: Tensor,
    ) -> None:  # fmt: skip
        """Stores the window's n-grams in the pool, moves the window by one round, and looks up candidates for the new last token.

        The window moves by one round however many tokens were accepted. `block` and `pool` are changed in place. The shapes are in
        :class:`LookaheadState` and :class:`Step`.
        """
        size = window * (ngram - 1)
        per_key = (block.shape[1] + 1 - size) // (ngram - 1)
        last = slice(size - window, size)
        # Logits processors on the host choose tokens for accepted nodes only. Other nodes get their likeliest token.
        level = torch.where(chosen[:, last] >= 0, chosen[:, last], logits[:, last].argmax(-1))  # [B, W]
        columns = torch.cat([nodes[:, :size].unflatten(1, (ngram - 1, window)), level[:, None]], 1)  # [B, N, W]
        # Column 0 counts as the most recent n-gram, because it follows the text itself and not predicted tokens.
        new, valid = columns, torch.ones_like(level, dtype=torch.bool)
        if keep_output:
            # A step with this strategy's draft alone writes at most N tokens. With merged drafts it may write more, and only the last
            # N n-grams are stored.
            written, whole = last_ngrams(tokens, length, ngram, ngram)
            whole = whole & (torch.arange(ngram, device=tokens.device) < emitted[:, None])
            new, valid = torch.cat([written, new], 2), torch.cat([whole, valid], 1)
        remembered = remember(pool, new, valid, per_key)
        candidates = recall(remembered, tokens.gather(1, length[:, None] - 1), per_key)
        pool.copy_(remembered)
        block.copy_(torch.cat([columns[:, 1:].flatten(1)[:, 1:], candidates.flatten(1)], 1))

    return advance


#: The token in all places of an absent n-gram.
EMPTY = -1


def make_pool(new: Tensor, valid: Tensor, per_key: int, capacity: int) -> Tensor:
    """Returns a pool (:attr:`LookaheadState.pool`) of the n-grams `new`. Compares all pairs of n-grams, in O(M²) time and memory.

    Args:
        new: ``[B, n, M]`` int64, ``M`` n-grams of ``n`` tokens, the most recent first. An n-gram's first token is its key.
        valid: ``[B, M]`` bool, false for n-grams that are ignored.
        per_key: ``G``, greatest number of n-grams per key.
        capacity: ``C``, greatest number of n-grams per row.
    """
    first, rank = _first_of_each(new, valid)
    return _close_gaps(new, rank, first & (rank < per_key), capacity)


def remember(pool: Tensor, new: Tensor, valid: Tensor, per_key: int | Tensor) -> Tensor:
    """The pool with the n-grams `new` added at its front.

    An n-gram that is already in the pool moves to the front. If a key has more than `per_key` n-grams, or the pool has more than its
    capacity, the oldest are dropped.

    Args:
        pool: ``[B, n + 1, C]`` int64.
        new, valid, per_key: as in :func:`make_pool`.
    """
    ngrams, rank, capacity = pool[:, :-1], pool[:, -1], pool.shape[2]
    slot = torch.arange(capacity, device=pool.device)
    first, new_rank = _first_of_each(new, valid)
    double = _equal(new, ngrams) & first[:, :, None]  # [B, M, C]
    stood = torch.where(double, slot, capacity).amin(-1)  # [B, M]

    # A new n-gram raises the rank of each entry with the same key by one, unless the n-gram was already in front of the entry.
    # This is a loop over the new n-grams, because inductor's code for a sum over them takes four times as long on the CPU.
    key, stays = ngrams[:, 0], ngrams[:, 0] != EMPTY
    for m in range(new.shape[2]):
        one = slice(m, m + 1)
        overtaken = (new[:, 0, one] == key) & first[:, one] & (stood[:, one] > slot)
        rank = rank + overtaken.long()
        stays = stays & (stood[:, one] != slot)

    ranks = torch.cat([new_rank, rank], 1)
    alive = torch.cat([first, stays], 1) & (ranks < per_key)
    return _close_gaps(torch.cat([new, ngrams], 2), ranks, alive, capacity)


def recall(pool: Tensor, key: Tensor, count: int) -> Tensor:
    """The tokens that follow `key` in the pool's n-grams, the most recent n-gram first.

    Args:
        pool: ``[B, n + 1, C]`` int64.
        key: ``[B, 1]`` int64, the first token.
        count: number of n-grams to return.

    Returns:
        ``[B, count, n - 1]`` int64; ``-1`` if the pool has fewer n-grams with this key.
    """
    tails, capacity = pool[:, 1:-1], pool.shape[2]
    slot = torch.arange(capacity, device=key.device)
    wanted = torch.arange(count, device=key.device)
    hit = (pool[:, 0] == key)[:, None] & (pool[:, -1:] == wanted[:, None])  # [B, count, C]
    column = torch.where(hit, slot, capacity).amin(-1)[:, None]  # [B, 1, count]
    followers = tails.gather(2, column.clamp(max=capacity - 1).expand(-1, tails.shape[1], -1))
    return torch.where(column < capacity, followers, EMPTY).transpose(1, 2)


def _first_of_each(new: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the first occurrence of each n-gram in `new`.

    Returns:
        ``[B, M]`` bool, whether the n-gram is valid and equals no earlier n-gram; and ``[B, M]``, the n-gram's rank: the number of
        different earlier n-grams with the same key.
    """
    order = torch.arange(new.shape[2], device=new.device)
    earlier = (order[None, :] < order[:, None]) & valid[:, None, :]  # [B, M, M]: column earlier than row
    kept = valid & ~(_equal(new, new) & earlier).any(-1)
    same_key = new[:, 0, :, None] == new[:, 0, None, :]
    return kept, (same_key & earlier & kept[:, None, :]).sum(-1)


def _close_gaps(ngrams: Tensor, rank: Tensor, alive: Tensor, capacity: int) -> Tensor:
    """A pool ``[B, N + 1, C]`` of the entries for which `alive` is true, in unchanged order, at most the first ``C``."""
    target = alive.long().cumsum(1) - 1
    target = torch.where(alive & (target < capacity), target, capacity)  # dropped entries are written to an extra slot
    entries = torch.cat([ngrams, rank[:, None]], 1)
    closed = entries.new_full((*entries.shape[:2], capacity + 1), EMPTY)
    return closed.scatter(2, target[:, None].expand_as(entries), entries)[:, :, :capacity]


def _equal(left: Tensor, right: Tensor) -> Tensor:
    """Compares the n-grams `left` ``[B, n, M]`` with `right` ``[B, n, K]``. Returns ``[B, M, K]`` bool, true for equal n-grams.

    The loop goes token by token, because a reduction over the short inner dimension is slow on the CPU.
    """
    equal = left[:, 0, :, None] == right[:, 0, None, :]
    for token in range(1, left.shape[1]):
        equal = equal & (left[:, token, :, None] == right[:, token, None, :])
    return equal
