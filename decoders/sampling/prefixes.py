"""Operations that read the text in front of a token, for all nodes of a block at once: penalties, n-grams, sequences.

Each equals a processor of transformers that is called with the path of every node as its prefix. Beside the scores ``[B, N, V]`` they
read a node's path, the row's text and its padding, as transformers shows these to its processors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.devices import host_reads

NEVER = float("-inf")
# Three kinds of places without a token, no two of which are equal.
_NONE, _BEFORE_TEXT, _BEFORE_PATH = -1, -2, -3


@dataclass(frozen=True)
class Prefixes:
    """The texts that the nodes of a block end.

    Attributes:
        tokens: ``[B, L]`` int64, the rows' tokens, prompts included.
        length: ``[B]`` int64, how many of them are committed. Node 0 is the last of these.
        prompt_length: ``[B]`` int64.
        nodes: ``[B, N]`` int64, -1 for no draft token.
        offsets: ``[B, N]`` int64, position of each node relative to node 0's.
        visible: ``[B, N, N]`` bool, ``visible[b, q, k]``: node ``k`` is on the path to node ``q``, or is ``q``.
        padding: ``[B, P]`` int64, what transformers shows in front of a row's tokens, aligned on the right; -1 for none.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    nodes: Tensor
    offsets: Tensor
    visible: Tensor
    padding: Tensor

    def text(self, begin: Tensor | int | None = None, end: Tensor | None = None) -> Tensor:
        """``[B, P + L]``: padding and committed tokens, -1 for others.

        Args:
            begin: the first place of a row's tokens that counts, ``[B, 1]``; None counts the padding, too.
            end: that behind the last one; None is the row's length.
        """
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        counts = index < (self.length[:, None] if end is None else end)
        padding = self.padding
        if begin is not None:
            counts, padding = counts & (index >= begin), torch.full_like(padding, _NONE)
        return torch.cat([padding, torch.where(counts, self.tokens, _NONE)], 1)

    @property
    def path(self) -> Tensor:
        """``[B, N, N]``: the tokens behind the committed text on the path to each node, -1 elsewhere."""
        behind = torch.arange(self.nodes.shape[1], device=self.nodes.device) > 0
        return torch.where(self.visible & behind, self.nodes[:, None], _NONE)

    def seen(self, text: Tensor) -> Tensor:
        """``[B, N, T + N]``: the tokens of a `text` ``[B, T]`` and of each node's path."""
        return torch.cat([text[:, None].expand(-1, self.nodes.shape[1], -1), self.path], -1)

    def last(self, count: int) -> Tensor:
        """``[B, N, count]``: the last tokens up to each node, that of the node first."""
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


#: Per operation, sequences of tokens, each with the bias of its last one.
OperationSequences = tuple[tuple[tuple[tuple[int, ...], float], ...], ...]


@dataclass(frozen=True)
class BiasedSequences:
    """Sequences of tokens whose last one gets a bias where the others stand in front of it.

    Attributes:
        tokens: ``[M, S]`` int64, or ``[B, M, S]``, by row. A sequence is aligned on the right, with -1 in front of it. They are in the
            order of their last tokens; all are -1 if there are none.
        biases: ``[M]`` float32, or ``[B, M]``.
    """

    tokens: Tensor
    biases: Tensor


def _changed(
    scores: Tensor, tokens: Tensor, change: Callable[[Tensor, Tensor], Tensor], onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """`onto`, or `scores`, with changed scores of a few tokens, ``[B, N, V]``: the rest is copied, and nothing else is that large.

    Args:
        tokens: ``[B, N or 1, K]`` int64, some of them more than once; -1 for none.
        change: of the old scores ``[B, N, K]`` of these tokens, and their ids, alike for equal tokens.
    """
    onto = scores if onto is None else onto
    tokens = torch.where(tokens < scores.shape[-1], tokens, _NONE)
    one = tokens.amax(-1, keepdim=True)  # takes the place of those that are none
    index = torch.where(tokens < 0, one, tokens).clamp(min=0).expand(*scores.shape[:2], -1)
    new = change(scores.gather(-1, index), index)
    return onto.scatter(-1, index, torch.where(one < 0, onto.gather(-1, index), new))


def _penalized(scores: Tensor, tokens: Tensor, penalty: Tensor) -> Tensor:
    return _changed(scores, tokens, lambda old, _: torch.where(old < 0, old * penalty, old / penalty))


def repetition_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    return _penalized(scores, prefixes.seen(prefixes.text(begin=0)), value)


def padded_repetition_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    """Padding counts as text: a processor without ``prompt_ignore_length``."""
    return _penalized(scores, prefixes.seen(prefixes.text()), value)


def prompt_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    """``encoder_repetition_penalty``, of a model without an encoder."""
    return _penalized(scores, prefixes.text(end=prefixes.prompt_length[:, None])[:, None], value)


def _by_count(scores: Tensor, prefixes: Prefixes, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`scores` after a `change` by how often the new text up to each node has a token."""
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
    """Without the tokens that would repeat an n-gram; value: n, at most the ``S`` of `sequences`."""
    size = sequences.tokens.shape[-1]
    last, text = prefixes.last(size), prefixes.text()
    back = torch.arange(size - 1, device=scores.device)
    beyond = back >= value[..., None] - 1  # [size - 1], or [B, 1, 1, size - 1]: not compared
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
    scores: Tensor,
    value: Tensor,
    prefixes: Prefixes,
    sequences: BiasedSequences,
    here: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Also ``bad_words_ids`` and ``suppress_tokens``, whose bias is ``-inf``. The value is not used.

    Args:
        here: ``[B, N]`` bool, nodes behind which there is a bias; None for all.
    """
    in_front, last = sequences.tokens[..., :-1].flip(-1), sequences.tokens[..., -1].contiguous()
    first = torch.searchsorted(last, last)  # of those with the same last token
    in_front = in_front if in_front.dim() == 2 else in_front[:, None]
    last, first, biases = (own if own.dim() == 1 else own[:, None] for own in (last, first, sequences.biases))
    complete = ((in_front == prefixes.last(in_front.shape[-1])[:, :, None]) | (in_front < 0)).all(-1)  # [B, N, M]
    added = torch.where(complete if here is None else complete & here[..., None], biases, 0.0)
    sums = torch.zeros_like(added).scatter_add(-1, first.expand_as(added), added).gather(-1, first.expand_as(added))
    return _changed(scores, last.expand_as(added), lambda old, _: old + sums)


def suppress_at(scores: Tensor, value: Tensor, positions: Tensor, **more: object) -> Tensor:
    """:func:`sequence_bias` for one token: that behind `value` new ones."""
    return sequence_bias(scores, value, here=positions == value.squeeze(-1), **more)  # type: ignore[arg-type]


def forced_tokens(
    scores: Tensor, value: Tensor, positions: Tensor, sequences: BiasedSequences, **_: object
) -> Tensor:  # fmt: skip
    """Nothing but the last tokens of the `sequences` behind `value` new ones."""
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
