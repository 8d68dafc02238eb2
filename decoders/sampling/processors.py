"""Chooses a token: operations that equal transformers' logits processors turn logits into scores, and Gumbel noise draws a token.

A step verifies ``N`` nodes in each of ``B`` rows: the last committed token and draft tokens. A token is drawn after each node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..common.devices import has_64_bits
from ..common.host_reads import host_reads
from .prefixes import READ_TEXT, BiasedSequences, Prefixes
from .top import (
    MOST_OF_TOP_K,
    best_of,
    kth_of,
    kth_without_sort,
    top_k_top_p,
    top_p_without_sort,
    typical_p_without_sort,
)

# splitmix64 (Steele, Lea & Flood 2014) as signed 64-bit constants: torch has no unsigned multiplication.
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
#: ``GOLDEN * GOLDEN_INVERSE`` is 1 in 64 bits.
GOLDEN_INVERSE = 0xF1DE83E19937733D - (1 << 64)


@dataclass(frozen=True)
class SamplingPlan:
    """The logits processors that run inside the step, in order. A new plan needs a new compiled graph; new parameter values do not.

    Attributes:
        operations: names of :data:`OPERATIONS`; the parameter of operation ``i`` is entry ``i`` of :attr:`SamplingInputs.values`.
        sample: whether tokens are drawn with noise; otherwise the best token is taken.
        keep_scores: whether to return the processed scores.
        masked: whether a grammar masks tokens (:class:`Masks`) before any operation.
        reads_text: whether an operation depends on the text before a token, as penalties do.
    """

    operations: tuple[str, ...] = ()
    sample: bool = False
    keep_scores: bool = False
    masked: bool = False
    reads_text: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads_text", any(name in READ_TEXT for name in self.operations))


@dataclass(frozen=True)
class SamplingInputs:
    """The tensors that the operations of a plan and the noise depend on.

    Attributes:
        values: ``[max(1, len(operations))]`` float32, one parameter per operation, or ``[B, …]`` by row; the parameter of top_p is
            ``1 - top_p``, subtracted in double precision as in transformers.
        keys: ``[B]`` int64, the noise key of each row.
        stop_tokens: ``[E]`` int64, end-of-sequence ids, or ``[B, E]`` by row; -1 in unused entries.
        sequences: ``[K, M, S]`` int64, for each of K operations the :class:`~decoders.sampling.prefixes.BiasedSequences`, or
            ``[B, K, M, S]`` by row. `sequences`, `biases` and `padding` are None if no operation reads the text.
        biases: ``[K, M]`` float32, the biases of these sequences, or ``[B, K, M]`` by row.
        padding: ``[B, P]`` int64, see :class:`~decoders.sampling.prefixes.Prefixes`.
    """

    values: Tensor
    keys: Tensor
    stop_tokens: Tensor
    sequences: Tensor | None = None
    biases: Tensor | None = None
    padding: Tensor | None = None

    def of_rows(self, begin: int, end: int) -> SamplingInputs:
        """The inputs of the rows ``begin:end``."""
        rows = slice(begin, end)

        def of_rows(tensor: Tensor | None, shared: int) -> Any:
            """The part of `tensor` for `rows`. shared: number of dimensions of a tensor that all rows share."""
            return tensor if tensor is None or tensor.dim() == shared else tensor[rows]

        return replace(
            self, values=of_rows(self.values, 1), keys=self.keys[rows], stop_tokens=of_rows(self.stop_tokens, 1),
            sequences=of_rows(self.sequences, 3), biases=of_rows(self.biases, 2), padding=of_rows(self.padding, 0),
        )  # fmt: skip

    def value(self, operation: int) -> Tensor:
        """The parameter of the plan's operation with this index, ``[]`` or ``[B, 1, 1]``, to broadcast over scores ``[B, N, V]``."""
        return self.values[operation] if self.values.dim() == 1 else self.values[:, operation, None, None]

    def sequences_of(self, operation: int) -> BiasedSequences:
        """The sequences of the plan's operation with this index."""
        assert self.sequences is not None and self.biases is not None
        return BiasedSequences(self.sequences[..., operation, :, :], self.biases[..., operation, :])


