"""Enables, disables, releases, warms up and calibrates models.

The package ``hf`` contains the object that replaces ``model.generate``; only this module imports ``hf``. Schedulers get this object
from :func:`enabled`, and check and prepare their requests with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from .constraints import Backend, Vocabulary
from .costs import CostCurve
from .engine.decode.engine import MemoryKey
from .errors import SettingsError, UnsupportedError, keywords_named
from .hf.arguments import refuse_arguments, refuse_misspelt
from .hf.attached import GETSTATE, base_of, unwatch_unloading, watch_unloading
from .hf.operations import TokenPenalties
from .hf.options import NO_DEFAULTS, Defaults, Options, OwnDefaults
from .hf.prepared_call import DecodersOutput, PreparedCall
from .hf.ready import (
    Calibration,
    StrategyCost,
    Warmup,
    WarmupPart,
    calibrate_model,
    check_seconds,
    check_sizes,
    graphs_compiled,
    measured_curve,
    runtime_of,
    warm,
)
from .hf.tokenizers import check_tokenizer
from .hf.wrapper import GIVEN_TOKENS, Generate
from .strategy import Strategy

__all__ = [
    "Calibration", "DecodersOutput", "Generate", "OwnDefaults", "PreparedCall", "StrategyCost", "TokenPenalties", "Warmup",
    "WarmupPart", "calibrate", "check_arguments", "check_seconds", "compiles_grammars_with", "cost_curve", "disable", "enable",
    "enabled", "forget", "graphs_compiled", "memories", "refuse_misspelt", "release", "remember", "tokenizer_of", "warmup",
]  # fmt: skip


def enable(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *,
    strategy: str | type[Strategy] | Strategy | None = None, strategy_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> PreTrainedModel:  # fmt: skip
    """Replaces ``model.generate`` by a function that accepts ``strategy=…``. Returns `model`, whose config and weights do not change.

    A second call replaces the tokenizer if it passes a tokenizer, and all defaults if it passes any. :func:`disable` undoes both calls.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around such a model. The models that its
            ``merge_and_unload()`` and ``unload()`` return are also enabled.
        tokenizer: for strategies, grammars and ``stop_strings``. A call may pass another tokenizer.
        strategy: decodes calls without ``strategy=``, instead of transformers' own ``generate``.
        strategy_config: settings of `strategy`.
        settings: settings of the loop, as in ``decoders_config``, for example ``compile=False``. They override the environment and
            ``decoders.toml``; calls and generation configs override them.

    Raises:
        UnsupportedError: `model` is not a transformers model that can generate.
        SettingsError: `tokenizer` is not a tokenizer of transformers or has another vocabulary, or a default is invalid.
        UnknownNameError, PluginError: a default names a strategy or verifier that is unknown or cannot be used.
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
    """Releases an enabled ``PeftModel``, and returns a function that enables the unloaded model with the same defaults."""
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
    """Enables `model` and returns the object that replaces its ``generate``. Schedulers prepare requests with this object."""
    enable(model, tokenizer)
    present: Generate = vars(model)["generate"]
    return present


def tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was given to :func:`enable` with `model`. None without a tokenizer, or if the model is not enabled."""
    present = vars(model).get("generate")
    return present.tokenizer if isinstance(present, Generate) else None


def compiles_grammars_with(
    model: PreTrainedModel, stops: Sequence[int], config: Mapping[str, Any] | None = None
) -> tuple[Vocabulary, Backend, float]:
    """The vocabulary, the backend and the time limit (seconds) with which calls on an enabled `model` compile their grammars.

    Servers use these three values to compile grammars before calls need them. :func:`decoders.constraints.compiled` takes the values,
    and calls take the grammar that it returns as ``grammar=``.

    Args:
        stops: ids of the stop tokens of the calls.
        config: ``decoders_config`` of the calls.

    Raises:
        UnsupportedError: there is no tokenizer, its tokens' bytes are unknown, or `stops` is empty.
    """
    return enabled(model).compiles_with(stops, config)


def check_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Checks `arguments` of ``generate`` without running `model`. The arguments need not contain a prompt.

    Raises:
        SettingsError: a value has the wrong type, or there is no strategy.
        UnknownNameError: a name is unknown.
        UnsupportedError: the loop does not support an argument.
    """
    present = vars(model).get("generate")
    defaults = present.defaults if isinstance(present, Generate) else NO_DEFAULTS
    options = Options.read(arguments, base_of(model).generation_config, defaults)
    if options is None:
        raise SettingsError('there is no strategy: pass strategy="autoregressive", or the name of another strategy')
    refuse_arguments(options.configs, options.arguments)


