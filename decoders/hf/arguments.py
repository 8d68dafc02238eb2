"""What a call of ``generate`` may be given beside a strategy: each argument works, is translated, or is refused here.

An argument that none of the tables names is unknown: a test walks those of the installed transformers.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..errors import SettingsError, UnsupportedError

#: Keywords of ``generate`` that are ours.
OWN = ("strategy", "strategy_config", "decoders_config", "grammar", "verifier", "verifier_config", "seed", "generator")

#: Arguments that the loop cannot honour: name → (test on the value, what to do instead).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda v: (v or 1) > 1, "beam search is not a strategy here; drop strategy= to use transformers' own"),
    "num_beam_groups": (lambda v: (v or 1) > 1, "beam search is not a strategy here; drop strategy="),
    "constraints": (lambda v: v is not None, "constrained beam search; take grammar=, or drop strategy="),
    "force_words_ids": (lambda v: v is not None, "constrained beam search; take grammar=, or drop strategy="),
    "penalty_alpha": (lambda v: (v or 0) > 0, "contrastive search re-ranks; drop strategy="),
    "dola_layers": (lambda v: v is not None, "DoLa changes the logits by layer; drop strategy="),
    "use_cache": (lambda v: v is False, "strategies need the key-value cache; leave use_cache out"),
    "use_mtp": (lambda v: bool(v), "transformers' own multi-token prediction; choose either"),
    "speculation_type": (lambda v: v is not None, "transformers' own speculation; strategy= says how to draft"),
    "assistant_lookbehind": (lambda v: v is not None, "target and draft must share a vocabulary; drop strategy="),
    "target_lookbehind": (lambda v: v is not None, "target and draft must share a vocabulary; drop strategy="),
    "assistant_ensemble_weight": (lambda v: v is not None, "mixing in the draft changes the text; drop strategy="),
    "guidance_scale": (lambda v: v not in (None, 1, 1.0), "classifier-free guidance runs the model twice; drop strategy="),
    "output_attentions": (lambda v: bool(v), "fused attention has no weights to return; drop strategy="),
    "output_hidden_states": (lambda v: bool(v), "run model(sequences, output_hidden_states=True) on the result"),
    "cache": (lambda v: v is not None, "the loop owns its static cache; pass the whole conversation as input_ids"),
    "past_key_values": (lambda v: v is not None, "the loop owns its static cache; pass the whole conversation as input_ids"),
    "inputs_embeds": (lambda v: v is not None, "tokens are verified by id; pass input_ids"),
    "cache_implementation": (
        lambda v: v not in (None, "static", "dynamic", "hybrid"), "the loop always uses its own static cache"),
    "cache_config": (lambda v: v is not None, "the loop always uses its own static cache"),
    "max_cache_len": (lambda v: v is not None, 'say decoders_config={"slots": …}'),
    "compile_config": (lambda v: v is not None, 'the loop compiles in its own way; see decoders_config={"compile": …}'),
    "continuous_batching_config": (lambda v: v is not None, "it belongs to generate_batch; leave it out"),
    "low_memory": (lambda v: bool(v), "it belongs to contrastive search; leave it out"),
    "custom_generate": (lambda v: v is not None, "choose either strategy= or custom_generate="),
    "synced_gpus": (lambda v: bool(v), "sharded models cannot be decoded in one loop"),
    "token_healing": (lambda v: bool(v), "it rewrites the prompt; heal it before the call"),
    "adapter_names": (
        lambda v: v is not None,
        "one adapter serves all rows here: model.set_adapter(name) and a call for each adapter, or drop strategy="),
    "position_ids": (lambda v: v is not None, "positions are those of the tokens; drop strategy="),
    "negative_prompt_ids": (lambda v: v is not None, "classifier-free guidance is not supported; drop strategy="),
    "negative_prompt_attention_mask": (
        lambda v: v is not None, "classifier-free guidance is not supported; drop strategy="),
}  # fmt: skip

#: transformers' hints how to draft. A strategy says which of its settings they stand for (``Strategy.hints``).
HINTS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)

#: What transformers up to 5.17 put into every generation config: there it says nothing.
UNSAID = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}

#: Arguments that are settings of the loop: name → (setting, its value).
TRANSLATED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "disable_compile": ("compile", lambda v: not v and "auto"),
    "prefill_chunk_size": ("prefill_chunk", lambda v: v),
}

#: Arguments that mean what they mean in transformers, be it nothing without beams or an encoder.
HONOURED = frozenset({
    "inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "assistant_model", "streamer", "tokenizer", "assistant_tokenizer", "trust_remote_code",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample", "temperature",
    "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "watermarking_config",
    "num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id",
    "eos_token_id", "early_stopping", "length_penalty", "diversity_penalty", "decoder_start_token_id", "is_assistant",
    "transformers_version",
})  # fmt: skip

_WHOLE_NUMBERS = (
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_return_sequences", "num_beams", "top_k",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_assistant_tokens", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "prefill_chunk_size",
)  # fmt: skip


def refuse_arguments(configs: list[GenerationConfig], kwargs: Mapping[str, Any]) -> None:
    """Raises, before anything is touched, for arguments that cannot be honoured exactly.

    Raises:
        UnsupportedError: an argument of :data:`REFUSED`, or one of the model's forward pass that the loop does not pass on.
        SettingsError: a value of the wrong kind.
    """

    def given(name: str) -> Any:
        return kwargs[name] if kwargs.get(name) is not None else said_in(configs, name)

    for name, (refused, advice) in REFUSED.items():
        value = given(name)
        if refused(value):
            where = "" if kwargs.get(name) is not None else of_config(name)
            raise UnsupportedError(f"{name}={shown(value)} does not go with strategy=: {advice}.{where}")
    known = HONOURED | REFUSED.keys() | TRANSLATED.keys() | set(HINTS) | vars(GenerationConfig()).keys()
    for name, value in kwargs.items():
        if name not in known and value is not None:
            near = difflib.get_close_matches(name, [*known, *OWN], n=1, cutoff=0.8)
            meant = f"Did you mean {near[0]}=?" if near else "If it is an argument of generate, look for a misspelling."
            raise UnsupportedError(
                f"{name}={shown(value)} does not go with strategy=: the loop gives the model tokens, positions and a mask, and "
                f"nothing else. {meant}"
            )
    for name in _WHOLE_NUMBERS:
        value = given(name)
        if value is not None and not _is_whole(value):
            raise SettingsError(f"{name} must be a whole number, not {shown(value)}")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = given(name)
        if value is not None and not _are_ids(value, several=name == "eos_token_id"):
            wanted = "a token id or a flat list of them" if name == "eos_token_id" else "a token id"
            raise SettingsError(f"{name} must be {wanted}, not {shown(value)}")


def of_config(name: str) -> str:
    """What an error adds about a value that the call does not name."""
    return (
        f" It comes from a generation config, which transformers fills from the checkpoint's files: set {name} to None there "
        f"(model.generation_config.{name} = None)."
    )


def loop_options(source: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the loop that `source`, the arguments of a call or of a generation config, asks for in transformers' words."""
    options = {}
    for name, (setting, value) in TRANSLATED.items():
        if source.get(name) is not None:
            options[setting] = value(source[name])
    return options


