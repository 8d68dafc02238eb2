"""Translates transformers' logits processors to operations inside the decoding step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as p

from ..engine.decode.criteria import Processors
from ..sampling.prefixes import OperationSequences
from ..sampling.processors import SamplingPlan
from ..sampling.top import MOST_OF_TOP_K

#: Score of a token that an operation rules out.
REMOVED = float("-inf")
#: Operations whose values depend on the length of the prompt or of the output.
AT_A_LENGTH = frozenset({"min_new_tokens", "suppress_at", "forced_tokens"})

#: The name of an operation, its value, and its token sequences, each with a bias.
Operation = tuple[str, float, tuple[tuple[tuple[int, ...], float], ...]]


class TokenPenalties(LogitsProcessor):
    """``frequency_penalty`` and ``presence_penalty``: ``score - count * frequency - (count > 0) * presence``.

    ``count`` is the number of times that the token occurs in the new text.

    Args:
        prompt: number of prompt tokens.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - counts * self.frequency - (counts > 0) * self.presence


@dataclass(frozen=True)
class PaddedPrompts:
    """The prompts of a call as transformers has prepared them.

    Attributes:
        ids: ``[B, P]`` int64.
        mask: attention mask over the ids, and over cached tokens or vectors before them; None: no padding.
        vocab: size of the model's vocabulary.
    """

    ids: Tensor
    mask: Tensor | None
    vocab: int

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def starts_at(self, places: Tensor) -> bool:
        """Whether each prompt's padding ends, and its text begins, at the prompt's entry in `places` ``[B]``."""
        if self.mask is None or self.mask.shape != self.ids.shape:
            return not places.any()
        return torch.equal((self.mask != 0).int().argmax(1), places.to(self.mask.device))

    def have(self, sequences: Iterable[tuple[Sequence[int], float]]) -> bool:
        """Whether all tokens of the `sequences` are in the model's vocabulary; otherwise transformers raises an error."""
        return all(0 <= token < self.vocab for tokens, _ in sequences for token in tokens)

    def equal(self, ids: Tensor) -> bool:
        """Whether the prompts are the rows of `ids`, each repeated as often as ``num_return_sequences`` says."""
        copies = max(len(self.ids) // max(len(ids), 1), 1)
        return torch.equal(ids.repeat_interleave(copies, 0), self.ids)


def plan_sampling(
    processors: LogitsProcessorList, prompts: PaddedPrompts, config: GenerationConfig, stop_tokens: tuple[int, ...]
) -> tuple[SamplingPlan, tuple[float, ...], OperationSequences, Processors | None]:
    """Translates transformers' processors to operations inside the step, or keeps all processors on the host.

    Recognises exact types only, because a subclass may do anything. If no operations express one of the processors (because of its
    `filter_value`, for example), all processors stay on the host, because their order matters.

    Returns:
        The plan, the values of its operations, their token sequences, and the processors that stay on the host (None if none do).
    """
    keep_scores, sample = bool(config.return_dict_in_generate and config.output_scores), bool(config.do_sample)
    each = [_operations(processor, prompts, stop_tokens) for processor in processors]
    if any(operations is None for operations in each):
        return SamplingPlan((), sample, keep_scores), (), (), cast(Processors, processors)
    operations = [operation for own in each for operation in own or ()]
    plan = SamplingPlan(tuple(name for name, _, _ in operations), sample, keep_scores)
    return plan, tuple(float(value) for _, value, _ in operations), tuple(own for _, _, own in operations), None


def _operations(x: Any, prompts: PaddedPrompts, stop_tokens: tuple[int, ...]) -> list[Operation] | None:
    """The operations that do the same as processor `x`; None if no operations do."""
    length = prompts.length
    forced: Callable[[Any, int], list[Operation] | None] = lambda tokens, place: (  # noqa: E731
        [("forced_tokens", place - length, own)] if prompts.have(own := _alone(tokens, 0.0)) else None
    )
    known: dict[type, Callable[[], list[Operation] | None]] = {
        p.TemperatureLogitsWarper: lambda: _value("temperature", x.temperature),
        # 1 << 31 is exact as a float, and larger than any vocabulary.
        p.TopKLogitsWarper: lambda: _value(
            "top_k" if x.top_k <= MOST_OF_TOP_K else "large_top_k", min(x.top_k, 1 << 31)
        ),
        p.TopPLogitsWarper: lambda: _value("top_p", 1 - x.top_p),
        p.MinPLogitsWarper: lambda: _value("min_p", x.min_p),
        p.TypicalLogitsWarper: lambda: _value("typical_p", x.mass),
        p.MinLengthLogitsProcessor: lambda: _minimum(x, x.min_length - length, stop_tokens),
        p.MinNewTokensLengthLogitsProcessor: lambda: (
            _minimum(x, x.min_new_tokens, stop_tokens) if x.prompt_length_to_skip == length else None
        ),
        p.RepetitionPenaltyLogitsProcessor: lambda: _repetition(x, prompts),
        p.EncoderRepetitionPenaltyLogitsProcessor: lambda: (
            _value("prompt_penalty", x.penalty) if prompts.equal(x.encoder_input_ids) else None
        ),
        p.NoRepeatNGramLogitsProcessor: lambda: _value("no_repeat_ngram", x.ngram_size),
        p.SequenceBiasLogitsProcessor: lambda: _biases(x.sequence_bias, prompts),
        p.NoBadWordsLogitsProcessor: lambda: _biases(x.sequence_bias, prompts),
        p.SuppressTokensLogitsProcessor: lambda: [("sequence_bias", 0.0, _alone(x.suppress_tokens, REMOVED))],
        p.SuppressTokensAtBeginLogitsProcessor: lambda: [
            ("suppress_at", x.begin_index - length, _alone(x.begin_suppress_tokens, REMOVED))
        ],
        p.ForcedBOSTokenLogitsProcessor: lambda: forced(x.bos_token_id, 1),
        p.ForcedEOSTokenLogitsProcessor: lambda: forced(x.eos_token_id, x.max_length - 1),
        TokenPenalties: lambda: (
            [("frequency_penalty", x.frequency, ()), ("presence_penalty", x.presence, ())] if x.prompt == length else None
        ),
    }  # fmt: skip
    plain = getattr(x, "min_tokens_to_keep", 1) == 1 and getattr(x, "filter_value", REMOVED) == REMOVED
    return known[type(x)]() if type(x) in known and plain else None


def _value(name: str, value: float) -> list[Operation]:
    return [(name, value, ())]


def _alone(tokens: Any, bias: float) -> tuple[tuple[tuple[int, ...], float], ...]:
    """For each of `tokens`, the sequence of this token alone, with `bias`."""
    listed: Sequence[int] = torch.as_tensor(tokens).flatten().tolist()
    return tuple(((token,), bias) for token in dict.fromkeys(listed))


def _minimum(x: Any, count: int, stop_tokens: tuple[int, ...]) -> list[Operation] | None:
    same = set(x.eos_token_id.flatten().tolist()) == set(stop_tokens)
    return _value("min_new_tokens", count) if same else None


def _repetition(x: Any, prompts: PaddedPrompts) -> list[Operation] | None:
    ignored = getattr(x, "prompt_ignore_length", None)
    if ignored is None:
        return _value("padded_repetition_penalty", x.penalty)
    if isinstance(ignored, int):
        ignored = torch.full((len(prompts.ids),), ignored)
    return _value("repetition_penalty", x.penalty) if prompts.starts_at(ignored) else None


def _biases(biases: Mapping[tuple[int, ...], float], prompts: PaddedPrompts) -> list[Operation] | None:
    """`biases` as operations; None if the model lacks a token (transformers raises an error then). Also None if more than two finite
    biases end with the same token, because the order of adding them would change the sum.
    """
    biases = {tokens: bias for tokens, bias in biases.items() if tokens}  # transformers skips empty sequences
    ends = Counter(tokens[-1] for tokens, bias in biases.items() if bias != REMOVED)
    if not prompts.have(biases.items()) or max(ends.values(), default=0) > 2:
        return None
    listed = tuple((tuple(map(int, tokens)), float(bias)) for tokens, bias in biases.items())
    return [("sequence_bias", 0.0, listed)]
