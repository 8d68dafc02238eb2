"""The seam with transformers: ``model.generate(strategy=…)``. The only file that touches transformers' generate."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .engine.engine import Engine
from .engine.locks import CallLock
from .engine.loop import Decoded, Request, decode
from .engine.target import refuse_unfit
from .errors import SettingsError, UnsupportedError
from .grammars import Grammars
from .hf.arguments import (
    HINTS,
    TRANSLATED,
    first_of,
    hints_of,
    loop_options,
    refuse_arguments,
    resolve_seed,
    said_in,
    shown,
)
from .hf.assistants import Assistants
from .hf.inputs import check_inputs, check_lengths, unpad
from .hf.peft import base_of, refuse_prompt_learning
from .hf.prepared import host_criteria, max_length, pad_token_of, plan_sampling, stop_tokens_of
from .hf.streaming import StreamAligner
from .plugins import registry
from .report import Report
from .resolve import resolve_strategy, resolve_verifier, strategy_name, with_hints
from .settings import RuntimeSettings, load_settings
from .strategy import Strategy
from .verifier import Verifier

#: Keywords of ``generate`` that are ours.
OWN = ("strategy", "strategy_config", "decoders_config", "grammar", "verifier", "seed", "generator")
#: Those that may stand in a generation config, which takes what JSON can hold.
_CONFIGURABLE: dict[str, tuple[type, ...]] = {
    "strategy": (str,),
    "strategy_config": (Mapping,),
    "grammar": (str, Mapping),
}
_POSITIONAL = [p for p in inspect.signature(GenerationMixin.generate).parameters if p not in ("self", "kwargs")]


@dataclass
class DecodersOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's :class:`~decoders.report.Report`."""

    report: Report | None = None