@dataclass(frozen=True)
class Replacements:
    """Numbered mappings that replace drawn tokens by other tokens. Each node uses one mapping, whose number is the node's kind.

    Attributes:
        keys: ``[M]`` int64, ``kind * V + token`` of the drawn tokens, in ascending order.
        tokens: ``[M]`` int64, the replacement for each key.
        kinds: ``[B, N]`` int64, ``kind * V`` of each node; kind 0 replaces nothing.
    """

    keys: Tensor
    tokens: Tensor
    kinds: Tensor

    def of(self, tokens: Tensor) -> Tensor:
        """`tokens` ``[B, N]`` with replacements applied."""
        keys = self.kinds + tokens
        place = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[place] == keys, self.tokens[place], tokens)

    def moved(self, probabilities: Tensor) -> Tensor:
        """Turns the `probabilities` ``[B, N, V]`` of drawn tokens into the probabilities of the tokens after replacement."""
        drawn = self.keys % probabilities.shape[-1]
        here = self.kinds[..., None] == self.keys - drawn
        mass = torch.where(here, probabilities[..., drawn], 0.0)
        return probabilities.index_add(-1, drawn, -mass).index_add(-1, self.tokens, mass)


@dataclass(frozen=True)
class Masks:
    """Which tokens may follow each node of a block.

    Attributes:
        allowed: ``[B, N, V]`` bool; None allows all tokens. Bit masks of grammars are unpacked outside the step, because gcc 12
            miscompiles inductor's CPU code if it contains bit tests and 64-bit noise (torch 2.13).
        replacements: replacements of drawn tokens, or None.
    """

    allowed: Tensor | None
    replacements: Replacements | None = None

    def allow(self, logits: Tensor) -> Tensor:
        """`logits` ``[B, N, V]`` with ``-inf`` for forbidden tokens."""
        if self.allowed is None:
            return logits
        return logits.masked_fill(~self.allowed[..., : logits.shape[-1]], float("-inf"))

    def written(self, tokens: Tensor) -> Tensor:
        """`tokens` ``[B, N]`` with replacements applied, if there are any."""
        return tokens if self.replacements is None else self.replacements.of(tokens)

    def of_rows(self, begin: int, end: int) -> Masks:
        """The masks of the rows ``begin:end``."""
        allowed, replaced = self.allowed, self.replacements
        return Masks(
            None if allowed is None else allowed[begin:end],
            None if replaced is None else replace(replaced, kinds=replaced.kinds[begin:end]),
        )


def mix64(z: Tensor) -> Tensor:
    """splitmix64's finalizer on int64. It gives the same bits on every device."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def advanced(start: Tensor, steps: Tensor | int) -> Tensor:
    """Returns splitmix64's state after `steps` draws from the state `start`: ``start + steps * GOLDEN``.

    Computed as ``(start / GOLDEN + steps) * GOLDEN`` modulo 2^64: if `steps` is an ``arange``, inductor's Triton code would compute
    ``steps * GOLDEN`` in 32 bits. A sum that contains a value from memory, such as `start`, has 64 bits.
    """
    return (start * GOLDEN_INVERSE + steps) * GOLDEN


def row_keys(seed: int, rows: int, device: torch.device) -> Tensor:
    """The noise keys of a batch's rows for a seed, ``[B]`` int64."""
    index = torch.arange(1, rows + 1, dtype=torch.int64, device=device)
    return _keys(torch.full((rows,), seed, dtype=torch.int64, device=device), index)


