"""Checks the arguments and prompts of a call of ``generate`` with a strategy. The decoding loop honours each argument, translates it to
a setting, or refuses it.

An argument in none of the tables below is refused as unknown. A test compares the tables with the installed transformers.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.devices import refuse_meta
from ..engine.model.layout import context_length, embeddings_of
from ..errors import ContextLengthError, InputError, SettingsError, UnsupportedError, amount
from ..settings import RuntimeSettings
from ..strategy import HINTS


def _is_given(value: Any) -> bool:
    return value is not None


def _is_whole(value: Any) -> bool:
    if isinstance(value, (bool, Tensor)):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _are(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(fits, value))


#: Keywords of ``generate`` that this package adds.
OWN = (
    "strategy", "strategy_config", "decoders_config", "grammar", "thinking", "verifier", "verifier_config", "seed", "generator",
)  # fmt: skip

#: Arguments that the loop cannot honour: name → (test whether a value is refused, what to do instead).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda v: (v or 1) > 1, "beam search is not a strategy here; drop strategy= to use transformers' own"),
    "num_beam_groups": (lambda v: (v or 1) > 1, "beam search is not a strategy here; drop strategy= to use transformers' own"),
    "constraints": (_is_given, "it selects constrained beam search; use grammar=, or drop strategy="),
    "force_words_ids": (_is_given, "it selects constrained beam search; use grammar=, or drop strategy="),
    "penalty_alpha": (lambda v: (v or 0) > 0, "contrastive search re-ranks; drop strategy="),
    "dola_layers": (_is_given, "DoLa changes the logits by layer; drop strategy="),
    "use_cache": (lambda v: v is False, "strategies need the key-value cache; leave use_cache out"),
    "is_assistant": (bool, "transformers sets it while a model drafts in its own assisted generation; leave it out"),
    "use_mtp": (bool, "it selects transformers' own multi-token prediction; give either use_mtp= or strategy="),
    "speculation_type": (_is_given, "it selects transformers' own speculation; give either speculation_type= or strategy="),
    "assistant_lookbehind": (
        _is_given, "it belongs to transformers' own drafting with another tokenizer; leave it out, or drop strategy="),
    "target_lookbehind": (
        _is_given, "it belongs to transformers' own drafting with another tokenizer; leave it out, or drop strategy="),
    "assistant_ensemble_weight": (_is_given, "mixing in the draft changes the text; drop strategy="),
    "guidance_scale": (lambda v: v not in (None, 1, 1.0), "classifier-free guidance runs the model twice; drop strategy="),
    "output_attentions": (bool, "fused attention has no weights to return; drop strategy="),
    "output_hidden_states": (bool, "run model(sequences, output_hidden_states=True) on the result"),
    "cache_implementation": (
        lambda v: v not in (None, "static", "dynamic", "hybrid"), "the loop always uses its own static cache"),
    "cache_config": (_is_given, "the loop always uses its own static cache"),
    "max_cache_len": (_is_given, 'set decoders_config={"slots": …}'),
    "compile_config": (_is_given, 'the loop compiles in its own way; see decoders_config={"compile": …}'),
    "continuous_batching_config": (_is_given, "it belongs to generate_batch; leave it out"),
    "low_memory": (bool, "it belongs to contrastive search; leave it out"),
    "custom_generate": (_is_given, "choose either strategy= or custom_generate="),
    "synced_gpus": (bool, "the loop cannot run models sharded by FSDP or DeepSpeed ZeRO-3; drop strategy="),
    "token_healing": (bool, "it rewrites the prompt; heal it before the call"),
    "adapter_names": (
        _is_given, "one adapter serves all rows here: model.set_adapter(name) and a call for each adapter, or drop strategy="),
    "position_ids": (_is_given, "the loop counts positions itself; drop strategy="),
    "negative_prompt_ids": (_is_given, "classifier-free guidance is not supported; drop strategy="),
    "negative_prompt_attention_mask": (_is_given, "classifier-free guidance is not supported; drop strategy="),
}  # fmt: skip

#: Values that transformers up to 5.17 puts into every generation config, although the user did not choose them.
UNSAID = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}

#: Arguments that become settings of the loop: name → (setting, function that converts the argument's value to the setting's value).
TRANSLATED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "disable_compile": ("compile", lambda v: not v and "auto"),
    "prefill_chunk_size": ("prefill_chunk", lambda v: v),
}

#: Arguments that mean the same as in transformers; some have no effect without beams or an encoder.
HONOURED = frozenset({
    "inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "assistant_model", "streamer", "tokenizer", "assistant_tokenizer", "trust_remote_code",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample", "temperature",
    "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "watermarking_config",
    "num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id",
    "eos_token_id", "past_key_values", "cache", "inputs_embeds", "early_stopping", "length_penalty", "diversity_penalty",
    "decoder_start_token_id", "transformers_version",
})  # fmt: skip

#: All arguments of ``generate``; any other argument belongs to the model's forward pass.
PLAIN = HONOURED | REFUSED.keys() | TRANSLATED.keys() | set(HINTS) | vars(GenerationConfig()).keys()

#: Arguments of a model's forward pass that the loop ignores if they have no effect: name → test whether a value has no effect.
IDLE: dict[str, Callable[[Any], bool]] = {
    "token_type_ids": lambda v: isinstance(v, Tensor) and not v.any(),  # many tokenizers return zeros
    "logits_to_keep": lambda v: _is_whole(v) and v >= 0,
    "labels": lambda v: True,  # transformers removes labels, which its trainers pass on
}

_WHOLE_NUMBERS = (
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_return_sequences", "num_beams", "top_k",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_assistant_tokens", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "prefill_chunk_size",
)  # fmt: skip

#: Arguments whose wrong values would fail later, with an unclear error or silently: name → (test whether a value is right, the right
#: values).
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_return_sequences": (lambda v: v >= 1, "at least 1"),
    "stop_strings": (
        lambda v: isinstance(v, (str, list, tuple)) and all(isinstance(text, str) and text for text in v or [" "]) and v != "",
        "a text or a list of texts, none of them empty"),
    "streamer": (
        lambda v: not isinstance(v, type) and callable(getattr(v, "put", None)) and callable(getattr(v, "end", None)),
        "an object with put() and end(), such as TextStreamer(tokenizer)"),
    "logits_processor": (lambda v: _are(v, callable), "a list of LogitsProcessor objects"),
    "stopping_criteria": (lambda v: _are(v, callable), "a list of StoppingCriteria objects"),
    "assistant_tokenizer": (lambda v: isinstance(v, PreTrainedTokenizerBase), "a tokenizer of transformers"),
    "temperature": (_is_number, "a number above 0"),
    "top_p": (lambda v: _is_number(v) and v <= 1, "a number from 0 to 1"),  # transformers ignores values above 1
    "min_p": (_is_number, "a number from 0 to 1"),
    "typical_p": (_is_number, "a number from 0 to 1"),
    "repetition_penalty": (_is_number, "a number above 0"),
    "max_time": (_is_number, "a number of seconds"),
    "suppress_tokens": (lambda v: isinstance(v, Tensor) or _are(v, _is_whole), "a list of token ids"),
    "begin_suppress_tokens": (lambda v: isinstance(v, Tensor) or _are(v, _is_whole), "a list of token ids"),
}  # fmt: skip


def _meant(name: str, value: Any, known: frozenset[str]) -> str:
    """The end of an error about an unknown argument: a hint at what the caller may have meant."""
    if name in RuntimeSettings.model_fields:
        said = shown(value)
        return f'it is a setting: decoders_config={{"{name}": {said}}} for this call, decoders.enable(model, {name}={said}) for all'
    near = difflib.get_close_matches(name, [*known, *OWN], n=1, cutoff=0.8)
    meant = (
        f"Did you mean {near[0]}=?"
        if near
        else f'A setting of a strategy goes into strategy_config={{"{name}": {shown(value)}}}.'
    )
    return f"the loop gives the model tokens, positions and a mask, and nothing else. {meant}"


def refuse_misspelt(arguments: Iterable[str], function: Callable[..., Any]) -> None:
    """Raises UnsupportedError if one of `arguments` is unknown to `generate` and resembles a keyword of `function` itself."""
    for name in arguments:
        if name not in PLAIN and name not in OWN:
            own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
            if near := difflib.get_close_matches(name, own, n=1, cutoff=0.8):
                raise UnsupportedError(f"{function.__qualname__}() has no argument {name}=. Did you mean {near[0]}=?")


def refuse_arguments(
    configs: list[GenerationConfig], kwargs: Mapping[str, Any], takes: frozenset[str] = frozenset()
) -> None:
    """Raises an error for arguments that the loop cannot honour exactly, before anything is changed.

    Args:
        configs: generation configs; the first config that sets a value decides.
        kwargs: arguments of ``generate``.
        takes: names of the forward pass's arguments for other inputs than text, such as images.

    Raises:
        UnsupportedError: an argument of :data:`REFUSED` has a value that the loop cannot honour, or an argument is neither in
            :data:`PLAIN` nor in `takes`. SettingsError: a value is of the wrong kind. InputError: a tensor is on the meta device.
    """

    def given(name: str) -> Any:
        return kwargs[name] if kwargs.get(name) is not None else said_in(configs, name)

    for name, (refused, advice) in REFUSED.items():
        value = given(name)
        if refused(value):
            where = "" if kwargs.get(name) is not None else of_config(name)
            raise UnsupportedError(f"{name}={shown(value)} cannot be combined with a strategy: {advice}.{where}")
    known = PLAIN | takes
    for name, value in kwargs.items():
        refuse_meta(name, value)
        if name not in known and value is not None and not IDLE.get(name, lambda _: False)(value):
            raise UnsupportedError(
                f"{name}={shown(value)} cannot be combined with a strategy: {_meant(name, value, known)}"
            )
    for name in _WHOLE_NUMBERS:
        value = given(name)
        if value is not None and not _is_whole(value):
            raise SettingsError(f"{name} must be a whole number, not {shown(value)}")
    for name, (fits, wanted) in KINDS.items():
        value = given(name)
        if value is not None and not fits(value):
            raise SettingsError(f"{name} must be {wanted}, not {shown(value)}")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = given(name)
        if value is not None and not _are_ids(value, several=name == "eos_token_id"):
            wanted = "a token id or a flat list of them" if name == "eos_token_id" else "a token id"
            raise SettingsError(f"{name} must be {wanted}, not {shown(value)}")


def of_config(name: str) -> str:
    """The last sentence of an error about the value of `name` in a generation config: it says how to unset the value."""
    return (
        f" It comes from a generation config, which transformers fills from the checkpoint's files: set {name} to None there "
        f"(model.generation_config.{name} = None)."
    )


def loop_options(source: Mapping[str, Any]) -> dict[str, Any]:
    """Translates transformers' arguments in `source` (a call or a generation config) to settings of the loop."""
    options = {}
    for name, (setting, value) in TRANSLATED.items():
        if source.get(name) is not None:
            options[setting] = value(source[name])
    return options


