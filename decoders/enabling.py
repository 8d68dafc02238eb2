"""Enabling, disabling, releasing, warming up and calibrating models. The replaced ``generate`` is in ``hf``.

An import contract checks that only this module imports ``hf``; schedulers get prepared calls from :func:`enabled`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from .engine.decode.engine import MemoryKey
from .errors import SettingsError, UnsupportedError
from .hf.arguments import refuse_arguments
from .hf.attached import GETSTATE, base_of, unwatch_unloading, watch_unloading
from .hf.operations import TokenPenalties
from .hf.options import NO_DEFAULTS, Defaults, Options, OwnDefaults
from .hf.prepared_call import DecodersOutput, PreparedCall
from .hf.ready import Calibration, StrategyCost, Warmup, WarmupPart, calibrate_model, warm
from .hf.tokenizers import check_tokenizer
from .hf.wrapper import GIVEN_TOKENS, Generate
from .strategy import Strategy

__all__ = [
    "Calibration", "DecodersOutput", "Generate", "OwnDefaults", "PreparedCall", "StrategyCost", "TokenPenalties", "Warmup",
    "WarmupPart", "calibrate", "check_arguments", "disable",
    "enable", "enabled", "forget", "memories", "release", "remember", "warmup",
]  # fmt: skip


def enable(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    strategy: str | type[Strategy] | Strategy | None = None,
    strategy_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Gives `model` a ``generate`` that takes ``strategy=…``; the model itself, its config and weights stay untouched.

    Calling it again replaces the tokenizer and the defaults, each if it is given anew. :func:`disable` takes it back.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one. What its ``merge_and_unload()`` and ``unload()``
            give back is enabled, too.
        tokenizer: used by strategies, grammars and ``stop_strings``; may also be given per call.
        strategy: of calls that name none, as in ``generate``: they are decoded by it in the place of transformers' own ``generate``.
        strategy_config: its settings.
        settings: of the loop, as in ``decoders_config``: ``compile=False``. A call and a generation config count before these defaults,
            the environment and the file behind them.

    Returns:
        the same object.

    Raises:
        UnsupportedError: not a transformers model that generates.
        SettingsError: a tokenizer of another vocabulary. Like UnknownNameError and PluginError also: a default that no call could use.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel) or not isinstance(base, GenerationMixin):
        raise UnsupportedError(f"enable() takes a transformers model that can generate, not {type(model).__name__}")
    check_tokenizer(base, tokenizer)
    defaults = Defaults(strategy, strategy_config, settings)
    if defaults != NO_DEFAULTS:
        defaults.check()
    present = vars(model).get("generate")
    if isinstance(present, Generate):
        if tokenizer is not None:
            present.tokenizer = tokenizer
        if defaults != NO_DEFAULTS:
            present.defaults = defaults
        return model
    generate = Generate(base, tokenizer, present, model if model is not base else None, defaults)
    vars(model).update({"generate": generate, GETSTATE: generate.state})
    if model is not base:
        watch_unloading(model, _ready_to_unload)
    return model


def _ready_to_unload(wrapper: PreTrainedModel) -> Callable[[Any], Any]:
    """Frees what is kept for an enabled ``PeftModel``, and returns the function that enables the model without it."""
    present = enabled(wrapper)
    present.release()
    kept = present.defaults
    return partial(
        enable,
        tokenizer=present.tokenizer,
        strategy=kept.strategy,
        strategy_config=kept.strategy_config,
        **kept.runtime,
    )


def enabled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Generate:
    """Enables `model` and returns its replacement of ``generate``, for schedulers, which decode calls themselves."""
    enable(model, tokenizer)
    present: Generate = vars(model)["generate"]
    return present


def check_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Raises errors in `arguments` of ``generate`` that later calls will share; the prompt may be missing.

    Args:
        model: an enabled one.

    Raises:
        SettingsError: a value of the wrong kind, or no strategy. UnknownNameError: an unknown name.
        UnsupportedError: an argument that the loop cannot honour.
    """
    present = vars(model).get("generate")
    defaults = present.defaults if isinstance(present, Generate) else NO_DEFAULTS
    options = Options.read(arguments, base_of(model).generation_config, defaults)
    if options is None:
        raise SettingsError('a strategy is needed: pass strategy="autoregressive", or another one')
    refuse_arguments(options.configs, options.arguments)


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`enable`; does nothing on a model that is not enabled. Frees what :func:`release` frees.

    Returns the same object.

    Raises:
        UnsupportedError: not a model of transformers.
    """
    present = _present(model, "disable")
    if present is not None:
        present.release()
        vars(model).pop(GETSTATE, None)
        unwatch_unloading(model)
        if present.previous is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = present.previous
    return model


def release(model: PreTrainedModel) -> PreTrainedModel:
    """Frees everything that is kept for an enabled model between calls. It stays enabled.

    This drops quantized copies of weights, caches with their texts, compiled code and recorded steps, also those of the draft models
    that were used with it. The next call creates them again. Waits for a running call of another thread.

    Args:
        model: a model of transformers. Nothing happens if it is not enabled or was not used.

    Returns:
        the same object.

    Raises:
        UnsupportedError: not a model of transformers.
    """
    present = _present(model, "release")
    if present is not None:
        present.release()
    return model


def forget(model: PreTrainedModel) -> PreTrainedModel:
    """Makes an enabled model forget its earlier calls: what strategies keep between calls, and the texts kept for prefix reuse.

    Quantized copies and compiled code stay, so the next call is as fast as the first after :func:`warmup`. The tokens are the same
    either way. The draft models that were used with it forget, too. Waits for a running call of another thread.

    Args:
        model: a model of transformers. Nothing happens if it is not enabled or was not used.

    Returns:
        the same object.

    Raises:
        UnsupportedError: not a model of transformers.
    """
    present = _present(model, "forget")
    if present is not None:
        present.forget()
    return model


def memories(model: PreTrainedModel) -> dict[MemoryKey, Any]:
    """A copy of what strategies keep between calls on an enabled model, which can be pickled: texts of ``suffix``, rates of ``auto`` …

    With :func:`remember` another process can start with it.

    Returns:
        by the strategy's class, the strategy with its settings, and the name of the memory. Empty for a model that is not enabled or
        was not used.

    Raises:
        UnsupportedError: not a model of transformers.
    """
    present = _present(model, "memories")
    return {} if present is None else present.memories()


def remember(
    model: PreTrainedModel,
    memories: Mapping[MemoryKey, Any] | None = None,
    *,
    texts: Iterable[str | Sequence[int]] = (),
) -> PreTrainedModel:
    """Gives an enabled model texts to draft from, or the result of :func:`memories` of one with the same tokenizer.

    The written tokens are the same either way. :func:`forget` drops both.

    Args:
        memories: replace what the same strategies keep there; others keep theirs. Reading a pickle runs code: load only memories of
            your own.
        texts: similar to those to be written (earlier outputs, code, answers), or their token ids, for ``suffix``, alone and in
            ``auto``. They are added to those given before, and used in all calls, whatever their settings. Beyond 262,144 tokens
            those least recently used for a draft are dropped, with a warning.

    Returns:
        the same object.

    Raises:
        UnsupportedError: not a model of transformers, or not enabled. SettingsError: texts that are none, with token ids that the model
            does not have, or without a tokenizer.
    """
    present = _present(model, "remember")
    if present is None:
        raise UnsupportedError("remember() needs an enabled model: call decoders.enable(model) first")
    present.remember(dict(memories or {}))
    if dropped := present.remember_texts(texts):
        warnings.warn(
            f"remember() keeps {GIVEN_TOKENS:,} tokens of texts: there was no room for {dropped:,}, the least recently used ones",
            stacklevel=2,
        )
    return model


def _present(model: PreTrainedModel, function: str) -> Generate | None:
    """The replacement of ``generate`` on `model`, or None; raises for other than transformers' models, naming `function`."""
    if not isinstance(base_of(model), PreTrainedModel):
        raise UnsupportedError(f"{function}() takes a transformers model, not {type(model).__name__}")
    present = vars(model).get("generate")
    return present if isinstance(present, Generate) else None


