"""Operations that read the text before a token, for all nodes of a block at once: penalties, n-grams, sequences.

Each operation equals a processor of transformers, called once per node with the row's padding, text and the node's path as `input_ids`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.host_reads import host_reads

NEVER = float("-inf")
# Values for three kinds of positions without a token. The values differ, so that positions of different kinds never match.
_NONE, _BEFORE_TEXT, _BEFORE_PATH = -1, -2, -3


@dataclass(frozen=True)
class Prefixes:
    """The texts that end with the nodes of a block.

    Attributes:
        tokens: ``[B, L]`` int64, the rows' tokens, prompts included.
        length: ``[B]`` int64, number of committed tokens. Node 0 is the last committed token.
        prompt_length: ``[B]`` int64, number of prompt tokens.
        nodes: ``[B, N]`` int64, tokens of the nodes; -1 for no draft token.
        offsets: ``[B, N]`` int64, by how many positions each node follows node 0.
        visible: ``[B, N, N]`` bool; ``visible[b, q, k]``: node ``k`` is on the path to node ``q``, or is ``q``.
        padding: ``[B, P]`` int64, the rows' left padding in transformers' `input_ids`, aligned on the right; -1 for none.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    nodes: Tensor
    offsets: Tensor
    visible: Tensor
    padding: Tensor

    def text(self, begin: Tensor | int | None = None, end: Tensor | None = None) -> Tensor:
        """The padding and the committed tokens, ``[B, P + L]``; -1 for tokens before `begin` or from `end` on (``[B, 1]`` each).

        If `begin` is given, the padding is -1, too. If `end` is None, the text ends at the row's length.
        """
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        counts = index < (self.length[:, None] if end is None else end)
        padding = self.padding
        if begin is not None:
            counts, padding = counts & (index >= begin), torch.full_like(padding, _NONE)
        return torch.cat([padding, torch.where(counts, self.tokens, _NONE)], 1)

    @property
    def path(self) -> Tensor:
        """The draft tokens on the path to each node, ``[B, N, N]``, -1 elsewhere."""
        behind = torch.arange(self.nodes.shape[1], device=self.nodes.device) > 0
        return torch.where(self.visible & behind, self.nodes[:, None], _NONE)

    def seen(self, text: Tensor) -> Tensor:
        """The tokens of `text` ``[B, T]`` and of each node's path, ``[B, N, T + N]``."""
        return torch.cat([text[:, None].expand(-1, self.nodes.shape[1], -1), self.path], -1)

    def last(self, count: int) -> Tensor:
        """The last `count` tokens up to each node in reverse order, ``[B, N, count]``: the node's own token comes first."""
        back = torch.arange(count, device=self.nodes.device)
        place = self.offsets[..., None] - back  # relative to node 0
        on_path = self.visible[:, :, None] & (self.offsets[:, None, None] == place[..., None])  # [B, N, count, N]
        behind = torch.where(on_path, self.nodes[:, None, None], _NONE).amax(-1)
        text = self.text()
        slot = self.padding.shape[1] + self.length[:, None, None] - 1 + place
        slot = slot.clamp(min=-1, max=text.shape[1] - 1)
        committed = text.gather(1, slot.clamp(min=0).flatten(1)).view_as(slot).masked_fill(slot < 0, _NONE)
        tokens = torch.where(place > 0, behind, committed)
        return tokens.masked_fill(tokens < 0, _BEFORE_PATH)


#: For each operation its sequences of tokens, each with the bias of the sequence's last token.
OperationSequences = tuple[tuple[tuple[tuple[int, ...], float], ...], ...]


@dataclass(frozen=True)
class BiasedSequences:
    """Sequences of tokens. If a text ends with all tokens of a sequence except its last, the last token's score gets a bias.

    Attributes:
        tokens: ``[M, S]`` int64, or ``[B, M, S]`` by row; sorted by last token, aligned on the right, filled with -1.
        biases: ``[M]`` float32, or ``[B, M]``.
    """

    tokens: Tensor
    biases: Tensor