def hints_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' drafting arguments (:data:`HINTS`) that `source` (a call or a generation config) sets, by name."""
    hints = {name: source[name] for name in HINTS if source.get(name) is not None}
    if hints.get("num_assistant_tokens_schedule") == "heuristic_transient":  # means the same in this loop
        hints["num_assistant_tokens_schedule"] = "heuristic"
    return hints


def shown(value: Any) -> str:
    """`value` as text for an error; tensors as their shape."""
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"a tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _are_ids(value: Any, several: bool) -> bool:
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
        return whole and value.dim() <= several and value.numel() > 0
    return _is_whole(value) or (several and _are(value, _is_whole))


def resolve_seed(seed: int | None, generator: torch.Generator | None, sample: bool) -> int:
    """Returns the seed of the sampling noise: `seed` if it is given. Without it, the seed is 0 in greedy decoding. In sampling it is a
    number drawn from `generator` (None: torch's global generator).
    """
    if seed is not None and generator is not None:
        raise SettingsError("give seed= or generator=, not both")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise SettingsError(f"generator must be a torch.Generator, not {shown(generator)}")
    if seed is not None:
        if not _is_whole(seed):
            raise SettingsError(f"seed must be a whole number, not {shown(seed)}")
        if not -(2**63) <= seed < 2**63:
            raise SettingsError(f"seed must be from -2**63 to 2**63 - 1, not {seed}")
        return int(seed)
    if not sample:
        return 0
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(0, 2**63 - 1, (), generator=generator, device=device))