def warmup(
    model: PreTrainedModel,
    *,
    strategies: Sequence[str | Strategy] = ("autoregressive",),
    rows: Sequence[int] = (1,),
    assistant_model: PreTrainedModel | None = None,
    sampling: bool | dict[str, Any] = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Warmup:
    """Prepares `model` before its first call: compiles its forward pass, runs every strategy briefly.

    Compiled code stays in this process, and in torch.compile's cache on disk for others. If compiling fails, a warning says why, and
    calls run uncompiled. With the setting ``compile=False`` nothing is compiled and the rest is done.

    Args:
        model: enabled, or it will be.
        strategies: as in ``generate(strategy=…)``.
        rows: batch sizes that will be used; all above one share their graphs.
        assistant_model: for the strategies that draft with one.
        sampling: also prepare sampling: True for the model's own parameters, or ``temperature=…, top_k=…`` as a dict.
        tokenizer: as in :func:`decoders.enable`.
        options: more arguments for ``generate``: ``decoders_config``, ``strategy_config``, ``grammar``.

    Raises:
        UnsupportedError: the model cannot be decoded, or a strategy needs `assistant_model`. SettingsError: an unknown
            strategy, or `rows` below one.
    """
    return warm(enabled(model, tokenizer), strategies, rows, assistant_model, sampling, options)


def calibrate(
    model: PreTrainedModel,
    *,
    rows: Sequence[int] = (1,),
    contexts: Sequence[int] = (64, 2048),
    assistant_model: PreTrainedModel | None = None,
    seconds: float = 10.0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Calibration:
    """Measures what a decoding step of `model` costs on this machine: seconds by nodes, for every number of rows and context.

    ``strategy="auto"`` decides by these costs, and measures missing ones itself in its first call. They are stored on disk (setting
    ``cost_cache``) for the model's class and sizes, dtype, quantisation, device, threads and version of torch.

    Args:
        model: enabled, or it will be.
        rows: batch sizes.
        contexts: tokens per row that attention looks at.
        assistant_model: a draft model to measure as well.
        seconds: most to spend on each model; sizes for which there is no time are left out.
        tokenizer: as in :func:`decoders.enable`.
        options: more arguments for ``generate``: ``decoders_config={"compile": True}`` measures compiled steps.

    Raises:
        UnsupportedError: a model that cannot be decoded. SettingsError: `rows`, `contexts` or `seconds` out of range. Whatever
            :func:`check_arguments` raises for `options`.
    """
    generate = enabled(model, tokenizer)
    check_arguments(model, options | {"strategy": "autoregressive"})
    return calibrate_model(generate, rows, contexts, assistant_model, seconds, options)