@keywords_named
def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`enable`: calls :func:`release`, and restores the former ``generate``. Returns `model`.

    Does nothing if the model is not enabled. If you have set another ``generate`` on the model after ``enable``, your function stays.

    Raises:
        UnsupportedError: `model` is not a model of transformers.
    """
    present = _present(model, "disable")
    if present is not None:
        present.release()
        vars(model).pop(GETSTATE, None)
        unwatch_unloading(model)
        previous = present.previous
        if vars(model).get("generate") is present:  # otherwise the user has set another function
            del vars(model)["generate"]
            if previous is not None:
                vars(model)["generate"] = previous
    return model


@keywords_named
def release(model: PreTrainedModel) -> PreTrainedModel:
    """Frees everything that an enabled model keeps between calls. The model stays enabled. Returns `model`.

    Drops the quantized weights, KV caches with their texts, compiled code and CUDA graphs of the model and of its draft models. The
    next call creates them again. Waits until a running call of another thread has ended. Does nothing if the model is not enabled or
    was not used.

    Raises:
        UnsupportedError: `model` is not a model of transformers.
    """
    present = _present(model, "release")
    if present is not None:
        present.release()
    return model


@keywords_named
def forget(model: PreTrainedModel) -> PreTrainedModel:
    """Drops an enabled model's data from earlier calls and from :func:`remember`: memories of strategies, and texts. Returns `model`.

    Quantized weights and compiled code stay, so the next call is as fast as the first call after :func:`warmup`. The written tokens
    do not change. Draft models also forget. Waits until a running call of another thread has ended. Does nothing if the model is not
    enabled or was not used.

    Raises:
        UnsupportedError: `model` is not a model of transformers.
    """
    present = _present(model, "forget")
    if present is not None:
        present.forget()
    return model


@keywords_named
def memories(model: PreTrainedModel) -> dict[MemoryKey, Any]:
    """The objects that strategies keep between calls on `model`, such as the texts of ``suffix`` and the acceptance rates of ``auto``.

    They can be pickled. :func:`remember` gives them to a model in another process.

    Returns:
        (strategy class, strategy with its settings, name of the memory) → object. Empty for a model that is not enabled or was not
        used.

    Raises:
        UnsupportedError: `model` is not a model of transformers.
    """
    present = _present(model, "memories")
    return {} if present is None else present.memories()


@keywords_named
def remember(
    model: PreTrainedModel,
    memories: Mapping[MemoryKey, Any] | None = None,
    *,
    texts: Iterable[str | Sequence[int]] = (),
) -> PreTrainedModel:
    """Gives an enabled model texts to draft from, or :func:`memories` of a model with the same tokenizer. Returns `model`.

    The written tokens do not change. :func:`forget` drops texts and memories.

    Args:
        memories: the result of :func:`memories`; replaces entries with equal keys. Unpickling runs code, so load only your own files.
        texts: texts similar to the expected output (earlier outputs, code, answers), or their token ids. ``suffix`` drafts from them,
            alone and in ``auto``, in all calls. Earlier texts stay. Beyond 262,144 tokens, the texts that were least recently matched
            are dropped, with a warning.

    Raises:
        UnsupportedError: `model` is not a model of transformers, or not enabled.
        SettingsError: there is no tokenizer, or `texts` are invalid or have token ids that the model lacks.
    """
    present = _present(model, "remember")
    if present is None:
        raise UnsupportedError("remember() needs an enabled model: call decoders.enable(model) first")
    present.remember(dict(memories or {}))
    if dropped := present.remember_texts(texts):
        warnings.warn(
            f"remember() keeps at most {GIVEN_TOKENS:,} tokens of texts: dropped {dropped:,} tokens of the least recently used texts",
            stacklevel=2,
        )
    return model


def _present(model: PreTrainedModel, function: str) -> Generate | None:
    """The object that replaces ``generate`` of `model`. None if the model is not enabled. function: the caller's name, for the error.

    Raises:
        UnsupportedError: `model` is not a model of transformers.
    """
    if not isinstance(base_of(model), PreTrainedModel):
        raise UnsupportedError(f"{function}() takes a transformers model, not {type(model).__name__}")
    # GETSTATE is looked up and not "generate", because the user may have set another `generate`.
    return getattr(vars(model).get(GETSTATE), "__self__", None)


def warmup(
    model: PreTrainedModel, *, strategies: Sequence[str | Strategy] = ("autoregressive",), rows: Sequence[int] = (1,),
    assistant_model: PreTrainedModel | None = None, sampling: bool | dict[str, Any] = False,
    tokenizer: PreTrainedTokenizerBase | None = None, **options: Any,
) -> Warmup:  # fmt: skip
    """Enables `model` and prepares it for its first call: compiles its forward pass, and runs each of `strategies` briefly.

    Compiled code stays in this process, and in torch.compile's cache on disk for other processes. If compiling fails, a warning says
    why, and calls run uncompiled. The setting ``compile=False`` skips compiling.

    Args:
        strategies: as in ``generate(strategy=…)``.
        rows: batch sizes of later calls. All sizes above one share compiled graphs.
        assistant_model: for strategies with a draft model.
        sampling: True also prepares sampling, with the parameters of the generation config; a dict gives the sampling parameters.
        tokenizer: as in :func:`decoders.enable`.
        options: more arguments for ``generate``: ``decoders_config``, ``strategy_config``, ``grammar``.

    Returns:
        the seconds that the preparation took, and the number of graphs that it compiled.

    Raises:
        UnsupportedError: the model cannot be decoded, or a strategy needs an `assistant_model` and there is none.
        SettingsError: a strategy is unknown, or an entry of `rows` is below one.
    """
    if isinstance(strategies, str | Strategy) or not strategies:
        raise SettingsError(f'strategies must be a list of at least one strategy, such as ["auto"], not {strategies!r}')
    generate = enabled(model, tokenizer)
    _check_options(model, warmup, strategies, rows, options)
    return warm(generate, strategies, rows, assistant_model, sampling, options)


def calibrate(
    model: PreTrainedModel, *, rows: Sequence[int] = (1,), contexts: Sequence[int] = (64, 2048),
    assistant_model: PreTrainedModel | None = None, seconds: float = 10.0, tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Calibration:  # fmt: skip
    """Enables `model`, and measures how long steps and strategies take on this machine.

    Steps are measured with several numbers of draft tree nodes, rows and context tokens. ``strategy="auto"`` decides by these costs,
    and measures missing costs in its first call. The costs are stored on disk (setting ``cost_cache``). Each model class, model size,
    dtype, quantization, device, number of threads and version of torch has its own costs.

    Args:
        rows: batch sizes.
        contexts: numbers of tokens per row that attention reads.
        assistant_model: a draft model that is also measured.
        seconds: time limit for each model. Sizes that are left when the limit is reached are not measured.
        tokenizer: as in :func:`decoders.enable`.
        options: more arguments for ``generate``: ``decoders_config={"compile": True}`` measures compiled steps.

    Returns:
        the costs of `model`, of `assistant_model` and of the strategies.

    Raises:
        UnsupportedError: the model cannot be decoded.
        SettingsError: `rows`, `contexts` or `seconds` are out of range.
        DecodersError: the errors of :func:`check_arguments` for `options`.
    """
    generate = enabled(model, tokenizer)
    _check_options(model, calibrate, ["autoregressive"], rows, options)
    return calibrate_model(generate, rows, contexts, assistant_model, seconds, options)


def _check_options(
    model: PreTrainedModel, function: Callable[..., Any], strategies: Sequence[str | Strategy], rows: Any, options: dict[str, Any]
) -> None:  # fmt: skip
    """Checks the arguments `options` and `rows` of `function` (``warmup`` or ``calibrate``). Raises the errors of `function`."""
    check_sizes("rows", rows)
    if "strategy" in options:
        raise SettingsError(f"{function.__name__}() has no argument strategy=: warmup() takes strategies=[…]")
    refuse_misspelt(options, function)
    for strategy in strategies:
        check_arguments(model, options | {"strategy": strategy})


def cost_curve(
    model: PreTrainedModel, rows: Sequence[int], contexts: Sequence[int], seconds: float = 10.0, **options: Any
) -> CostCurve:
    """Enables `model`, measures the costs that its stored cost curve (seconds per step, by step size) lacks, and returns the curve.

    This takes only seconds: it measures fewer step sizes than :func:`calibrate`, and no strategies.

    Args:
        rows: batch sizes.
        contexts: numbers of tokens per row that attention reads.
        seconds: time limit. Sizes that are left when the limit is reached are not measured.
        options: arguments of ``generate``: ``decoders_config={"compile": True}`` measures compiled steps.

    Raises:
        UnsupportedError: the model cannot be decoded.
        SettingsError: a setting is wrong.
    """
    generate = enabled(model)
    return measured_curve(generate, runtime_of(generate, options), rows, contexts, seconds)
