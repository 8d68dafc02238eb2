"""The methods that are measured, as objects of one class: our strategies, and transformers' own ways of generating."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import compiled_on_any_device
from ..constraints import CompiledGrammar, Spec, regex
from ..enabling import enable
from ..errors import SettingsError, UnknownNameError, canonical
from ..registry import grammar_or_file, registry, resolve_strategy, resolve_verifier
from ..settings import RuntimeSettings, load_settings
from ..strategy import Strategy
from ..verifiers.verifier import Verifier
from .synthetic import Synthetic
from .variants import Variant, assistant_tokens, parse

#: transformers' generate with its dynamic cache: the baseline of all ratios, and of "identical" in greedy runs.
BASELINE = "transformers"
#: Our plain decoding: the baseline of "identical" in sampled runs, because transformers samples with another random generator.
PLAIN = "autoregressive"
#: Settings of the loop that change the target's logits, and so its text.
PRECISION = ("weights", "kv_cache")
#: Settings that cannot change between calls of one model object. Other values need a second model object with the same parameters.
OF_ENGINES = (*PRECISION, "draft_weights")
#: A grammar that allows every text, to measure the cost of constrained decoding by itself.
ANYTHING = "anything"
#: Number of tokens that transformers' own prompt lookup proposes per step (the value in its documentation).
LOOKUP_TOKENS = 10
STATIC, COMPILED = "transformers-static", "transformers-compiled"
LOOKUP, ASSISTED = "transformers-prompt-lookup", "transformers-assisted"


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        temperature: divides the logits.
        top_k: number of likeliest tokens that are kept; 0 keeps all.
        top_p: probability mass that is kept; 1 keeps all.
        seed: the first round's seed; each further round adds 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``generate``, without the seed."""
        # All three are given, even without effect, because the model's config would replace missing arguments.
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass(frozen=True)
class EngineOutput:
    """The output of an :class:`Engine`.

    Attributes:
        tokens: new tokens of each row, up to and including a stop token.
        steps: number of passes of the target; None if the engine does not report it.
    """

    tokens: list[list[int]]
    steps: int | None = None


#: Called with the newest token of each row; returns whether to continue.
OnTokens = Callable[[list[int]], bool]


class Engine(Protocol):
    """An inference engine other than this package, such as vLLM. It decodes greedily, and prefills all prompts in every call."""

    def generate(
        self, prompts: list[list[int]], new_tokens: int, stops: frozenset[int], on_tokens: OnTokens | None = None
    ) -> EngineOutput:
        """Generates at most `new_tokens` tokens for each of `prompts`."""

    def close(self) -> None:
        """Frees the engine's memory."""


@dataclass(frozen=True)
class Method:
    """One method of generating.

    Attributes:
        name: a strategy's registry name (``a+b`` if merged) with the settings as written, or ``transformers…``.
        dtype: dtype of the weights.
        arguments: arguments of ``generate``.
        ours: whether the method is a strategy; false for transformers' methods and other engines.
        exact: whether its output must equal plain decoding's.
        settings: the settings that the user gave, for the record.
        impossible: why it cannot run at all; "" if it can.
        one_row_only: why it cannot decode several rows; "" if it can.
        sampling: how tokens are sampled; None: greedy.
        verifier: name of the verifier; "" for transformers' methods.
        coupled: whether, with this verifier, every strategy samples the same tokens from the same seed.
        grammar: the grammar that the text must follow, as the user wrote it; "" without one.
        assistant: transformers' assistant model.
        assistant_config: values set in the assistant's generation config during a call.
        engine: another engine that decodes in place of `model`; `model` still defines stop tokens, padding and number of weights.
        bits: bits per weight in the other engine.
    """

    name: str
    dtype: str
    model: PreTrainedModel
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False
    exact: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    impossible: str = ""
    one_row_only: str = ""
    sampling: Sampling | None = None
    verifier: str = ""
    coupled: bool = True
    grammar: str = ""
    assistant: PreTrainedModel | None = None
    assistant_config: Mapping[str, Any] = field(default_factory=dict)
    engine: Engine | None = None
    bits: float | None = None

    def skip_reason(self, rows: int) -> str:
        """Why the method is skipped for `rows` rows; "" if it is not."""
        return self.impossible or (self.one_row_only if rows > 1 else "")

    @property
    def incomparable(self) -> str:
        """The text shown instead of "identical" if the tokens need not equal the baseline's; "" if they must."""
        if self.sampling is None or (self.ours and self.coupled):
            return ""
        return "n/a" if not self.ours else "same distribution" if self.exact else "other distribution"

    def in_round(self, repeat: int) -> Self:
        """The method with the seed of round `repeat`. In one round all methods have the same seed; every round has another seed."""
        if self.sampling is None or not repeat:
            return self
        return replace(self, sampling=replace(self.sampling, seed=self.sampling.seed + repeat))