def said_in(configs: list[GenerationConfig], name: str) -> Any:
    """Like :func:`first_of`, but returns None for a value in :data:`UNSAID`, because the user did not choose it."""
    value = first_of(configs, name)
    return None if value == UNSAID.get(name, object()) else value


def first_of(configs: list[GenerationConfig], name: str) -> Any:
    """The value of `name` in the first of `configs` that sets it, as in transformers; None if no config does."""
    return next((v for c in configs if (v := getattr(c, name, None)) is not None), None)


ID_TYPES = (torch.int64, torch.int32)


def check_inputs(model: PreTrainedModel, input_ids: Any, attention_mask: Any, cached: int = 0) -> None:
    """Raises an error for invalid prompts, before anything is changed.

    Args:
        input_ids: ``[B, P]``.
        attention_mask: ``[B, P]`` of zeros and ones.
        cached: number of tokens in the caller's cache, which the mask may cover, too.

    Raises:
        InputError: `input_ids` are not a tensor, have another shape or dtype, or contain an id outside the vocabulary; or the mask is
            invalid.
        ContextLengthError: `input_ids` have no rows or no tokens.
    """
    if input_ids is None:
        return
    if not isinstance(input_ids, Tensor):
        unpacked = ": write generate(**inputs)" if isinstance(input_ids, Mapping) else ""
        raise InputError(f"input_ids must be a tensor [rows, tokens], not {_kind(input_ids)}{unpacked}")
    if input_ids.dim() != 2:
        raise InputError(f"input_ids must be [rows, tokens], not {list(input_ids.shape)}")
    if input_ids.dtype not in ID_TYPES:
        raise InputError(f"input_ids must be {' or '.join(map(str, ID_TYPES))}, not {input_ids.dtype}")
    if not input_ids.numel():
        raise ContextLengthError(
            f"input_ids are empty, {list(input_ids.shape)}: give every row at least one token, such as the BOS token"
        )
    vocabulary = embeddings_of(model)
    low, high = (int(value) for value in torch.aminmax(input_ids))
    if low < 0 or high >= vocabulary:
        row, place = ((input_ids < 0) | (input_ids >= vocabulary)).nonzero()[0].tolist()
        raise InputError(
            f"token id {int(input_ids[row, place])} (row {row}, place {place}) is outside the model's vocabulary, "
            f"0 to {vocabulary - 1}: encode the text with this model's tokenizer"
        )
    if attention_mask is not None:
        _check_mask(attention_mask, input_ids, cached)


