"""The seam with transformers: ``model.generate(strategy=…)``. The only file that touches transformers' generate."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

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
from transformers.generation import GenerateDecoderOnlyOutput, logits_process, stopping_criteria
from transformers.generation.streamers import BaseStreamer

from .engine.engine import Engine
from .engine.loop import Decoded, Request, decode
from .engine.sampling import SamplingPlan
from .engine.target import context_length, refuse_unfit
from .errors import ContextLengthError, SettingsError, UnsupportedError
from .plugins import registry
from .report import Report
from .settings import RuntimeSettings, Settings, load_settings
from .strategies.merged import Merged, MergedSettings
from .strategy import Strategy
from .streaming import StreamAligner

#: Keywords of ``generate`` that are ours.
OWN = ("strategy", "strategy_config", "decoders_config", "grammar", "verifier", "seed", "generator")
_POSITIONAL = [p for p in inspect.signature(GenerationMixin.generate).parameters if p not in ("self", "kwargs")]


@dataclass
class DecodersOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's :class:`~decoders.report.Report`."""

    report: Report | None = None


class Generate:
    """What ``enable`` puts in the place of ``model.generate``; with no strategy named it is transformers' own.

    It refers to the model, not to a bound method, so that ``copy.deepcopy(model)`` copies it along with the model.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, previous: Any) -> None:
        self.model, self.tokenizer, self.previous = model, tokenizer, previous
        self._engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_engine": None}  # compiled graphs and locks stay with this copy

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(GenerationMixin.generate)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """``generate`` as it was before ``enable``."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return self._transformers_generate(*args, **kwargs)

    def _transformers_generate(self, *args: Any, **kwargs: Any) -> Any:
        model_class: Any = type(self.model)  # looked up late: a bound method would survive deepcopy on the old model
        return model_class.generate(self.model, *args, **kwargs)

    def engine(self, attention: Literal["auto", "sdpa", "flex"] = "auto") -> Engine:
        """The engine for the model's present weights; built on first use and again after weights change."""
        if self._engine is None or not self._engine.current(self.model, attention):
            self._engine = Engine(self.model, attention)
        return self._engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"generate() takes {len(_POSITIONAL)} positional arguments, {len(args)} were given")
        positional = dict(zip(_POSITIONAL, args, strict=False))
        if twice := positional.keys() & kwargs.keys():
            raise TypeError(f"generate() got two values for {', '.join(sorted(twice))}")
        kwargs = positional | kwargs
        own = {name: kwargs.pop(name) for name in OWN if name in kwargs}
        configs = [c for c in (kwargs.get("generation_config"), self.model.generation_config) if c is not None]
        configured = {name: _first(configs, name) for name in ("strategy", "strategy_config")}
        for name, kind in (("strategy", str), ("strategy_config", Mapping)):
            if not isinstance(configured[name], (kind, type(None))):
                raise SettingsError(
                    f"{name} in the generation config is {configured[name]!r}: it takes a {kind.__name__.lower()}"
                )
        runtime = load_settings(
            RuntimeSettings,
            None,
            dict(own.get("decoders_config") or {})
            | ({"strategy": own["strategy"]} if isinstance(own.get("strategy"), str) else {}),
            {"strategy": configured["strategy"]} if configured["strategy"] else {},
            sections=registry().strategies(),
        )
        chosen = own.get("strategy") if own.get("strategy") is not None else runtime.strategy
        if chosen is None:
            misplaced = sorted(k for k, v in (configured | own).items() if v is not None)
            if misplaced:
                raise SettingsError(f"{', '.join(misplaced)} needs a strategy: pass strategy=… too")
            return self.plain(*args, **{k: v for k, v in kwargs.items() if k not in _POSITIONAL[: len(args)]})
        if own.get("grammar") is not None:
            raise UnsupportedError(
                "grammar=: no grammar backend is installed in this version; validate the output instead"
            )
        verifier = own.get("verifier") or runtime.verifier
        if verifier != "coupled":
            raise UnsupportedError(f"verifier={verifier!r}: this version has one verifier, 'coupled'")
        # Settings in a config that names a strategy are that strategy's.
        theirs = configured["strategy"] is None or _canonical(configured["strategy"]) == _canonical(chosen)
        strategy = resolve_strategy(
            chosen, own.get("strategy_config"), configured["strategy_config"] if theirs else None
        )
        return self._decode(strategy, runtime, own, configs, kwargs)

    def _decode(
        self, strategy: Strategy, runtime: RuntimeSettings, own: dict, configs: list[GenerationConfig], kwargs: dict
    ) -> Any:
        """Refuses what cannot be honoured, lets transformers prepare the inputs, and runs the loop."""
        refuse_unfit(self.model)
        refuse_arguments(configs, kwargs)
        assistant = kwargs.pop("assistant_model", None)
        if assistant is None and strategy.needs_assistant:
            raise UnsupportedError(f"strategy {strategy.name!r} needs assistant_model=")
        if assistant is not None and not strategy.needs_assistant:
            raise UnsupportedError(
                f"strategy {strategy.name!r} uses no assistant_model; leave it out or choose another strategy"
            )
        tokenizer = kwargs.pop("tokenizer", None) or self.tokenizer
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
            new_tokens = _max_length(stopping_criteria, generation_config) - input_ids.shape[1]
            check_lengths(self.model, prompts, new_tokens)
            stop_tokens = _stop_tokens(stopping_criteria)
            plan, values, processors = plan_sampling(
                logits_processor, input_ids.shape[1], generation_config, stop_tokens
            )
            aligner = (
                StreamAligner(streamer, len(prompts), _pad_token(generation_config)) if streamer is not None else None
            )
            request = Request(
                strategy=strategy, prompts=prompts, padded_prompt=input_ids, new_tokens=new_tokens,
                stop_tokens=stop_tokens, pad_token=_pad_token(generation_config), plan=plan, values=values,
                seed=resolve_seed(own.get("seed"), own.get("generator"), generation_config.do_sample),
                processors=processors, criteria=_host_criteria(stopping_criteria),
                on_step=aligner.step if aligner is not None else None,
                keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
                keep_scores=plan.keep_scores,
                compile=runtime.compile, prefill_chunk=runtime.prefill_chunk, slots=runtime.slots,
                context=dict(model=self.model, tokenizer=tokenizer, assistant_model=assistant),
            )  # fmt: skip
            decoded = decode(self.engine(runtime.attention), request)
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
        strings = kwargs.pop("stop_strings", None) or _first(configs, "stop_strings")
        if strings:
            if tokenizer is None:
                raise UnsupportedError("stop_strings needs a tokenizer: pass tokenizer= to enable() or generate()")
            criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        return criteria