def baseline_named(text: str) -> tuple[str, int | None]:
    """Splits one of transformers' methods, such as ``transformers-assisted[5]``, into name and number of draft tokens (or None).
    Raises UnknownNameError for an unknown name, SettingsError for wrong brackets.
    """
    name, tokens = assistant_tokens(text)
    if name not in (every := (BASELINE, STATIC, COMPILED, LOOKUP, ASSISTED)):
        raise UnknownNameError("baseline", name, every)
    if tokens is not None and name != ASSISTED:
        raise SettingsError(f"{text!r}: only {ASSISTED} takes a number of draft tokens")
    return name, tokens


def transformers_methods(
    model: PreTrainedModel, draft: PreTrainedModel | None = None, names: Sequence[str] | None = None, dtype: str = "",
    sampling: Sampling | None = None, tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
) -> list[Method]:  # fmt: skip
    """transformers' own methods: all that apply, or the methods in `names`. The baseline always comes first.

    ``transformers-assisted`` drafts with transformers' defaults; ``transformers-assisted[5]`` drafts five tokens in every step,
    whatever the assistant's confidence. transformers compiles by itself on CUDA only; ``transformers-compiled`` makes it compile
    its static-cache decoding anywhere.

    Args:
        tokenizers: ``tokenizer`` and ``assistant_tokenizer`` as arguments of ``generate``, for a draft model with another
            vocabulary.

    Raises:
        UnknownNameError: `names` contains an unknown method.
        SettingsError: the brackets are wrong.
    """
    dtype = dtype or str(model.dtype).removeprefix("torch.")
    one_row = "transformers' assisted generation takes one row"
    compile_everywhere = compiled_on_any_device()
    methods = (
        Method(BASELINE, dtype, model),
        Method(STATIC, dtype, model, {"cache_implementation": "static"}),
        Method(COMPILED, dtype, model, {"cache_implementation": "static", "compile_config": compile_everywhere}),
        Method(LOOKUP, dtype, model, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, one_row_only=one_row),
        Method(
            ASSISTED, dtype, model, {"assistant_model": draft, **(tokenizers or {})}, one_row_only=one_row, assistant=draft,
            impossible="" if draft is not None else "needs a draft model: --draft"),
    )  # fmt: skip
    available = {method.name: method for method in methods}
    if names is None:
        requested = [name for name in available if name != COMPILED or model.device.type != "cuda"]
    else:
        requested = list(dict.fromkeys([BASELINE, *names]))
    chosen = []
    for text in requested:
        name, tokens = baseline_named(text)
        method = replace(available[name], sampling=sampling)
        if tokens is not None:
            # A threshold above 0 ends drafts early. It is 0, not None, because transformers would replace None by its default.
            config = {
                "num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0,
            }  # fmt: skip
            method = replace(method, name=f"{name}[{tokens}]", assistant_config=config, settings=config)
        chosen.append(method)
    return chosen


