"""Compares the tokens of two calls in a test, with failure messages that show the reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..common.transformers_compat import CACHE, attention_of
from ..engine.model.modules_compat import hooks_of
from .models import VOCAB
from .toy_grammar import Matched, TokenAutomaton

#: Two float32 logits are a near-tie if their difference, relative to the largest logit, is at most this. Rounding may then decide.
NEAR_TIE = 1e-5
#: References are cached only for models with at most this many bytes of weights, because comparing weights also takes time.
MOST_BYTES = 4 * 2**20


def prompts(rows: int = 1, length: int = 24, vocab: int = VOCAB, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts: ``input_ids`` and ``attention_mask``, each ``[rows, length]``.

    Row ``r`` has ``max(length - 5·r, 3)`` tokens. The row ends with a copy of its first third, so that strategies find a repetition.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        own = max(length - 5 * row, 3)
        text = torch.randint(3, vocab, (own,), generator=generator)
        third = own // 3
        text[own - third :] = text[:third]
        ids[row, length - own :], mask[row, length - own :] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def decode(model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Any = None, **options: Any) -> Any:
    """Returns the output of ``model.generate``, greedy unless `options` say otherwise. strategy: None for transformers' own loop."""
    options = dict(do_sample=False, return_dict_in_generate=True) | options
    if strategy is not None:
        options["strategy"] = strategy
    generate = cast(Callable[..., Any], model.generate)  # to mypy, an attribute of a module is a tensor or a module
    return generate(**inputs, **options)


def reference(model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Any = None, **options: Any) -> Any:
    """The result of :func:`decode`, cached in the process for the same weights, inputs and options.

    Tests get the expected tokens from this function, decoded by transformers' own loop or by plain decoding. Results are not cached for
    models with hooks, for large models, and with options that may have state (processors, streamers).

    Returns:
        The output object, without its KV cache. All callers share it: do not write to it.
    """
    try:
        key = (_fingerprint(model), _frozen(inputs), _frozen(strategy), _frozen(options))
    except _NotComparable:
        return decode(model, inputs, strategy, **options)
    if key not in _references:
        output = decode(model, inputs, strategy, **options)
        setattr(output, CACHE, None)
        _references[key] = output
    return _references[key]


_references: dict[tuple, Any] = {}


class _NotComparable(Exception):
    """An argument or model cannot be compared between two calls."""


def _fingerprint(model: PreTrainedModel) -> tuple:
    """A value that is equal for two models only if they write the same texts. Raises _NotComparable if there is no such value."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if sum(w.numel() * w.element_size() for w in weights.values()) > MOST_BYTES:
        raise _NotComparable
    digest = hashlib.blake2b(digest_size=16)
    for module in model.modules():
        if any(hooks_of(module)) or "forward" in vars(module):
            raise _NotComparable
    for name, weight in weights.items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    settings = model.config.to_json_string(use_diff=False), model.generation_config.to_json_string(use_diff=False)
    attention = attention_of(model.config)
    return type(model), model.training, str(model.device), attention, settings, digest.digest()


def _frozen(value: Any) -> Any:
    """A hashable equivalent of `value`, for plain data, tensors and toy grammars. Raises _NotComparable for everything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.cpu().numpy().tobytes()
    if isinstance(value, Mapping):
        return "mapping", tuple(sorted((str(key), _frozen(entry)) for key, entry in value.items()))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, Matched):
        return Matched, _frozen(value.inner)
    if isinstance(value, TokenAutomaton):
        return TokenAutomaton, repr((value.following, value.accepting, value.vocabulary.stops))
    raise _NotComparable


def assert_same_tokens(
    model: PreTrainedModel, inputs: dict[str, Tensor], expected: Tensor, actual: Tensor, what: str
) -> None:
    """Raises AssertionError if two outputs differ. The message shows the first pair of different tokens, and the target's logits for
    both.

    Args:
        expected, actual: ``[B, P + new]`` sequences, prompts ``[B, P]`` included.
        what: description of the call, such as "greedy, batch 4".
    """
    prompt = inputs["input_ids"].shape[1]
    width = min(expected.shape[1], actual.shape[1])
    different = (expected[:, :width] != actual[:, :width]).nonzero().tolist()
    if not different:
        if expected.shape == actual.shape:
            return
        raise AssertionError(
            f"{what}: {actual.shape[1] - prompt} new tokens, not {expected.shape[1] - prompt}; the common part is equal"
        )
    row, at = min(different, key=lambda place: (place[1], place[0]))
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[row].bool()
    prefix = torch.cat([expected[row, :prompt][mask], expected[row, prompt:at]])
    right, wrong = int(expected[row, at]), int(actual[row, at])
    message = f"{what}: row {row}, new token {at - prompt} is {wrong}, not {right}"
    if at >= prompt and len(prefix):
        with torch.no_grad():
            logits = model(prefix[None].to(model.device), use_cache=False).logits[0, -1].float()
        gap = (logits[right] - logits[wrong]).item()
        near = abs(gap) <= NEAR_TIE * logits.abs().max().item()
        message += f"; plain logits there: {logits[right]:.6f} and {logits[wrong]:.6f}, {gap:.2g} apart"
        message += " (a near-tie: choose another seed)" if near else ""
    raise AssertionError(
        f"{message}\n  expected {expected[row, prompt : at + 5].tolist()}"
        f"\n  got      {actual[row, prompt : at + 5].tolist()}"
    )