def _check_mask(mask: Any, input_ids: Tensor, cached: int) -> None:
    if not isinstance(mask, Tensor):
        raise InputError(f"attention_mask must be a tensor of zeros and ones, not {_kind(mask)}")
    rows, count = input_ids.shape
    if mask.shape not in ((rows, count), (rows, cached + count)):
        wanted = (
            f"the mask must be {[rows, count]}, or {[rows, cached + count]} with past_key_values"
            if cached
            else "shapes must be equal"
        )
        raise InputError(f"attention_mask is {list(mask.shape)} and input_ids are {[rows, count]}: {wanted}")
    wrong = (mask != 0) & (mask != 1)  # True for NaN
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise InputError(f"attention_mask must hold 0 and 1, not {mask[row, place].item()} (row {row}, place {place})")


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def unpad(input_ids: Tensor, attention_mask: Tensor | None, inferred_from: int | None = None) -> list[Tensor]:
    """The token ids of each row of `input_ids` ``[B, P]``, without left padding.

    Args:
        attention_mask: ``[B, P]`` of zeros and ones.
        inferred_from: the padding token from which transformers inferred the mask; None if the user gave the mask.

    Raises:
        UnsupportedError: the mask has holes or right padding.
    """
    if attention_mask is None:
        return list(input_ids)
    mask = attention_mask.bool()
    holes = mask[:, 1:] < mask[:, :-1]
    if holes.any() and inferred_from is not None:
        row, place = holes.nonzero()[0].tolist()
        raise UnsupportedError(
            f"input_ids hold pad_token_id {inferred_from} after other tokens (row {row}, place {place + 1}), and without an "
            "attention_mask transformers takes it for padding: pass attention_mask=torch.ones_like(input_ids) if it is text, else "
            "pad rows on the left (tokenizer.padding_side='left')"
        )
    if holes.any():
        raise UnsupportedError(
            "attention_mask has zeros after ones: rows must be padded on the left (tokenizer.padding_side='left')"
        )
    return [ids[keep] for ids, keep in zip(input_ids, mask, strict=True)]


def check_lengths(model: PreTrainedModel, prompts: list[Tensor], new_tokens: int) -> None:
    """Raises ContextLengthError if a prompt is empty, or if a prompt and `new_tokens` new tokens exceed the model's positions.

    The last new token needs no position, because the model never reads it.
    """
    longest, context = max(len(p) for p in prompts), context_length(model)
    if min(len(p) for p in prompts) == 0:
        raise ContextLengthError("a prompt is empty: give every row at least one token, such as the BOS token")
    if longest > context:
        raise ContextLengthError(
            f"a prompt has {longest} tokens, and the model's context is {context}: shorten it, or use a model with a longer context"
        )
    if longest + max(new_tokens - 1, 0) > context:
        raise ContextLengthError(
            f"{amount(longest, 'prompt token')} plus {new_tokens} new tokens exceed the model's context of {context}: "
            f"max_new_tokens can be {max(context + 1 - longest, 0)} at most"
        )


def check_pad_token(model: PreTrainedModel, pad_token: int) -> None:
    """Raises InputError if `pad_token` is outside the model's vocabulary, so that ended rows cannot be padded with it."""
    vocabulary = embeddings_of(model)
    if not 0 <= pad_token < vocabulary:
        raise InputError(
            f"pad_token_id {pad_token} is outside the model's vocabulary, 0 to {vocabulary - 1}, and rows that end before others "
            "are padded with it: choose one of the model's tokens, such as eos_token_id"
        )