def strategy_methods(
    model: PreTrainedModel, names: Sequence[str] | None = None, draft: PreTrainedModel | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None, decoders_config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None, dtype: str = "", sampling: Sampling | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Method]:  # fmt: skip
    """Methods for registered strategies: all of them, or the strategies in `names`. Enables `model`.

    A name may have settings, as in ``speculative[length=2]``, and occur several times with different settings. ``a+b`` merges
    strategies, each with brackets of its own. Some keys in brackets are not settings of the strategy: ``verifier=…`` names a verifier;
    ``grammar=…`` names a grammar that ``decoders grammars`` lists, or a file; ``compile=false`` measures uncompiled steps; with
    ``memory=true``, strategies remember, within a round, what they learned from earlier prompts; ``weights=int4``, ``kv_cache=int8``
    and ``draft_weights=int8`` set number formats, on a second model object with the same parameters. Every call prefills its whole
    prompt, unless `decoders_config` says otherwise. When sampling, plain decoding comes first: the other methods are compared with it.

    Args:
        settings: by strategy name, settings for all variants of the strategy; settings in brackets take precedence.
        decoders_config: settings of the loop for every call, for instance ``{"compile": False}``.
        assistant_tokenizer: the tokenizer of a draft model with another vocabulary.

    Raises:
        UnknownNameError, PluginError: the strategy was not found.
        SettingsError: a setting does not exist, or `settings` names a strategy that is not measured.
    """
    enable(model, tokenizer)
    names = list(registry().strategies()) if names is None else list(names)
    if sampling is not None:
        names = [PLAIN, *(name for name in names if name != PLAIN)]
    methods: dict[str, Method] = {}
    twins: dict[tuple[Any, ...], PreTrainedModel] = {(None,) * len(OF_ENGINES): model}
    for configured in configured_variants(names, settings):
        formats = tuple(configured.variant.loop.get(key) for key in OF_ENGINES)
        if formats not in twins:
            twins[formats] = enable(_twin(model), tokenizer)
        method = _method(configured, twins[formats], draft, decoders_config or {}, sampling)
        if assistant_tokenizer is not None and method.arguments.get("assistant_model") is not None:
            method = replace(method, arguments={**method.arguments, "assistant_tokenizer": assistant_tokenizer})
        methods[method.name] = replace(method, dtype=dtype or str(model.dtype).removeprefix("torch."))
    return list(methods.values())


def synthetic_methods(model: PreTrainedModel, acceptances: Sequence[str], **options: Any) -> list[Method]:
    """Methods with synthetic drafters (:class:`~decoders.bench.synthetic.Synthetic`), one for each acceptance rate in `acceptances`.

    Args:
        options: arguments of :func:`strategy_methods`.

    Raises:
        SettingsError: an acceptance rate is not between 0 and 1.
    """
    drafters = {f"synthetic[{text}]": Synthetic.of(text) for text in acceptances}
    plain = strategy_methods(model, [PLAIN], **options)[0] if drafters else None
    return [
        replace(
            plain, name=name, arguments={**plain.arguments, "strategy": drafter}, settings=drafter.settings.model_dump()
        )
        for name, drafter in drafters.items()
        if plain is not None
    ]


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second model object that is not enabled and shares the parameters of `model`."""
    twin = copy.copy(model)
    vars(twin).pop("generate", None)
    return twin


@dataclass(frozen=True)
class Configured:
    """A variant (:class:`~decoders.bench.variants.Variant`) with checked settings: they exist and have allowed values.

    Attributes:
        variant: the variant as written.
        classes: the classes of its strategies: one, or several that are merged.
        settings: the given settings of each strategy, including settings in brackets.
        strategy: the strategy; None if a setting that it requires was not given.
        impossible: why there is no strategy; "" if there is one.
        verifier: the verifier with which the strategy is measured.
        grammar: the grammar that texts must follow; None without a grammar.
    """

    variant: Variant
    classes: Sequence[type[Strategy]]
    settings: Mapping[str, Mapping[str, Any]]
    strategy: Strategy | None
    impossible: str
    verifier: Verifier
    grammar: Spec | CompiledGrammar | None

    @property
    def parts(self) -> list[str]:
        """Registry names of the strategies."""
        return [cls.name for cls in self.classes]

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings as ``strategy_config``."""
        return self.settings if len(self.classes) > 1 else self.settings.get(self.classes[0].name, {})


