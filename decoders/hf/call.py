"""One call: transformers prepares its inputs, they become a request of the loop, and what that decodes goes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..common.transformers_compat import pad_token_of
from ..costs.curve import default_folder
from ..engine.decode.call import decode
from ..engine.decode.engine import Engine
from ..engine.decode.request import Decoded, Request
from ..errors import SettingsError, UnsupportedError
from ..registry.registry import registry
from ..registry.resolve import resolve_strategy
from .arguments import HINTS, TRANSLATED, first_of, resolve_seed
from .assistants import Assistants, CallAssistants, draft_scheme
from .grammars import Grammars
from .inputs import check_lengths, check_pad_token, unpad
from .options import Options
from .output import DecodersOutput, assemble
from .preparations import Kind, Preparation, Preparations, kind_of
from .prepared import host_criteria, max_length, pads_ended_rows, plan_sampling, stop_tokens_of
from .streaming import StreamAligner


@dataclass(frozen=True)
class PreparedCall:
    """A call as the loop takes it, and what makes its result transformers' again.

    Attributes:
        engine: decodes it.
        request: what is to be decoded.
        input_ids: ``[B, P]`` as transformers prepared them.
        grammars: of the rows.
        aligner: tells the call's streamer, if there is one.
        config: the generation config in force.
    """

    engine: Engine
    request: Request
    input_ids: Tensor
    grammars: Grammars
    aligner: StreamAligner | None
    config: GenerationConfig

    def result(self, decoded: Decoded) -> Tensor | DecodersOutput:
        """What ``generate`` returns; the streamer is told that the end has come."""
        decoded.report.grammars = self.grammars.judge(decoded.tokens)
        if self.aligner is not None:
            self.aligner.end()
        return assemble(self.input_ids, decoded, self.config)

    def partial(self, decoded: Decoded) -> Tensor | DecodersOutput:
        """The same of a call that has not come to its end."""
        return assemble(self.input_ids, decoded, self.config)


@dataclass(frozen=True)
class GenerateCall:
    """A call that is going to be decoded.

    Attributes:
        model: the user's.
        engine: gives the model's engine; called once the inputs are prepared.
        assistants: the draft models that are kept with `model`.
        preparations: what transformers has prepared for earlier requests.
        options: what the call asks for.
        tokenizer: of the call or of the model.
    """

    model: PreTrainedModel
    engine: Callable[[], Engine]
    assistants: Assistants
    preparations: Preparations
    options: Options
    tokenizer: PreTrainedTokenizerBase | None

    def generate(self) -> Tensor | DecodersOutput:
        """Lets transformers prepare the inputs, processors and criteria, and decodes with them."""
        return self._through_transformers(self._decode)

    def prepared(self) -> PreparedCall:
        """The same up to where it would be decoded, for whoever does that. What an earlier one like it was prepared with is kept."""
        kind = kind_of(self.model, self.options.configs, self.options.arguments)
        kept = self.preparations.get(kind)
        if kept is None:
            return self._through_transformers(partial(self._prepare_and_keep, kind))
        return self._prepare_with(kept)

    def _through_transformers(self, go_on: Callable[[Tensor, Preparation, Tensor | None], Any]) -> Any:
        """What `go_on` gives, called by transformers' ``generate`` with the prompts, all that it has prepared, and the mask."""

        def custom_generate(
            model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **model_kwargs: Any,
        ) -> Any:  # fmt: skip
            preparation = Preparation(logits_processor, stopping_criteria, generation_config)
            return go_on(input_ids, preparation, model_kwargs.get("attention_mask"))

        handled = (
            "custom_generate",
            "assistant_model",
            "tokenizer",
            "assistant_tokenizer",
            "stop_strings",
            "cache_implementation",
        )
        arguments = {name: value for name, value in self.options.arguments.items() if name not in handled}
        arguments["stopping_criteria"] = self._criteria()
        if arguments.get("generation_config") is not None:
            arguments["generation_config"] = _without_own_work(arguments["generation_config"])
        # transformers fills gaps from the model's config, which must stay as it is: a shallow copy has a cleaned one.
        stand_in = copy.copy(self.model)
        stand_in.generation_config = _without_own_work(self.model.generation_config)
        return type(stand_in).generate(stand_in, **arguments, custom_generate=custom_generate)  # type: ignore[attr-defined]

    def _criteria(self) -> StoppingCriteriaList:
        """The user's criteria plus stop strings (transformers loses the tokenizer on the way to a custom loop)."""
        arguments = self.options.arguments
        criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
        # As in transformers, an argument counts before any config, whatever its value.
        strings = arguments.get("stop_strings", first_of(self.options.configs, "stop_strings"))
        if strings is not None:
            if not strings and not isinstance(strings, str):
                raise SettingsError("stop_strings is empty: give at least one string, or leave it out")
            if self.tokenizer is None:
                raise UnsupportedError("stop_strings needs a tokenizer: pass tokenizer= to enable() or generate()")
            criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=self.tokenizer))
        return criteria

    def _decode(self, input_ids: Tensor, preparation: Preparation, mask: Tensor | None) -> Tensor | DecodersOutput:
        """The loop behind transformers' ``custom_generate``."""
        call = self._prepare(input_ids, preparation, mask)
        try:
            decoded = decode(call.engine, call.request)
        except BaseException as error:
            if isinstance(getattr(error, "partial", None), Decoded):
                error.partial = call.partial(error.partial)  # type: ignore[attr-defined]
            raise
        return call.result(decoded)

    def _prepare_and_keep(
        self, kind: Kind | None, input_ids: Tensor, preparation: Preparation, mask: Tensor | None
    ) -> PreparedCall:
        call = self._prepare(input_ids, preparation, mask)
        self.preparations.keep(kind, preparation, call.request)
        return call

    def _prepare_with(self, kept: Preparation) -> PreparedCall:
        """As transformers' ``generate`` would call :meth:`_prepare`, with what it has prepared for another prompt."""
        arguments = self.options.arguments
        ids: Tensor = arguments["input_ids"]
        if arguments.get("streamer") is not None:
            arguments["streamer"].put(ids.cpu())
        now = kept.of_length(ids.shape[1], arguments["max_new_tokens"])
        with torch.no_grad():
            return self._prepare(ids, now, arguments["attention_mask"])

    def _prepare(self, input_ids: Tensor, preparation: Preparation, mask: Tensor | None) -> PreparedCall:
        """What transformers has prepared, in the loop's terms."""
        options, device = self.options, input_ids.device
        processors_given, criteria, config = preparation.processors, preparation.criteria, preparation.config
        padded = input_ids.to(self.model.device)
        pad_token, given = pad_token_of(config), options.arguments.get("attention_mask") is not None
        prompts = unpad(
            padded, mask if mask is None else mask.to(self.model.device), inferred_from=None if given else pad_token
        )
        new_tokens = max_length(criteria, config) - padded.shape[1]
        check_lengths(self.model, prompts, new_tokens)
        stop_tokens = stop_tokens_of(criteria)
        plan, values, processors = plan_sampling(processors_given, padded.shape[1], config, stop_tokens)
        if processors is not None and not options.verifier.coupled:
            raise UnsupportedError(
                f"verifier={options.verifier.name!r} needs the distribution after every draft token at once, and a logits "
                "processor of this call is asked about one token after the other: take verifier='coupled'"
            )
        streamer, assistant_tokenizer = map(options.arguments.get, ("streamer", "assistant_tokenizer"))
        if len(prompts) > 1 and pads_ended_rows(criteria):
            check_pad_token(self.model, pad_token)
        aligner = StreamAligner(streamer, len(prompts), pad_token) if streamer is not None else None
        engine, runtime = self.engine(), options.runtime
        engine.target.check_lengths(max(map(len, prompts)) + new_tokens, len(prompts))
        grammars = Grammars.of(
            options.grammar, len(prompts), config.num_return_sequences or 1, self.tokenizer,
            engine.target.vocab_size, stop_tokens, runtime,
        )  # fmt: skip
        seed = resolve_seed(options.seed, options.generator, bool(config.do_sample))
        if options.seed is None:  # processes that share the model draw the same noise
            (seed,) = engine.target.ranks.first([seed])
        assistants = CallAssistants(
            self.assistants, self.model, engine, self.tokenizer, assistant_tokenizer, draft_scheme(runtime)
        )  # fmt: skip
        request = Request(
            strategy=options.strategy, prompts=prompts, padded_prompt=padded, new_tokens=new_tokens,
            stop_tokens=stop_tokens, pad_token=pad_token, plan=replace(plan, masked=grammars.any), values=values,
            seed=seed,
            processors=processors, verifier=options.verifier, grammars=grammars.rows, criteria=host_criteria(criteria),
            on_step=aligner.step if aligner is not None else None,
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
            keep_scores=plan.keep_scores,
            runtime=runtime,
            origin=registry().origin(type(options.strategy)),
            engine_of=assistants.engine_of, vocabulary_of=assistants.vocabulary_of,
            model=self.model, tokenizer=self.tokenizer, assistant_model=options.arguments.get("assistant_model"),
            resolve=resolve_strategy, observers=registry().listening(), cost_folder=runtime.cost_cache or default_folder(),
        )  # fmt: skip
        return PreparedCall(engine, request, padded.to(device), grammars, aligner, config)


def _without_own_work(config: GenerationConfig) -> GenerationConfig:
    """A copy without what the loop does itself: stop strings (their tokenizer would get lost), the static cache, drafting."""
    config = copy.copy(config)
    for name in ("stop_strings", "cache_implementation", *HINTS, *TRANSLATED):
        setattr(config, name, None)
    return config
