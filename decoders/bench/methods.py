"""What is measured: our strategies and transformers' own methods of generating, behind one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import compiled_on_any_device
from ..constraints import CompiledGrammar, Spec, regex
from ..errors import SettingsError, UnknownNameError, canonical
from ..generate import enable
from ..plugins import grammar_or_file, registry, resolve_strategy, resolve_verifier
from ..settings import RuntimeSettings, load_settings
from ..strategies.synthetic import Synthetic
from .variants import Variant, assistant_tokens, parse

#: transformers' generate with its dynamic cache: what every ratio refers to, and greedy "identical" too.
BASELINE = "transformers"
#: What "identical" refers to when sampling: transformers draws its tokens from another generator of random numbers.
PLAIN = "autoregressive"
#: Settings of the loop that change the target's numbers, and so its text.
PRECISION = ("weights", "kv_cache")
#: Those that engines depend on: one model has one engine, and one for each of its drafts.
OF_ENGINES = (*PRECISION, "draft_weights")
#: A grammar that allows every text: what constrained decoding costs by itself.
ANYTHING = "anything"
#: Tokens that transformers' own prompt lookup proposes per step (the value its documentation uses).
LOOKUP_TOKENS = 10
ASSISTED = "transformers-assisted"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: that logits are divided by.
        top_k: likeliest tokens that are kept; 0 keeps all.
        top_p: probability mass that is kept; 1 keeps all.
        seed: of the first round; every further round takes the next.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Of ``generate``, the seed apart."""
        # All three, though they may cut nothing off: what is left out is filled from the model's config.
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass(frozen=True)
class EngineOutput:
    """What another engine wrote.

    Attributes:
        tokens: new tokens of each row, up to and with a stop token.
        steps: passes of the target; None where the engine does not tell.
    """

    tokens: list[list[int]]
    steps: int | None = None


#: Told the new tokens of a step, of every row; says whether to go on.
OnTokens = Callable[[list[int]], bool]


class Engine(Protocol):
    """Another engine. It decodes greedily, and every call reads its prompts anew."""

    def generate(
        self, prompts: list[list[int]], new_tokens: int, stops: frozenset[int], on_tokens: OnTokens | None = None
    ) -> EngineOutput:
        """At most `new_tokens` for each of `prompts`."""

    def close(self) -> None:
        """Gives the memory back."""


@dataclass(frozen=True)
class Method:
    """One method of generating.

    Attributes:
        name: a strategy's registry name (``a+b``) with the settings as written, or ``transformers…``.
        dtype: of the weights.
        arguments: of ``generate``.
        ours: whether they are for an enabled model's ``generate``.
        exact: whether its output must be plain decoding's own.
        settings: given by hand, for the record.
        impossible: why it cannot run at all.
        one_row_only: why it cannot run on batches.
        sampling: None is greedy.
        verifier: the rule that accepts our drafts, "" for transformers' own methods.
        coupled: whether that rule makes every strategy draw the same tokens from the same seed.
        grammar: that the text must follow, as written, "" without.
        assistant: transformers' assistant model.
        assistant_config: what its generation config holds during a call.
        engine: another engine that decodes in the place of `model`, which then lends its stop tokens and its sizes.
        weights: number format of that engine's matrices.
        bits: of one weight there.
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
    weights: str = ""
    bits: float | None = None

    def skip_reason(self, rows: int) -> str:
        """Why it cannot decode `rows` rows and is skipped; empty if it can."""
        return self.impossible or (self.one_row_only if rows > 1 else "")

    @property
    def incomparable(self) -> str:
        """What is shown in the place of "identical" where tokens need not be the baseline's; empty where they must."""
        if self.sampling is None or (self.ours and self.coupled):
            return ""
        return "n/a" if not self.ours else "same distribution" if self.exact else "other distribution"

    def in_round(self, repeat: int) -> Self:
        """As it is in a round: every round draws other tokens, the same ones for all who draw from the seed."""
        if self.sampling is None or not repeat:
            return self
        return replace(self, sampling=replace(self.sampling, seed=self.sampling.seed + repeat))