def resolve_strategy(chosen: Any, call: Mapping[str, Any] | None, configured: Mapping[str, Any] | None) -> Strategy:
    """A strategy object from what the user wrote: a name, ``"a+b"``, a class, or an object.

    Raises:
        UnknownNameError, SettingsError, PluginError.
    """
    if isinstance(chosen, Strategy):
        if call:
            raise SettingsError("strategy_config given beside a strategy object, which already holds its settings")
        return chosen
    if inspect.isclass(chosen) and issubclass(chosen, Strategy):
        return chosen(_settings_of(chosen, call, configured))
    if not isinstance(chosen, str):
        raise SettingsError(f"strategy must be a name, a Strategy class or a Strategy, not {type(chosen).__name__}")
    names = [part.strip() for part in chosen.split("+")]
    classes = [registry().strategy(name) for name in names]
    if len(classes) == 1:
        return resolve_strategy(classes[0], call, configured)
    own = [c.name for c in classes]
    for given in (call, configured):
        unknown = sorted(set(given or {}) - {*own, Merged.name})
        if unknown:
            raise SettingsError(
                f"strategy_config of {chosen!r} is keyed by strategy: {', '.join(own)}; not {unknown[0]!r}"
            )
    parts = [c(_settings_of(c, (call or {}).get(c.name), (configured or {}).get(c.name))) for c in classes]
    return Merged(
        parts,
        cast(MergedSettings, _settings_of(Merged, (call or {}).get(Merged.name), (configured or {}).get(Merged.name))),
    )


def _settings_of(
    strategy: type[Strategy], call: Mapping[str, Any] | None, configured: Mapping[str, Any] | None
) -> Settings:
    """A strategy's settings in force."""
    sections = (*registry().strategies(), Merged.name)
    return load_settings(strategy.settings_class, strategy.name, call or {}, configured or {}, sections=sections)