def configured_variants(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Configured]:
    """Parses and checks the variants `names`, without a model. Raises the errors of :func:`strategy_methods`."""
    settings_by_strategy = {canonical(name): dict(values) for name, values in (settings or {}).items()}
    variants = [_configured(parse(text), settings_by_strategy) for text in names]
    unused = settings_by_strategy.keys() - {part for variant in variants for part in variant.parts}
    if unused:
        raise SettingsError(f"settings given for {', '.join(sorted(unused))}, which is not measured: leave them out")
    return variants


def _configured(variant: Variant, settings_by_strategy: Mapping[str, dict[str, Any]]) -> Configured:
    classes = [registry().strategy(part) for part in variant.parts]
    bracketed = {canonical(part): values for part, values in variant.settings.items()}
    own_settings = {
        cls.name: {**settings_by_strategy.get(cls.name, {}), **bracketed.get(cls.name, {})}
        for cls in classes
        if cls.name in settings_by_strategy or cls.name in bracketed
    }
    verifier = (
        variant.verifier or load_settings(RuntimeSettings, None, {}, {}, sections=registry().strategies()).verifier
    )
    grammar: Spec | CompiledGrammar | None = None
    if variant.grammar:
        grammar = regex(r"(?:.|\n)*") if variant.grammar == ANYTHING else grammar_or_file(variant.grammar)
    configured = Configured(variant, classes, own_settings, None, "", resolve_verifier(verifier), grammar)
    try:
        return replace(configured, strategy=resolve_strategy("+".join(configured.parts), configured.config))
    except SettingsError as error:
        if own_settings:
            raise
        return replace(configured, impossible=str(error))  # a required setting was not given


def _method(
    configured: Configured, model: PreTrainedModel, draft: PreTrainedModel | None, decoders_config: Mapping[str, Any],
    sampling: Sampling | None,
) -> Method:  # fmt: skip
    """The method that decodes `model` with a variant's strategy, settings, verifier and grammar."""
    variant, classes, resolved, impossible = (
        configured.variant, configured.classes, configured.strategy, configured.impossible,
    )  # fmt: skip
    name, verifier = "+".join(configured.parts), configured.verifier
    # Every repeat has the same prompt. If keys and values were kept from the last repeat, the prefill would be free. If a strategy
    # kept what it learned in the last repeat, it would know the text.
    loop_settings = {"reuse": False, "memory": False} | dict(decoders_config) | dict(variant.loop)
    arguments: dict[str, Any] = {"strategy": name, "verifier": verifier.name, "decoders_config": loop_settings}
    if configured.config:
        arguments["strategy_config"] = configured.config
    if configured.grammar is not None:
        arguments["grammar"] = configured.grammar
    elif resolved is not None and resolved.needs_grammar:
        impossible = impossible or f"needs a grammar, such as {name}[grammar=json]"
    # If there is a strategy object, it is asked rather than its class: with the setting draft_model, it needs no assistant.
    needs = resolved.needs_assistant if resolved else any(cls.needs_assistant for cls in classes)
    takes = resolved.takes_assistant if resolved else any(cls.takes_assistant for cls in classes)
    if needs or (takes and draft is not None):
        arguments["assistant_model"] = draft
        if draft is None:
            impossible = impossible or "needs a draft model: --draft, or its setting draft_model"
    exact = resolved.exact if resolved else all(cls.exact for cls in classes)
    rounded = any(loop_settings.get(key) in ("int8", "int4") for key in PRECISION)
    return Method(
        variant.shown(configured.parts), "", model, arguments, ours=True,
        exact=exact and verifier.exact and not rounded, settings=configured.settings, impossible=impossible, sampling=sampling,
        verifier=verifier.name, coupled=verifier.coupled, grammar=variant.grammar or "",
    )  # fmt: skip