def transformers_methods(
    model: PreTrainedModel,
    draft: PreTrainedModel | None = None,
    names: Sequence[str] | None = None,
    dtype: str = "",
    sampling: Sampling | None = None,
    tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
) -> list[Method]:
    """transformers' own methods: all that apply, or those of `names`. The baseline always comes first.

    ``transformers-assisted`` drafts as transformers does unless told otherwise; ``transformers-assisted[5]`` drafts five
    tokens in every step, whatever the assistant thinks of them.

    Off CUDA transformers compiles nothing by itself; ``transformers-compiled`` makes it compile its static-cache decoding.

    Args:
        tokenizers: of a draft with another vocabulary: ``tokenizer`` and ``assistant_tokenizer``, as ``generate`` takes them.

    Raises:
        UnknownNameError: no such method.
        SettingsError: brackets that say nothing.
    """
    dtype = dtype or str(model.dtype).removeprefix("torch.")
    one_row = "transformers' assisted generation takes one row"
    compile_everywhere = compiled_on_any_device()
    available = {
        BASELINE: Method(BASELINE, dtype, model),
        "transformers-static": Method(
            "transformers-static", dtype, model, {"cache_implementation": "static"}),
        "transformers-compiled": Method(
            "transformers-compiled", dtype, model, {"cache_implementation": "static", "compile_config": compile_everywhere}),
        "transformers-prompt-lookup": Method(
            "transformers-prompt-lookup", dtype, model, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, one_row_only=one_row),
        ASSISTED: Method(
            ASSISTED, dtype, model, {"assistant_model": draft, **(tokenizers or {})}, one_row_only=one_row, assistant=draft,
            impossible="" if draft is not None else "needs a draft model: --draft"),
    }  # fmt: skip
    if names is None:
        requested = [name for name in available if name != "transformers-compiled" or model.device.type != "cuda"]
    else:
        requested = list(dict.fromkeys([BASELINE, *names]))
    chosen = []
    for text in requested:
        name, tokens = assistant_tokens(text)
        if name not in available:
            raise UnknownNameError("baseline", name, available)
        method = replace(available[name], sampling=sampling)
        if tokens is not None:
            if name != ASSISTED:
                raise SettingsError(f"{text!r}: only {ASSISTED} takes a number of draft tokens")
            # A threshold above 0 ends drafts early; 0 rather than None, which is filled with transformers' default.
            config = {
                "num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0,
            }  # fmt: skip
            method = replace(method, name=f"{name}[{tokens}]", assistant_config=config, settings=config)
        chosen.append(method)
    return chosen


def strategy_methods(
    model: PreTrainedModel,
    names: Sequence[str] | None = None,
    draft: PreTrainedModel | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    decoders_config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str = "",
    sampling: Sampling | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Method]:
    """Registered strategies, all or those of `names`. Enables `model`.

    A name may carry settings, ``speculative[length=2]``, and be there several times with other ones; ``verifier=…`` among
    them names the verifier, ``grammar=…`` a grammar of the library or a file with one, ``compile=false`` the uncompiled tier;
    with ``memory=true`` strategies keep what they learn from one prompt of a round to the next; ``weights=int4`` and
    ``kv_cache=int8`` are the number formats of the target and its cache, ``draft_weights=int8`` that of the draft model, on a twin of
    `model` that shares its parameters.
    Every call reads its prompt anew, unless `decoders_config` says otherwise. ``a+b`` merges, each part with
    brackets of its own. When sampling, plain decoding comes first: it is what the others are compared with.

    Args:
        settings: by strategy name, for all its variants; brackets go before.
        decoders_config: of every call, for instance ``{"compile": False}``.
        assistant_tokenizer: of a draft with another vocabulary.

    Raises:
        UnknownNameError: no such strategy.
        PluginError: no such strategy.
        SettingsError: no such setting, or of no strategy chosen.
    """
    enable(model, tokenizer)
    settings_by_strategy = {canonical(name): dict(values) for name, values in (settings or {}).items()}
    names = list(registry().strategies()) if names is None else list(names)
    if sampling is not None:
        names = [PLAIN, *(name for name in names if name != PLAIN)]
    methods: dict[str, Method] = {}
    used: set[str] = set()
    twins: dict[tuple[Any, ...], PreTrainedModel] = {(None,) * len(OF_ENGINES): model}
    for text in names:
        variant = parse(text)
        formats = tuple(variant.loop.get(key) for key in OF_ENGINES)
        if formats not in twins:
            twins[formats] = enable(_twin(model), tokenizer)
        strategies_used, method = _method(
            variant, twins[formats], draft, settings_by_strategy, decoders_config or {}, sampling
        )
        used |= strategies_used
        if assistant_tokenizer is not None and method.arguments.get("assistant_model") is not None:
            method = replace(method, arguments={**method.arguments, "assistant_tokenizer": assistant_tokenizer})
        methods[method.name] = replace(method, dtype=dtype or str(model.dtype).removeprefix("torch."))
    if set(settings_by_strategy) - used:
        raise SettingsError(
            f"settings given for {', '.join(sorted(set(settings_by_strategy) - used))}, which is not measured"
        )
    return list(methods.values())