#: Arguments that the loop cannot honour: name → (test on the value, what to do instead).
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda v: (v or 1) > 1, "beam search is not a strategy here; drop strategy= to use transformers' own"),
    "penalty_alpha": (lambda v: (v or 0) > 0, "contrastive search re-ranks; drop strategy="),
    "dola_layers": (lambda v: v is not None, "DoLa changes the logits by layer; drop strategy="),
    "use_cache": (lambda v: v is False, "strategies need the key-value cache; leave use_cache out"),
    "prompt_lookup_num_tokens": (lambda v: bool(v), 'use strategy="prompt_lookup" with strategy_config={"length": …}'),
    "assistant_early_exit": (lambda v: v is not None, "early-exit drafting is not a strategy here; drop strategy="),
    "guidance_scale": (lambda v: v not in (None, 1, 1.0), "classifier-free guidance runs the model twice; drop strategy="),
    "output_attentions": (lambda v: bool(v), "fused attention has no weights to return; drop strategy="),
    "output_hidden_states": (lambda v: bool(v), "run model(sequences, output_hidden_states=True) on the result"),
    "past_key_values": (lambda v: v is not None, "the loop owns its static cache; pass the whole conversation as input_ids"),
    "inputs_embeds": (lambda v: v is not None, "tokens are verified by id; pass input_ids"),
    "cache_implementation": (
        lambda v: v not in (None, "static", "dynamic", "hybrid"), "the loop always uses its own static cache"),
    "custom_generate": (lambda v: v is not None, "choose either strategy= or custom_generate="),
    "synced_gpus": (lambda v: bool(v), "sharded models cannot be decoded in one loop"),
    "token_healing": (lambda v: bool(v), "it rewrites the prompt; heal it before the call"),
    "position_ids": (lambda v: v is not None, "positions are those of the tokens; drop strategy="),
    "negative_prompt_ids": (lambda v: v is not None, "classifier-free guidance is not supported; drop strategy="),
}  # fmt: skip


def refuse_arguments(configs: list[GenerationConfig], kwargs: Mapping[str, Any]) -> None:
    """Raises UnsupportedError, before anything is touched, for arguments that cannot be honoured exactly."""
    for name, (refused, advice) in _REFUSED.items():
        value = kwargs[name] if kwargs.get(name) is not None else _first(configs, name)
        if refused(value):
            raise UnsupportedError(f"{name}={value!r} does not go with strategy=: {advice}.")


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Rows of ``[B, P]`` without their left padding.

    Raises:
        ContextLengthError: a row is empty. UnsupportedError: a mask with holes or right padding.
    """
    if attention_mask is None:
        return list(input_ids)
    mask = attention_mask.bool()
    if (mask[:, 1:] < mask[:, :-1]).any():
        raise UnsupportedError(
            "attention_mask has zeros after ones: rows must be padded on the left (tokenizer.padding_side='left')"
        )
    return [ids[keep] for ids, keep in zip(input_ids, mask, strict=True)]


def check_lengths(model: PreTrainedModel, prompts: list[Tensor], new_tokens: int) -> None:
    """Raises ContextLengthError if a prompt is empty or prompt and new tokens do not fit the model's positions."""
    longest, context = max(len(p) for p in prompts), context_length(model)
    if min(len(p) for p in prompts) == 0:
        raise ContextLengthError("a prompt is empty: give every row at least one token (the BOS token, say)")
    if longest + new_tokens > context:
        raise ContextLengthError(
            f"{longest} prompt tokens plus {new_tokens} new ones exceed the model's context of {context}: "
            f"max_new_tokens can be {max(context - longest, 0)} at most"
        )


def plan_sampling(
    processors: LogitsProcessorList, prompt_length: int, config: GenerationConfig, stop_tokens: tuple[int, ...]
) -> tuple[SamplingPlan, tuple[float, ...], Callable[[Tensor, Tensor], Tensor] | None]:
    """Turns transformers' prepared processors into operations of the step, or keeps them all for the host.

    Only exact types are recognised: a subclass may do anything. One processor that needs the prefix sends all to the
    host, since their order matters.
    """
    p = logits_process
    known: dict[type, Callable[[Any], tuple[str, float]]] = {
        p.TemperatureLogitsWarper: lambda x: ("temperature", x.temperature),
        p.TopKLogitsWarper: lambda x: ("top_k", x.top_k),
        p.TopPLogitsWarper: lambda x: ("top_p", 1 - x.top_p),
        p.MinPLogitsWarper: lambda x: ("min_p", x.min_p),
        p.TypicalLogitsWarper: lambda x: ("typical_p", x.mass),
        p.MinLengthLogitsProcessor: lambda x: ("min_new_tokens", x.min_length - prompt_length),
        p.MinNewTokensLengthLogitsProcessor: lambda x: ("min_new_tokens", x.min_new_tokens),
    }
    keep_scores = bool(config.return_dict_in_generate and config.output_scores)
    sample = bool(config.do_sample)

    def expressible(x: Any) -> bool:
        stops = getattr(x, "eos_token_id", None)
        return (
            type(x) in known
            and getattr(x, "min_tokens_to_keep", 1) == 1
            and (stops is None or set(stops.tolist()) == set(stop_tokens))
            and getattr(x, "prompt_length_to_skip", prompt_length) == prompt_length
        )

    if all(expressible(x) for x in processors):
        operations = [known[type(x)](x) for x in processors]
        plan = SamplingPlan(tuple(name for name, _ in operations), sample, keep_scores)
        return plan, tuple(float(value) for _, value in operations), None
    return SamplingPlan((), sample, keep_scores), (), cast(Callable[[Tensor, Tensor], Tensor], processors)


