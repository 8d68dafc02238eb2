"""Finds the tokens that logits processors keep after each node (a draft token or the last committed token), and draws one of them.

If few tokens are kept, few scores are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.host_reads import host_reads
from .largest import first_largest, largest
from .prefixes import READ_TEXT, Prefixes
from .processors import (
    FIRST,
    GOLDEN,
    MIX_1,
    MIX_2,
    Masks,
    SamplingInputs,
    SamplingPlan,
    at_temperature,
    first_of,
    gumbel_noise,
    noise_keys,
    noise_of,
    process,
)
from .processors import choose as choose_of_all
from .selection import NEVER, Operations, Selection, by_reference, select

#: Up to this vocabulary size, the noise of every token is computed.
_FEW = 4096
#: Number of scores processed at once, chosen to fit the cache of a CPU core.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class Candidates:
    """The tokens that may follow every node, with their processed scores.

    Attributes:
        scores: ``[B, N, K]`` float32, ``-inf`` for removed tokens.
        tokens: ``[B, N, K]`` int64, without duplicates; -1 in unused columns; None for the whole vocabulary.
        vocab: ``V``, the size of the vocabulary.
        selection: the same tokens as ``[B * N, K]``, with marks on uncertain tokens: rounding decides whether the token is kept. None
            if all tokens are certain.
        reference: takes indices of rows of `selection`, and computes these rows without uncertain tokens, by the reference operations.
    """

    scores: Tensor
    tokens: Tensor | None
    vocab: int
    selection: Selection | None = None
    reference: Callable[[Tensor], Selection] | None = None

    @staticmethod
    def whole(scores: Tensor) -> Candidates:
        """The whole vocabulary as candidates. scores: ``[B, N, V]``."""
        return Candidates(scores, None, scores.shape[-1])

    def choose(self, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor) -> Tensor:
        """The token after each node, ``[B, N]`` int64, as :func:`~decoders.sampling.processors.choose` defines it."""
        if self.tokens is None:
            if not host_reads(self.scores):
                return choose_of_all(self.scores, plan, inputs, positions)
            return _draw(self.scores, inputs.keys, positions) if plan.sample else first_largest(self.scores)
        noisy = self._noisy(self.tokens, plan, inputs, positions)
        best = noisy.amax(-1, keepdim=True)
        tied = (noisy == best) & (self.tokens >= 0)
        token = torch.where(tied, self.tokens, self.vocab).amin(-1)
        if self.selection is not None:
            # Only the drawn token must be certain.
            doubtful = self.selection.open | (
                self.selection.unsure & (self.tokens == token[..., None]).flatten(0, 1)
            ).any(-1)
            if bool(doubtful.any()):
                return self._settled(doubtful).choose(plan, inputs, positions)
        return torch.where(best[..., 0] > NEVER, token, 0)

    def best(self, count: int, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens ``[B, N, C]`` in ``softmax(scores + noise)``, with log-probabilities; no noise if greedy."""
        settled = self.settled()
        if settled.tokens is None:
            noisy = settled.scores.float()
            if plan.sample:
                noisy = noisy + gumbel_noise(inputs.keys, positions, self.vocab)
            if not host_reads(noisy):
                top = noisy.log_softmax(-1).topk(count)
                return top.indices, top.values
            values, tokens = largest(noisy.reshape(-1, self.vocab), count)
            values, tokens = values.view(*noisy.shape[:2], count), tokens.view(*noisy.shape[:2], count)
            return tokens, values - values[..., :1] - _log_total(noisy, values[..., :1])
        noisy = settled._noisy(settled.tokens, plan, inputs, positions)
        # Removed tokens rank after kept tokens, and before unused columns.
        rank = noisy.clamp(min=torch.finfo(noisy.dtype).min).masked_fill(settled.tokens < 0, NEVER)
        column = rank.topk(count).indices
        return settled.tokens.gather(-1, column), noisy.log_softmax(-1).gather(-1, column)

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """The log-probabilities ``[B, N]`` float32 of `tokens` ``[B, N]``, which must be candidates."""
        settled = self.settled()
        scores = settled.scores
        if settled.tokens is None:
            own = scores.gather(-1, tokens[..., None])[..., 0].float()
        else:
            own = scores.masked_fill(settled.tokens != tokens[..., None], NEVER).amax(-1)
        scores = scores.float()
        best = scores.amax(-1, keepdim=True)
        return own - best[..., 0] - _log_total(scores, best)[..., 0]

    def dense(self) -> Tensor:
        """The scores of the whole vocabulary, ``[B, N, V]`` float32, ``-inf`` for removed tokens."""
        settled = self.settled()
        if settled.tokens is None:
            return settled.scores.float()
        scores = settled.scores
        best = scores.max(-1, keepdim=True)
        # Columns without a kept token write the best token's score again. So columns that write the same token write the same score.
        out = scores == NEVER
        tokens = torch.where(out, settled.tokens.gather(-1, best.indices), settled.tokens)
        dense = torch.full((*scores.shape[:2], self.vocab), NEVER)
        return dense.scatter_(-1, tokens.clamp(min=0), torch.where(out, best.values, scores))

    def settled(self) -> Candidates:
        """These candidates without uncertain tokens: `reference` recomputes all rows that have uncertain tokens."""
        if self.selection is None:
            return self
        doubtful = ~self.selection.settled
        return self._settled(doubtful) if bool(doubtful.any()) else replace(self, selection=None)

    def _settled(self, doubtful: Tensor) -> Candidates:
        assert self.selection is not None and self.reference is not None
        index = doubtful.nonzero()[:, 0]
        return _selected(
            self.selection.put(index, self.reference(index)), self.scores.shape[:2], self.vocab, self.reference
        )

    def _noisy(self, tokens: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor) -> Tensor:
        return self.scores + noise_of(inputs.keys, positions, tokens) if plan.sample else self.scores


