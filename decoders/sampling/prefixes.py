"""Operations that read the text in front of a token, for all nodes of a block at once: penalties, n-grams, sequences.

Each equals a processor of transformers that is called with the path of every node as its prefix. Beside the scores ``[B, N, V]`` they
read a node's path, the row's text and its padding, as transformers shows these to its processors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """``[B, N, N-1]``: the tokens behind the committed text on the path to each node, -1 elsewhere."""
        return torch.where(self.visible[:, :, 1:], self.nodes[:, None, 1:], _NONE)

    def seen(self, text: Tensor) -> Tensor:
        """``[B, N, T + N - 1]``: the tokens of a `text` ``[B, T]`` and of each node's path."""
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
        tokens: ``[M, S]`` int64, or ``[B, M, S]``, by row. A sequence is aligned on the right; -1 in front of it, and for none.
        biases: ``[M]`` float32, or ``[B, M]``.
    """

    tokens: Tensor
    biases: Tensor


def _penalized(scores: Tensor, tokens: Tensor, penalty: Tensor) -> Tensor:
    """`scores` ``[B, N, V]`` with those of `tokens` ``[B, N or 1, K]`` made smaller by a factor. Each counts once; -1 for none."""
    tokens = torch.where(tokens < scores.shape[-1], tokens, _NONE)
    one = tokens.amax(-1, keepdim=True)  # takes the place of those that are none
    index = torch.where(tokens < 0, one, tokens).clamp(min=0).expand(*scores.shape[:2], -1)
    old = scores.gather(-1, index)
    new = torch.where(old < 0, old * penalty, old / penalty)
    return scores.scatter(-1, index, torch.where(one < 0, old, new))


def repetition_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    return _penalized(scores, prefixes.seen(prefixes.text(begin=0)), value)


def padded_repetition_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    """Padding counts as text: a processor without ``prompt_ignore_length``."""
    return _penalized(scores, prefixes.seen(prefixes.text()), value)


def prompt_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    """``encoder_repetition_penalty``, of a model without an encoder."""
    return _penalized(scores, prefixes.text(end=prefixes.prompt_length[:, None])[:, None], value)


def _new_counts(scores: Tensor, prefixes: Prefixes) -> Tensor:
    """``[B, N, V]`` float32: how often the new text up to each node has each token."""
    rows, nodes, vocab = scores.shape
    text, path = prefixes.text(begin=prefixes.prompt_length[:, None]), prefixes.path
    counts = scores.new_zeros(rows, vocab).scatter_add(1, text.clamp(min=0), (text >= 0).to(scores.dtype))
    every = counts[:, None].repeat(1, nodes, 1)
    return every.scatter_add(-1, path.clamp(min=0), (path >= 0).to(scores.dtype))


def frequency_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    return scores - _new_counts(scores, prefixes) * value


def presence_penalty(scores: Tensor, value: Tensor, prefixes: Prefixes, **_: object) -> Tensor:
    return scores - (_new_counts(scores, prefixes) > 0) * value


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
    on_path = (last[:, None, 1:, 1:] == wanted) | beyond
    repeats = torch.cat([in_text, on_path], 2).all(-1)
    tokens = prefixes.seen(text)
    repeats = repeats & (tokens >= 0) & (tokens < scores.shape[-1])
    banned = torch.where(repeats, NEVER, -NEVER).to(scores.dtype)
    return scores.scatter_reduce(-1, tokens.clamp(0, scores.shape[-1] - 1), banned, "amin")


def sequence_bias(scores: Tensor, value: Tensor, prefixes: Prefixes, sequences: BiasedSequences, **_: object) -> Tensor:
    """Also ``bad_words_ids`` and ``suppress_tokens``, whose bias is ``-inf``. The value is not used."""
    in_front, last = sequences.tokens[..., :-1].flip(-1), sequences.tokens[..., -1]
    in_front = in_front if in_front.dim() == 2 else in_front[:, None]
    written = prefixes.last(in_front.shape[-1])[:, :, None]  # [B, N, 1, S - 1]
    complete = ((in_front == written) | (in_front < 0)).all(-1)  # [B, N, M]
    last, biases = (own if own.dim() == 1 else own[:, None] for own in (last, sequences.biases))
    added = torch.where(complete & (last < scores.shape[-1]), biases, 0.0)
    index = last.clamp(0, scores.shape[-1] - 1).expand_as(added)
    return scores + torch.zeros_like(scores).scatter_add(-1, index, added)


def suppress_at(scores: Tensor, value: Tensor, positions: Tensor, **more: object) -> Tensor:
    """:func:`sequence_bias` for one token: that behind `value` new ones."""
    biased = sequence_bias(scores, value, positions=positions, **more)  # type: ignore[arg-type]
    return torch.where(positions[..., None] == value, biased, scores)


def forced_tokens(
    scores: Tensor, value: Tensor, positions: Tensor, sequences: BiasedSequences, **_: object
) -> Tensor:  # fmt: skip
    """Nothing but the last tokens of the `sequences` behind `value` new ones."""
    vocab, tokens = scores.shape[-1], sequences.tokens[..., -1]
    tokens = torch.where(tokens < 0, vocab, tokens).clamp(max=vocab)
    only = scores.new_full((*tokens.shape[:-1], vocab + 1), NEVER).scatter(-1, tokens, 0.0)[..., :vocab]
    return torch.where(positions[..., None] == value, only if only.dim() == 1 else only[:, None], scores)


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