def synthetic_methods(model: PreTrainedModel, acceptances: Sequence[str], **options: Any) -> list[Method]:
    """A drafter for each of `acceptances` that is right as often as that says: :class:`~decoders.strategies.synthetic.Synthetic`.

    Args:
        options: as :func:`strategy_methods` takes them.

    Raises:
        SettingsError: they are no shares.
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
    """`model` once more, not enabled, with the same parameters in memory."""
    twin = copy.copy(model)
    vars(twin).pop("generate", None)
    return twin


def named_grammar(name: str) -> Spec | CompiledGrammar:
    """The grammar that stands in the brackets: of the library, of a plugin, of a file, or all texts under the name of ``anything``."""
    return regex(r"(?:.|\n)*") if name == ANYTHING else grammar_or_file(name)


def _method(
    variant: Variant, model: PreTrainedModel, draft: PreTrainedModel | None, settings_by_strategy: Mapping[str, dict[str, Any]],
    decoders_config: Mapping[str, Any], sampling: Sampling | None,
) -> tuple[set[str], Method]:  # fmt: skip
    """The method, and the strategies of `settings_by_strategy` that it took settings from."""
    classes = [registry().strategy(part) for part in variant.parts]
    parts = [cls.name for cls in classes]
    bracketed = {canonical(part): values for part, values in variant.settings.items()}
    used_settings = {part for part in parts if part in settings_by_strategy}
    own_settings = {
        p: {**settings_by_strategy.get(p, {}), **bracketed.get(p, {})}
        for p in parts
        if p in settings_by_strategy or p in bracketed
    }
    config = own_settings if len(parts) > 1 else own_settings.get(parts[0], {})
    name, impossible, resolved = "+".join(parts), "", None
    try:
        # A misspelt setting ends the run before it starts.
        resolved = resolve_strategy(name, config, None)
    except SettingsError as error:
        if own_settings:
            raise
        impossible = str(error)  # a required setting was not given
    verifier_name = (
        variant.verifier or load_settings(RuntimeSettings, None, {}, {}, sections=registry().strategies()).verifier
    )
    verifier = resolve_verifier(verifier_name)
    # Every repeat has the same prompt. Keys and values kept from the call before would make it free, and what a strategy has
    # learnt there would be the answer.
    loop_settings = {"reuse": False, "memory": False} | dict(decoders_config) | dict(variant.loop)
    arguments: dict[str, Any] = {"strategy": name, "verifier": verifier_name, "decoders_config": loop_settings}
    if config:
        arguments["strategy_config"] = config
    # The object knows: a strategy with a draft_model of its own needs no assistant, and takes none.
    if variant.grammar:
        arguments["grammar"] = named_grammar(variant.grammar)
    elif resolved is not None and resolved.needs_grammar:
        impossible = impossible or f"needs a grammar: {name}[grammar=json], say"
    needs = resolved.needs_assistant if resolved else any(cls.needs_assistant for cls in classes)
    takes = resolved.takes_assistant if resolved else any(cls.takes_assistant for cls in classes)
    if needs or (takes and draft is not None):
        arguments["assistant_model"] = draft
        if draft is None:
            impossible = impossible or "needs a draft model: --draft, or its setting draft_model"
    exact = resolved.exact if resolved else all(cls.exact for cls in classes)
    rounded = any(loop_settings.get(key) in ("int8", "int4") for key in PRECISION)
    method = Method(
        variant.shown(parts), "", model, arguments, ours=True,
        exact=exact and verifier.exact and not rounded, settings=own_settings, impossible=impossible, sampling=sampling,
        verifier=verifier.name, coupled=verifier.coupled, grammar=variant.grammar or "",
    )  # fmt: skip
    return used_settings, method