def hints_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """The drafting hints that `source` gives."""
    hints = {name: source[name] for name in HINTS if source.get(name) is not None}
    if hints.get("num_assistant_tokens_schedule") == "heuristic_transient":  # what a row has learned ends with the call
        hints["num_assistant_tokens_schedule"] = "heuristic"
    return hints


def shown(value: Any) -> str:
    """`value` for a message: tensors by their shape."""
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"a tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _is_whole(value: Any) -> bool:
    if isinstance(value, (bool, Tensor)):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _are_ids(value: Any, several: bool) -> bool:
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
        return whole and value.dim() <= several and value.numel() > 0
    if isinstance(value, (list, tuple)):
        return several and all(map(_is_whole, value))
    return _is_whole(value)


def resolve_seed(seed: int | None, generator: torch.Generator | None, sample: bool) -> int:
    """The seed of the sampling noise: given, or drawn from `generator`, or from torch's global generator."""
    if seed is not None and generator is not None:
        raise SettingsError("give seed= or generator=, not both")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise SettingsError(f"generator must be a torch.Generator, not {shown(generator)}")
    if seed is not None:
        if not _is_whole(seed):
            raise SettingsError(f"seed must be a whole number, not {shown(seed)}")
        if not -(2**63) <= seed < 2**63:
            raise SettingsError(f"seed {seed} does not fit 64 bits")
        return int(seed)
    if not sample:
        return 0
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(0, 2**63 - 1, (), generator=generator, device=device))


def said_in(configs: list[GenerationConfig], name: str) -> Any:
    """As :func:`first_of`; None for a value that older versions of transformers fill in themselves."""
    value = first_of(configs, name)
    return None if value == UNSAID.get(name, object()) else value


def first_of(configs: list[GenerationConfig], name: str) -> Any:
    """The first value that one of `configs` gives to `name`; transformers fills gaps in the same order."""
    return next((v for c in configs if (v := getattr(c, name, None)) is not None), None)