def first_keys(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Returns, for every seed, the noise key that :func:`row_keys` gives to row 0, ``[B]`` int64."""
    return _keys(torch.tensor(seeds, dtype=torch.int64, device=device), 1)


def _keys(start: Tensor, index: Tensor | int) -> Tensor:
    return mix64(advanced(mix64(start), index))


def gumbel_noise(keys: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise ``[B, N, V]`` float32, a function of key, position and token id.

    It is ``-log E`` with ``E = -log(1 - u)`` for uniform ``u``, so that the upper tail, which decides unlikely draws, has a resolution
    of 32 bits.

    Args:
        keys: ``[B]`` int64.
        positions: ``[B, N]`` int64, number of tokens that the row has generated before the draw.
    """
    tokens = torch.arange(vocab, dtype=torch.int64, device=keys.device)
    return noise_of(keys, positions, tokens.expand(*positions.shape, vocab))


def noise_of(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The :func:`gumbel_noise` of `tokens` ``[B, N, K]`` int64, as ``[B, N, K]`` float32."""
    bits = mix64(advanced(noise_keys(keys, positions)[..., None], tokens + 1))
    u = (((bits >> 32) & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-24)))


def noise_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """The noise key of each position, ``[B, N]`` int64. The key and a token id determine the token's noise."""
    return mix64(advanced(keys[:, None], positions))


#: The least temperature that scores are divided by: scores up to 2^17 then stay finite (with infinite scores, transformers raises an
#: error). Already at this temperature, only the best token is likely.
LEAST_TEMPERATURE = 2.0**-111


def at_temperature(scores: Tensor, value: Tensor) -> Tensor:
    """float32 `scores` divided by a temperature, or by :data:`LEAST_TEMPERATURE` if that is larger."""
    return scores / value.clamp(min=LEAST_TEMPERATURE)


def _temperature(scores: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    return at_temperature(scores, value)


def _top_k(scores: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    return scores.masked_fill(scores < kth_of(best_of(scores), value), float("-inf"))


def _large_top_k(scores: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    return scores.masked_fill(scores < kth_of(scores.sort(-1, descending=True).values, value), float("-inf"))


def _top_p(scores: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    ordered, order = scores.sort(-1)
    drop = ordered.softmax(-1).cumsum(-1) <= value
    last = torch.arange(scores.shape[-1], device=scores.device) == scores.shape[-1] - 1
    drop = (drop & ~last).scatter(-1, order, drop & ~last)
    return scores.masked_fill(drop, float("-inf"))


def _min_p(scores: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    drop = probabilities < value * probabilities.amax(-1, keepdim=True)
    # The best token always stays. For min_p = 1, rounding could otherwise drop it.
    drop = drop.scatter(-1, scores.argmax(-1, keepdim=True), False)
    return scores.masked_fill(drop, float("-inf"))


def _typical_p(scores: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    logp = scores.log_softmax(-1)
    entropy = -(logp * logp.exp()).nansum(-1, keepdim=True)
    surprise, order = (-logp - entropy).abs().sort(-1)
    mass = scores.gather(-1, order).softmax(-1).cumsum(-1)
    last = (mass < value).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    drop = surprise > surprise.gather(-1, last)
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    drop = (drop & ~first).scatter(-1, order, drop & ~first)
    return scores.masked_fill(drop, float("-inf"))


def _min_new_tokens(scores: Tensor, value: Tensor, positions: Tensor, stop_tokens: Tensor) -> Tensor:
    tokens = torch.arange(scores.shape[-1], device=scores.device)
    is_stop = (tokens[:, None] == stop_tokens[..., None, :]).any(-1)
    if is_stop.dim() > 1:
        is_stop = is_stop[:, None]
    return scores.masked_fill(is_stop & (positions[..., None] < value), float("-inf"))


#: The operations inside the step, by name. Each equals a logits processor of transformers. Their arguments are scores ``[B, N, V]`` and
#: the parameter `value`, ``[]`` or ``[B, 1, 1]``; operations of :data:`FIRST` take more arguments.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **READ_TEXT,
    "min_new_tokens": _min_new_tokens,
    "temperature": _temperature,
    "top_k": _top_k,
    "large_top_k": _large_top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "typical_p": _typical_p,
}
#: Operations that transformers runs before temperature and truncation. They may forbid a token that a grammar requires.
FIRST = frozenset({*READ_TEXT, "min_new_tokens"})
#: Variants of operations for devices on which sorting a large vocabulary takes longer than reading it several times.
WITHOUT_SORT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "large_top_k": kth_without_sort,
    "top_p": top_p_without_sort,
    "typical_p": typical_p_without_sort,
}


def process(
    logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor, masks: Masks | None = None,
    prefixes: Prefixes | None = None,
) -> Tensor:  # fmt: skip
    """Runs the plan's operations on ``[B, N, V]`` float32 logits, and returns scores of the same shape.

    Without `prefixes`, operations that read the text are skipped.
    """
    legal = logits if masks is None else masks.allow(logits)
    scores, names = legal, plan.operations
    unsorted = scores.shape[-1] > MOST_OF_TOP_K and not host_reads(scores) and has_64_bits(scores.device)
    for i, name in enumerate(names):
        if unsorted and names[i : i + 2] == ("top_k", "top_p"):
            scores = top_k_top_p(scores, inputs.value(i), inputs.value(i + 1))
        elif unsorted and i and names[i - 1 : i + 1] == ("top_k", "top_p"):
            continue  # top_k_top_p has done both
        elif unsorted and name in WITHOUT_SORT:
            scores = WITHOUT_SORT[name](scores.float(), inputs.value(i))
        elif name not in FIRST:
            scores = OPERATIONS[name](scores, inputs.value(i))
        else:
            scores = first_of(scores, i, name, inputs, positions, prefixes)
    if masks is not None and not FIRST.isdisjoint(names):
        scores = grammar_first(scores.masked_fill(legal == float("-inf"), float("-inf")), legal)
    return scores


def first_of(
    scores: Tensor, operation: int, name: str, inputs: SamplingInputs, positions: Tensor, prefixes: Prefixes | None
) -> Tensor:
    """Returns the scores after the operation `name` of :data:`FIRST`. operation: the operation's index in the plan."""
    value = inputs.value(operation)
    if name not in READ_TEXT:
        return OPERATIONS[name](scores, value, positions=positions, stop_tokens=inputs.stop_tokens)
    if prefixes is None:
        return scores
    more = dict(positions=positions, prefixes=prefixes, sequences=inputs.sequences_of(operation))
    return READ_TEXT[name](scores.float(), value, **more)


def grammar_first(scores: Tensor, legal: Tensor) -> Tensor:
    """Returns `scores`, replaced by `legal` (the masked logits) at nodes where operations removed all tokens that a grammar allows."""
    return torch.where(scores.amax(-1, keepdim=True) > float("-inf"), scores, legal)


def choose(scores: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor) -> Tensor:
    """The token after each node, ``[B, N]`` int64: ``argmax(scores + noise)``; in greedy decoding the noise is 0.

    With Gumbel noise the argmax is an exact draw from ``softmax(scores)`` (Gumbel-max), and it does not depend on the draft.
    """
    if not plan.sample:
        return first_best(scores) if plan.masked else scores.argmax(-1)
    return first_best(scores + gumbel_noise(inputs.keys, positions, scores.shape[-1]))


def first_best(noisy: Tensor) -> Tensor:
    """``argmax`` over the last axis (of equal scores, the first), for scores with noise or masks.

    torch's ``argmax`` is not used, because inductor's CPU code for an argmax fused with integer arithmetic is wrong (torch 2.13).
    """
    index = torch.arange(noisy.shape[-1], device=noisy.device)
    best = torch.where(noisy == noisy.amax(-1, keepdim=True), index, noisy.shape[-1]).amin(-1)
    return best.clamp(max=noisy.shape[-1] - 1)  # NaN scores equal no maximum