def candidates(
    logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor, masks: Masks | None = None,
    at_least: int = 1, prefixes: Prefixes | None = None,
) -> Candidates:  # fmt: skip
    """The tokens that the plan's operations keep after every node. logits: ``[B, N, V]``, positions: ``[B, N]``.

    The scores equal the result of :func:`~decoders.sampling.processors.process`. On GPUs, and in traced or recorded code, this function
    calls ``process``.

    Args:
        at_least: least number of entries per node; if fewer tokens are kept, removed tokens fill the other entries.
        prefixes: the nodes' texts; without texts, operations that read them are skipped.
    """
    names = plan.operations
    first = next((i for i, name in enumerate(names) if name not in FIRST), len(names))
    if not host_reads(logits) or not FIRST.isdisjoint(names[first:]):
        return Candidates.whole(process(logits, plan, inputs, positions, masks, prefixes))
    legal = logits if masks is None else _allowed(logits, masks)
    scores = legal
    for i, name in enumerate(names[:first]):
        if name in READ_TEXT:
            scores = first_of(scores, i, name, inputs, positions, prefixes)
        elif bool((early := positions < inputs.values[..., i : i + 1]).any()):
            scores = _without_ends(scores, early, inputs.stop_tokens)
    if masks is not None and scores is not legal:
        scores = scores.masked_fill(legal == NEVER, NEVER)
        if bool((scores.amax(-1) == NEVER).any()):
            return Candidates.whole(process(logits, plan, inputs, positions, masks, prefixes))
    return _left(scores, names[first:], inputs.values[..., first : len(names)], at_least)


def _without_ends(scores: Tensor, early: Tensor, stop_tokens: Tensor) -> Tensor:
    """`scores`, with ``-inf`` for stop tokens at nodes where `early` ``[B, N]`` is True. stop_tokens: ``[E]`` or ``[B, E]``."""
    stops = stop_tokens.expand(len(scores), -1)
    real = (stops >= 0) & (stops < scores.shape[-1])
    row, node, column = (early[..., None] & real[:, None]).nonzero().unbind(1)
    scores = scores.clone()
    scores[row, node, stops[row, column]] = NEVER
    return scores


def _left(legal: Tensor, names: Sequence[str], values: Tensor, at_least: int) -> Candidates:
    """The tokens that the operations `names` keep, given the scores `legal` ``[B, N, V]``. values: ``[K]``, or ``[B, K]`` by row."""
    if all(name == "temperature" for name in names):
        for value in values.unbind(-1):
            legal = at_temperature(legal.float(), value.view(-1, 1, 1))
        return Candidates.whole(legal)
    if values.dim() > 1:
        return _by_row(legal, names, values, at_least)
    operations: Operations = list(zip(names, values, strict=True))
    rows = legal.reshape(-1, legal.shape[-1])

    def reference(index: Tensor) -> Selection:
        return by_reference(rows[index], operations, at_least)

    return _selected(select(rows, operations, at_least), legal.shape[:2], legal.shape[-1], reference)