def _changed(
    scores: Tensor, tokens: Tensor, change: Callable[[Tensor, Tensor], Tensor], onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """A copy of `onto` (default: `scores`), ``[B, N, V]``, with new scores of the `tokens`; `onto` itself if K is 0. Allocates no other
    tensor of this size.

    Args:
        tokens: ``[B, N or 1, K]`` int64, duplicates allowed; -1 for none.
        change: takes the old scores ``[B, N, K]`` of `tokens` and their ids. Returns new scores; equal tokens must get equal scores.
    """
    onto = scores if onto is None else onto
    if not tokens.shape[-1]:
        return onto
    tokens = torch.where(tokens < scores.shape[-1], tokens, _NONE)
    one = tokens.amax(-1, keepdim=True)  # columns with -1 write the new score of this token again
    index = torch.where(tokens < 0, one, tokens).clamp(min=0).expand(*scores.shape[:2], -1)
    new = change(scores.gather(-1, index), index)
    return onto.scatter(-1, index, torch.where(one < 0, onto.gather(-1, index), new))


def _penalized(scores: Tensor, tokens: Tensor, penalty: Tensor) -> Tensor:
    return _changed(scores, tokens, lambda old, _: torch.where(old < 0, old * penalty, old / penalty))


def repetition_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    return _penalized(scores, prefixes.seen(prefixes.text(begin=0)), value)


def padded_repetition_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    """transformers' ``repetition_penalty`` without ``prompt_ignore_length``: padding counts as text."""
    return _penalized(scores, prefixes.seen(prefixes.text()), value)


def prompt_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    """transformers' ``encoder_repetition_penalty`` for a decoder-only model."""
    return _penalized(scores, prefixes.text(end=prefixes.prompt_length[:, None])[:, None], value)


def _by_count(scores: Tensor, prefixes: Prefixes, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`scores` with new scores for generated tokens. change: computes them from old scores and how often each token was generated."""
    text, path = prefixes.text(begin=prefixes.prompt_length[:, None]), prefixes.path
    inside = ((text >= 0) & (text < scores.shape[-1])).to(scores.dtype)
    counts = scores.new_zeros(len(scores), scores.shape[-1])
    counts = counts.scatter_add(1, text.clamp(0, scores.shape[-1] - 1), inside)

    def in_text(index: Tensor) -> Tensor:
        return counts.gather(1, index.flatten(1)).view_as(index)

    def on_path(index: Tensor) -> Tensor:
        return (index[..., None] == path[:, :, None]).sum(-1)

    written = _changed(scores, text[:, None], lambda old, index: change(old, in_text(index)))
    return _changed(scores, path, lambda old, index: change(old, in_text(index) + on_path(index)), written)


def frequency_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    return _by_count(scores, prefixes, lambda old, count: old - count * value)


def presence_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    return _by_count(scores, prefixes, lambda old, count: old - (count > 0) * value)


def no_repeat_ngram(
    scores: Tensor, value: Tensor, prefixes: Prefixes, sequences: BiasedSequences, **_: object
) -> Tensor:
    """Removes tokens that would repeat an n-gram of the text. value: n, at most the length ``S`` of the `sequences`."""
    size = sequences.tokens.shape[-1]
    last, text = prefixes.last(size), prefixes.text()
    back = torch.arange(size - 1, device=scores.device)
    beyond = (
        back >= value[..., None] - 1
    )  # [size - 1], or [B, 1, 1, size - 1]: tokens beyond the n-gram are not compared
    place = torch.arange(text.shape[1], device=scores.device)[:, None] - 1 - back
    before = torch.where(place >= 0, text[:, place.clamp(min=0)], _BEFORE_TEXT)  # [B, T, size - 1]
    wanted = last[:, :, None, :-1]
    in_text = (before[:, None] == wanted) | beyond
    on_path = (last[:, None, :, 1:] == wanted) | beyond
    repeats = torch.cat([in_text, on_path], 2).all(-1)
    tokens = prefixes.seen(text)
    repeats = repeats & (tokens >= 0) & (tokens < scores.shape[-1])
    banned = torch.where(repeats, NEVER, -NEVER).to(scores.dtype)
    return scores.scatter_reduce(-1, tokens.clamp(0, scores.shape[-1] - 1), banned, "amin")


def sequence_bias(
    scores: Tensor, value: Tensor, prefixes: Prefixes, sequences: BiasedSequences, here: Tensor | None = None, **_: object,
) -> Tensor:  # fmt: skip
    """transformers' ``sequence_bias``, and also ``bad_words_ids`` and ``suppress_tokens``, whose bias is ``-inf``.

    value: is not used. here: ``[B, N]`` bool, the nodes after which biases are added; None for all.
    """
    in_front, last = sequences.tokens[..., :-1].flip(-1), sequences.tokens[..., -1].contiguous()
    first = torch.searchsorted(last, last)  # the first sequence with the same last token
    in_front = in_front if in_front.dim() == 2 else in_front[:, None]
    last, first, biases = (own if own.dim() == 1 else own[:, None] for own in (last, first, sequences.biases))
    complete = ((in_front == prefixes.last(in_front.shape[-1])[:, :, None]) | (in_front < 0)).all(-1)  # [B, N, M]
    added = torch.where(complete if here is None else complete & here[..., None], biases, 0.0)
    sums = torch.zeros_like(added).scatter_add(-1, first.expand_as(added), added).gather(-1, first.expand_as(added))
    return _changed(scores, last.expand_as(added), lambda old, _: old + sums)


def suppress_at(scores: Tensor, value: Tensor, positions: Tensor, **more: object) -> Tensor:
    """Adds the biases of :func:`sequence_bias` at one position only, after `value` new tokens."""
    return sequence_bias(scores, value, here=positions == value.squeeze(-1), **more)  # type: ignore[arg-type]


def forced_tokens(
    scores: Tensor, value: Tensor, positions: Tensor, sequences: BiasedSequences, **_: object
) -> Tensor:  # fmt: skip
    """After `value` new tokens, allows only the last token of each of the `sequences`."""
    here = positions[..., None] == value
    if host_reads(scores) and not here.any():
        return scores
    vocab, tokens = scores.shape[-1], sequences.tokens[..., -1]
    tokens = torch.where(tokens < 0, vocab, tokens).clamp(max=vocab)
    only = scores.new_full((*tokens.shape[:-1], vocab + 1), NEVER).scatter(-1, tokens, 0.0)[..., :vocab]
    return torch.where(here, only if only.dim() == 1 else only[:, None], scores)


#: Operations that need :class:`Prefixes`.
READ_TEXT: dict[str, Callable[..., Tensor]] = {
    "repetition_penalty": repetition_penalty,
    "padded_repetition_penalty": padded_repetition_penalty,
    "prompt_penalty": prompt_penalty,
    "frequency_penalty": frequency_penalty,
    "presence_penalty": presence_penalty,
    "no_repeat_ngram": no_repeat_ngram,
    "sequence_bias": sequence_bias,
    "suppress_at": suppress_at,
    "forced_tokens": forced_tokens,
}