class Generate:
    """What ``enable`` puts in the place of ``model.generate``; with no strategy named it is transformers' own.

    It refers to the model, not to a bound method, so that ``copy.deepcopy(model)`` copies it along with the model. wrapper: the
    ``PeftModel`` around it whose ``generate`` this is, if there is one.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, previous: Any, wrapper: Any = None
    ) -> None:
        self.model, self.tokenizer, self.previous, self.wrapper = model, tokenizer, previous, wrapper
        self._engine: Engine | None = None
        self._lock = CallLock()
        self._assistants = Assistants()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_engine", "_lock")}  # they stay with this copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _engine=None, _lock=CallLock())

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(GenerationMixin.generate)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """``generate`` as it was before ``enable``."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return self._transformers_generate(*args, **kwargs)

    def _transformers_generate(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.wrapper if self.wrapper is not None else self.model
        # Looked up late: a bound method would survive deepcopy on the old model.
        return type(model).generate(model, *args, **kwargs)

    def engine(
        self, attention: Literal["auto", "sdpa", "flex"] = "auto", weights: Literal["keep", "packed"] = "keep"
    ) -> Engine:
        """The engine for the model's present weights; built on first use and again after weights change."""
        # Two first calls from two threads share one. Calls hold the same lock: with two, a call made within a call (by a
        # streamer) and one in another thread would wait for each other.
        with self._lock:
            if self._engine is not None and not self._engine.refresh(self.model, attention):
                self._drop()
            if self._engine is None:
                self._engine = Engine(self.model, attention, self._lock)
            self._engine.settle_originals(self.model, weights)
            return self._engine

    def release(self) -> None:
        """See :func:`release`."""
        with self._lock:
            self._drop()
            self._assistants.release()

    def _drop(self) -> None:
        if self._engine is not None:
            self._engine.release(self.model)
            self._engine = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"generate() takes {len(_POSITIONAL)} positional arguments, {len(args)} were given")
        positional = dict(zip(_POSITIONAL, args, strict=False))
        if twice := positional.keys() & kwargs.keys():
            raise TypeError(f"generate() got two values for {', '.join(sorted(twice))}")
        kwargs = positional | kwargs
        own = {name: kwargs.pop(name) for name in OWN if name in kwargs}
        for name in ("strategy_config", "decoders_config"):
            _check_mapping(name, own.get(name))
        given = kwargs.get("generation_config")
        if not isinstance(given, (GenerationConfig, type(None))):
            raise SettingsError(f"generation_config must be a GenerationConfig, not {shown(given)}")
        configs = [c for c in (given, self.model.generation_config) if c is not None]
        configured = {name: first_of(configs, name) for name in _CONFIGURABLE}
        for name, kinds in _CONFIGURABLE.items():
            if not isinstance(configured[name], (*kinds, type(None))):
                wanted = " or ".join(f"a {kind.__name__.lower()}" for kind in kinds)
                raise SettingsError(f"{name} in the generation config is {configured[name]!r}: it takes {wanted}")
        in_configs = {name: said_in(configs, name) for name in (*HINTS, *TRANSLATED)}
        runtime = load_settings(
            RuntimeSettings,
            None,
            loop_options(kwargs)
            | dict(own.get("decoders_config") or {})
            | ({"strategy": own["strategy"]} if isinstance(own.get("strategy"), str) else {}),
            loop_options(in_configs) | ({"strategy": configured["strategy"]} if configured["strategy"] else {}),
            sections=registry().strategies(),
        )
        chosen = own.get("strategy") if own.get("strategy") is not None else runtime.strategy
        if chosen is None:
            misplaced = sorted(k for k, v in (configured | own).items() if v is not None)
            if misplaced:
                raise SettingsError(f"{', '.join(misplaced)} needs a strategy: pass strategy=… too")
            return self.plain(*args, **{k: v for k, v in kwargs.items() if k not in _POSITIONAL[: len(args)]})
        verifier = resolve_verifier(own.get("verifier") or runtime.verifier)
        # Settings in a config that names a strategy are that strategy's.
        theirs = configured["strategy"] is None or strategy_name(configured["strategy"]) == strategy_name(chosen)
        strategy = resolve_strategy(
            chosen,
            with_hints(chosen, own.get("strategy_config"), hints_of(kwargs)),
            with_hints(chosen, configured["strategy_config"] if theirs else None, hints_of(in_configs)),
        )
        kwargs = {name: value for name, value in kwargs.items() if name not in (*HINTS, *TRANSLATED)}
        if own.get("grammar") is None:
            own["grammar"] = configured["grammar"]
        return self._decode(strategy, verifier, runtime, own, configs, kwargs)

    def _decode(
        self, strategy: Strategy, verifier: Verifier, runtime: RuntimeSettings, own: dict,
        configs: list[GenerationConfig], kwargs: dict,
    ) -> Any:  # fmt: skip
        """Refuses what cannot be honoured, lets transformers prepare the inputs, and runs the loop."""
        refuse_unfit(self.model)
        refuse_prompt_learning(self.model, self.wrapper)
        refuse_arguments(configs, kwargs)
        kwargs.pop("custom_generate", None)
        input_ids = kwargs.get("input_ids")
        check_inputs(self.model, kwargs.get("inputs") if input_ids is None else input_ids, kwargs.get("attention_mask"))
        assistant = kwargs.pop("assistant_model", None)
        if assistant is None and strategy.needs_assistant:
            setting = (
                ", or draft_model in its settings" if "draft_model" in strategy.settings_class.model_fields else ""
            )
            raise UnsupportedError(f"strategy {strategy.name!r} needs assistant_model={setting}")
        if assistant is not None and not strategy.needs_assistant:
            raise UnsupportedError(
                f"strategy {strategy.name!r} uses no assistant_model; leave it out or choose another strategy"
            )
        if strategy.needs_grammar and own.get("grammar") is None:
            raise UnsupportedError(
                f"strategy {strategy.name!r} needs grammar=: a schema, a pattern, or the name of a grammar of the library"
            )
        tokenizer = kwargs.pop("tokenizer", None) or self.tokenizer
        assistant_tokenizer = kwargs.pop("assistant_tokenizer", None)
        kwargs = dict(kwargs)
        kwargs["stopping_criteria"] = self._criteria(configs, kwargs, tokenizer)
        streamer: BaseStreamer | None = kwargs.get("streamer")

        def run(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            given_on, input_ids = input_ids.device, input_ids.to(self.model.device)
            mask = model_kwargs.get("attention_mask")
            prompts = unpad(input_ids, mask if mask is None else mask.to(self.model.device))
            new_tokens = max_length(stopping_criteria, generation_config) - input_ids.shape[1]
            check_lengths(self.model, prompts, new_tokens)
            stop_tokens = stop_tokens_of(stopping_criteria)
            plan, values, processors = plan_sampling(
                logits_processor, input_ids.shape[1], generation_config, stop_tokens
            )
            if processors is not None and not verifier.coupled:
                raise UnsupportedError(
                    f"verifier={verifier.name!r} needs the distribution after every guess at once, and a logits processor of "
                    "this call reads the text before it: take verifier='coupled'"
                )
            aligner = (
                StreamAligner(streamer, len(prompts), pad_token_of(generation_config)) if streamer is not None else None
            )
            engine = self.engine(runtime.attention, runtime.weights)
            grammars = Grammars.of(
                own.get("grammar"), len(prompts), generation_config.num_return_sequences or 1, tokenizer,
                engine.target.vocab_size, stop_tokens, runtime,
            )  # fmt: skip
            plan = replace(plan, masked=grammars.any)
            request = Request(
                strategy=strategy, prompts=prompts, padded_prompt=input_ids, new_tokens=new_tokens,
                stop_tokens=stop_tokens, pad_token=pad_token_of(generation_config), plan=plan, values=values,
                seed=resolve_seed(own.get("seed"), own.get("generator"), generation_config.do_sample),
                processors=processors, verifier=verifier, grammars=grammars.rows, criteria=host_criteria(stopping_criteria),
                on_step=aligner.step if aligner is not None else None,
                keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
                keep_scores=plan.keep_scores,
                compile=runtime.compile, reuse=runtime.reuse, prefill_chunk=runtime.prefill_chunk, slots=runtime.slots,
                origin=registry().origin(type(strategy)),
                engine_of=self._assistants.opener(self.model, engine, tokenizer, assistant_tokenizer),
                context=dict(
                    model=self.model, tokenizer=tokenizer, assistant_model=assistant, strategy=resolve_strategy
                ),
            )  # fmt: skip
            try:
                decoded = decode(engine, request)
            except BaseException as error:
                if isinstance(getattr(error, "partial", None), Decoded):
                    error.partial = assemble(input_ids.to(given_on), error.partial, generation_config)  # type: ignore[attr-defined]
                raise
            decoded.report.grammars = grammars.judge(decoded.tokens)
            if aligner is not None:
                aligner.end()
            return assemble(input_ids.to(given_on), decoded, generation_config)

        if kwargs.get("generation_config") is not None:
            kwargs["generation_config"] = _without_own_work(kwargs["generation_config"])
        # transformers fills gaps from the model's config, which must stay as it is: a shallow copy has a cleaned one.
        stand_in = copy.copy(self.model)
        stand_in.generation_config = _without_own_work(self.model.generation_config)
        return type(stand_in).generate(stand_in, **kwargs, custom_generate=run)  # type: ignore[attr-defined]

    def _criteria(self, configs: list[GenerationConfig], kwargs: dict, tokenizer: Any) -> StoppingCriteriaList:
        """The user's criteria plus stop strings (transformers loses the tokenizer on the way to a custom loop)."""
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        kwargs.pop("cache_implementation", None)
        strings = kwargs.pop("stop_strings", None) or first_of(configs, "stop_strings")
        if strings:
            if tokenizer is None:
                raise UnsupportedError("stop_strings needs a tokenizer: pass tokenizer= to enable() or generate()")
            criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        return criteria


def assemble(input_ids: Tensor, decoded: Decoded, config: GenerationConfig) -> Tensor | DecodersOutput:
    """The result in transformers' form: ``[B, P + longest]`` with finished rows padded, or an output object."""
    rows, longest = len(decoded.tokens), max(map(len, decoded.tokens))
    new = torch.full((rows, longest), pad_token_of(config), dtype=input_ids.dtype)
    for row, tokens in enumerate(decoded.tokens):
        new[row, : len(tokens)] = torch.tensor(tokens, dtype=input_ids.dtype)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences

    def by_position(per_row: list[list[Tensor]]) -> tuple[Tensor, ...]:
        # A row that has ended has no scores any more; zeros stand in its place.
        blank = next((torch.zeros_like(t) for row in per_row for t in row), torch.empty(0))
        return tuple(torch.stack([row[t] if t < len(row) else blank for row in per_row]) for t in range(longest))

    output: Any = DecodersOutput  # transformers' annotations are narrower than what it fills in itself
    return output(
        sequences=sequences,
        scores=by_position(decoded.scores) if config.output_scores else None,
        logits=by_position(decoded.logits) if config.output_logits else None,
        report=decoded.report,
    )


def _without_own_work(config: GenerationConfig) -> GenerationConfig:
    """A copy without what the loop does itself: stop strings (their tokenizer would get lost), the static cache, drafting."""
    config = copy.deepcopy(config)
    for name in ("stop_strings", "cache_implementation", *HINTS, *TRANSLATED):
        setattr(config, name, None)
    return config


def _check_mapping(name: str, given: Any) -> None:
    """Raises SettingsError unless `given` is None or holds settings by name."""
    if given is None or (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        return
    wrong = (
        f"the key {next(k for k in given if not isinstance(k, str))!r}" if isinstance(given, Mapping) else shown(given)
    )
    raise SettingsError(f'{name} must be a dict of settings, {{"name": value}}, not {wrong}')


def enable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> PreTrainedModel:
    """Gives `model` a ``generate`` that takes ``strategy=…``; the model itself, its config and weights stay untouched.

    Calling it again only replaces the tokenizer. :func:`disable` takes it back.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        tokenizer: used by strategies, grammars and ``stop_strings``; may also be given per call.

    Returns:
        the same object.

    Raises:
        UnsupportedError: not a transformers model that generates.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel) or not isinstance(base, GenerationMixin):
        raise UnsupportedError(f"enable() takes a transformers model that can generate, not {type(model).__name__}")
    present = vars(model).get("generate")
    if isinstance(present, Generate):
        if tokenizer is not None:
            present.tokenizer = tokenizer
        return model
    vars(model)["generate"] = Generate(base, tokenizer, present, model if model is not base else None)
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`enable`; does nothing on a model that is not enabled. Frees what :func:`release` frees.

    Returns the same object.

    Raises:
        UnsupportedError: not a model of transformers.
    """
    if not isinstance(base_of(model), PreTrainedModel):
        raise UnsupportedError(f"disable() takes a transformers model, not {type(model).__name__}")
    present = vars(model).get("generate")
    if isinstance(present, Generate):
        present.release()
        if present.previous is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = present.previous
    return model


def release(model: PreTrainedModel) -> PreTrainedModel:
    """Frees all that is kept for an enabled model between calls, and gives freed weights back. It stays enabled.

    Freed are packed weights, caches and the texts in them, compiled code, recorded steps, and the same of the draft models
    that were used with it. The next call makes them anew. With the setting ``weights="packed"`` the model gets its dense
    weights back, the same objects, bit for bit. A call that runs in another thread is waited for.

    Args:
        model: a model of transformers. Nothing happens to one that is not enabled, or was not used.

    Returns:
        the same object.

    Raises:
        UnsupportedError: not a model of transformers.
    """
    if not isinstance(base_of(model), PreTrainedModel):
        raise UnsupportedError(f"release() takes a transformers model, not {type(model).__name__}")
    present = vars(model).get("generate")
    if isinstance(present, Generate):
        present.release()
    return model