def _by_row(legal: Tensor, names: Sequence[str], values: Tensor, at_least: int) -> Candidates:
    """The tokens that the operations keep, for values ``[B, K]`` that differ by row. Rows with equal values are processed together."""
    kinds, kind_of = values.unique(dim=0, return_inverse=True)
    if len(kinds) == 1:
        return _left(legal, names, kinds[0], at_least)
    rows_of = [(kind_of == kind).nonzero()[:, 0] for kind in range(len(kinds))]
    parts = [_left(legal[rows], names, own, at_least).settled() for rows, own in zip(rows_of, kinds, strict=True)]
    place, vocab = torch.cat(rows_of).argsort(), legal.shape[-1]
    if any(part.tokens is None for part in parts):
        return Candidates.whole(torch.cat([part.dense() for part in parts])[place])
    width = max(part.scores.shape[-1] for part in parts)

    def joined(name: str, fill: float) -> Tensor:
        tensors = (getattr(part, name) for part in parts)
        return torch.cat([F.pad(t, (0, width - t.shape[-1]), value=fill) for t in tensors])[place]

    return Candidates(joined("scores", NEVER), joined("tokens", -1), vocab)


def _log_total(scores: Tensor, best: Tensor) -> Tensor:
    """``logsumexp(scores) - best``, where `best` ``[..., 1]`` is the maximum. For large scores it is as precise as log-softmax."""
    return (scores - best).exp_().sum(-1, keepdim=True).log_()


def _selected(
    selection: Selection, shape: torch.Size, vocab: int, reference: Callable[[Tensor], Selection]
) -> Candidates:
    scores, tokens = selection.scores.view(*shape, -1), selection.tokens.view(*shape, -1)
    return Candidates(scores, tokens, vocab, selection, reference)


def _allowed(logits: Tensor, masks: Masks) -> Tensor:
    """Returns what :meth:`Masks.allow` returns, computed with arithmetic that the CPU vectorizes."""
    if masks.allowed is None:
        return logits
    bound = masks.allowed[..., : logits.shape[-1]].to(logits.dtype)
    return torch.minimum(bound.sub_(0.5).mul_(float("inf")), logits, out=bound)


def _draw(scores: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """``argmax(scores + noise)`` over the last axis of ``[B, N, V]``; of equal sums, the first. Computes the noise of few tokens only.

    The noise is ``-log E`` with ``E >= u``, where ``u`` is the upper half of the token's 64-bit hash divided by 2^32. Let `bound` be
    the best noisy score of a few likely tokens. A token with ``u > exp(score - bound)`` cannot win, so for most tokens only ``u`` is
    computed.
    """
    vocab = scores.shape[-1]
    if vocab <= _FEW:
        return first_largest(scores.float() + gumbel_noise(keys, positions, vocab))
    shape = positions.shape
    rows = scores.reshape(-1, vocab)
    likely, tokens = largest(rows, 64)
    noisy = likely.float() + noise_of(keys, positions, tokens.view(*shape, -1)).view_as(likely)
    bound, column = noisy.max(-1)
    start = noise_keys(keys, positions).flatten()  # [R]
    # The slack in `level` and `most` covers the omitted mixing round, the float32 comparison, and the rounding of scores plus noise.
    level = (bound - 1e-3 - 4e-7 * bound.abs()).clamp(min=-1e30)[:, None]
    candidates_found = [torch.stack([torch.arange(len(rows)), tokens.gather(1, column[:, None])[:, 0]], 1)]
    width = max(_CHUNK // len(rows), 1024)
    for begin in range(0, vocab, width):
        part = rows[:, begin : begin + width]
        most = torch.sub(part, level).exp_().mul_(2.0**32).add_(4096)
        survivors = (_upper_bits(start, begin, part.shape[1]) <= most).nonzero()
        survivors[:, 1] += begin
        candidates_found.append(survivors)
    row, token = torch.cat(candidates_found).unbind(1)
    flat_keys, flat_positions = keys[:, None].expand(shape).flatten(), positions.flatten()
    noise = noise_of(flat_keys[row], flat_positions[row][:, None], token[:, None, None])[:, 0, 0]
    noisy = rows[row, token].float() + noise
    best = noisy.new_full((len(rows),), NEVER).scatter_reduce(0, row, noisy, "amax")
    token = torch.where(noisy == best[row], token, vocab)
    first = token.new_full((len(rows),), vocab).scatter_reduce(0, row, token, "amin")
    return torch.where(best > NEVER, first, 0).view(shape)


def _upper_bits(start: Tensor, begin: int, count: int) -> Tensor:
    """The upper 32 bits of the hashes of `count` tokens from `begin` on, ``[R, count]`` float32.

    Computes :func:`~decoders.sampling.processors.mix64` without its last mixing round, in two buffers. start: ``[R]`` int64.
    """
    z = torch.arange(begin + 1, begin + count + 1).mul_(GOLDEN) + start[:, None]
    t = z >> 30
    z.bitwise_xor_(t.bitwise_and_(0x3FFFFFFFF)).mul_(MIX_1)
    torch.bitwise_right_shift(z, 27, out=t)
    z.bitwise_xor_(t.bitwise_and_(0x1FFFFFFFFF)).mul_(MIX_2)
    return z.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).float()