def resolve_seed(seed: int | None, generator: torch.Generator | None, sample: bool) -> int:
    """The seed of the sampling noise: given, or drawn from `generator`, or from torch's global generator."""
    if seed is not None and generator is not None:
        raise SettingsError("give seed= or generator=, not both")
    if seed is not None:
        if not -(2**63) <= seed < 2**63:
            raise SettingsError(f"seed {seed} does not fit 64 bits")
        return int(seed)
    if not sample:
        return 0
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(0, 2**63 - 1, (), generator=generator, device=device))


def assemble(input_ids: Tensor, decoded: Decoded, config: GenerationConfig) -> Tensor | DecodersOutput:
    """The result in transformers' form: ``[B, P + longest]`` with finished rows padded, or an output object."""
    rows, longest = len(decoded.tokens), max(map(len, decoded.tokens))
    new = torch.full((rows, longest), _pad_token(config), dtype=input_ids.dtype)
    for row, tokens in enumerate(decoded.tokens):
        new[row, : len(tokens)] = torch.tensor(tokens, dtype=input_ids.dtype)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences

    def by_position(per_row: list[list[Tensor]]) -> tuple[Tensor, ...]:
        # A row that has ended has no scores any more; zeros stand in its place.
        blank = torch.zeros_like(next(t for row in per_row for t in row))
        return tuple(torch.stack([row[t] if t < len(row) else blank for row in per_row]) for t in range(longest))

    output: Any = DecodersOutput  # transformers' annotations are narrower than what it fills in itself
    return output(
        sequences=sequences,
        scores=by_position(decoded.scores) if config.output_scores else None,
        logits=by_position(decoded.logits) if config.output_logits else None,
        report=decoded.report,
    )


def _first(configs: list[GenerationConfig], name: str) -> Any:
    """The first value that one of `configs` gives to `name`; transformers fills gaps in the same order."""
    return next((v for c in configs if (v := getattr(c, name, None)) is not None), None)


def _canonical(strategy: Any) -> str:
    """The name that a strategy, class or spelling of a name stands for."""
    return (strategy if isinstance(strategy, str) else strategy.name).replace("-", "_")


def _without_own_work(config: GenerationConfig) -> GenerationConfig:
    """A copy without what the loop does itself: stop strings (their tokenizer would get lost) and the static cache."""
    config = copy.deepcopy(config)
    config.stop_strings = config.cache_implementation = None
    return config


def _max_length(criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """A length criterion of the user's replaces the one that transformers makes, so the list is what counts."""
    lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
    return min(lengths, default=config.max_length)


def _stop_tokens(criteria: StoppingCriteriaList) -> tuple[int, ...]:
    tokens = [t for c in criteria if type(c) is stopping_criteria.EosTokenCriteria for t in c.eos_token_id.tolist()]
    return tuple(dict.fromkeys(tokens))


def _pad_token(config: GenerationConfig) -> int:
    pad, stops = getattr(config, "_pad_token_tensor", None), getattr(config, "_eos_token_tensor", None)
    return int(pad) if pad is not None else int(stops[0]) if stops is not None else 0


def _host_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList | None:
    """The criteria that the step does not decide itself."""
    inside = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
    return StoppingCriteriaList(c for c in criteria if type(c) not in inside) or None


def enable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> PreTrainedModel:
    """Gives `model` a ``generate`` that takes ``strategy=…``; the model itself, its config and weights stay untouched.

    Calling it again only replaces the tokenizer. :func:`disable` takes it back.

    Args:
        model: a causal language model of transformers.
        tokenizer: used by strategies, grammars and ``stop_strings``; may also be given per call.

    Returns:
        the same object.

    Raises:
        UnsupportedError: not a transformers model that generates.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise UnsupportedError(f"enable() takes a transformers model that can generate, not {type(model).__name__}")
    present = vars(model).get("generate")
    if isinstance(present, Generate):
        if tokenizer is not None:
            present.tokenizer = tokenizer
        return model
    vars(model)["generate"] = Generate(model, tokenizer, present)
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`enable`; does nothing on a model that is not enabled. Returns the same object."""
    present = vars(model).get("generate")
    if isinstance(present, Generate):
        if present.previous is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = present.previous
    return model
