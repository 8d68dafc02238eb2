"""Turns a call of ``generate`` into a :class:`Request`, and the request's output into transformers' form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..common.transformers_compat import without_position_ids
from ..engine.decode.engine import Engine
from ..engine.decode.output import RequestOutput
from ..engine.decode.request import Models, Request, Returned, Sampling, Stopping
from ..engine.model.layout import number_of_logits
from ..errors import SettingsError, UnsupportedError
from ..registry.plugins import registry
from ..registry.resolve import resolve_strategy
from ..report import Report
from ..strategy import HINTS
from .arguments import IDLE, PLAIN, TRANSLATED, check_lengths, check_pad_token, first_of, resolve_seed, unpad
from .assistants import Assistants, CallAssistants
from .given import CACHES, Beginning, CallCache
from .grammars import Grammars
from .multimodal import arguments_of, inputs_of, may_change_itself
from .operations import PaddedPrompts
from .options import Options
from .preparation import LIMIT, Kind, Preparation, kind_of

#: Arguments of ``generate`` that are not passed to transformers.
_HANDLED = (
    "custom_generate", "assistant_model", "tokenizer", "assistant_tokenizer", "stop_strings", "cache_implementation",
    *CACHES,
)  # fmt: skip


@dataclass
class DecodersOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's :class:`~decoders.report.Report`."""

    report: Report | None = None


class StreamAligner:
    """Sends the tokens ``[B]`` at each position to a streamer, as soon as every row has reached the position or has ended.

    A row that ended early is padded, as in transformers. If the streamer has a method ``on_step(new: list[list[int]])``, it is called
    with the new tokens of each step, before ``put``.
    """

    def __init__(self, streamer: BaseStreamer, pad_token: int) -> None:
        self.streamer, self.pad_token = streamer, pad_token
        self.sent = 0

    def step(self, new: list[list[int]], written: list[list[int]], ended: list[bool]) -> None:
        """Sends the tokens at the positions that every row has reached; rows that have `ended` are padded.

        new: each row's tokens of this step. written: all new tokens of each row.
        """
        if hasattr(self.streamer, "on_step"):
            self.streamer.on_step(new)
        going = [len(tokens) for tokens, end in zip(written, ended, strict=True) if not end]
        self._send(written, min(going, default=max(map(len, written))))

    def end(self, written: list[list[int]]) -> None:
        """Sends the remaining tokens and closes the stream."""
        self._send(written, max(map(len, written)))
        self.streamer.end()

    def _send(self, written: list[list[int]], ready: int) -> None:
        for position in range(self.sent, ready):
            tokens = [row[position] if position < len(row) else self.pad_token for row in written]
            self.streamer.put(torch.tensor(tokens))
        self.sent = max(self.sent, ready)


@dataclass(frozen=True)
class PreparedCall:
    """A call of ``generate`` as a :class:`Request` for the engine. Also converts the request's output to transformers' form.

    Attributes:
        engine, request: the model's engine, and the request that it decodes.
        input_ids: ``[B, P]`` as transformers prepared them.
        grammars: the grammars of the rows.
        aligner: sends tokens to the call's streamer; None without a streamer.
        config: the generation config of the call, as transformers has completed it.
    """

    engine: Engine
    request: Request
    input_ids: Tensor
    grammars: Grammars
    aligner: StreamAligner | None
    config: GenerationConfig

    def judge(self, written: RequestOutput) -> None:
        """Adds to the report whether the texts conform to their grammars. Slow if a schema has conditions that no grammar expresses."""
        written.report.grammars = self.grammars.judge(written.generated)

    def result(self, written: RequestOutput) -> Tensor | DecodersOutput:
        """Sends the remaining tokens to the streamer, closes the stream, and returns `written` in transformers' form."""
        if self.aligner is not None:
            self.aligner.end(written.generated)
        return self.partial(written)

    def partial(self, written: RequestOutput) -> Tensor | DecodersOutput:
        """The output so far: prompts and new tokens ``[B, …]`` int64, shorter rows padded; if requested, as :class:`DecodersOutput`."""
        config, longest = self.config, max(map(len, written.generated))
        new = torch.full((written.rows, longest), self.request.stopping.pad_token, dtype=torch.int64)
        for row, tokens in enumerate(written.generated):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        sequences = torch.cat([self.input_ids, new.to(self.input_ids.device)], dim=1)
        if not config.return_dict_in_generate:
            return sequences

        def by_position(per_row: list[list[Tensor]]) -> tuple[Tensor, ...]:
            # Rows that have ended get zeros.
            blank = next((torch.zeros_like(t) for row in per_row for t in row), torch.empty(0))
            return tuple(torch.stack([row[t] if t < len(row) else blank for row in per_row]) for t in range(longest))

        output: Any = DecodersOutput  # transformers' annotations are narrower than its own values
        return output(
            sequences=sequences,
            scores=by_position(written.scores) if config.output_scores else None,
            logits=by_position(written.logits) if config.output_logits else None,
            report=written.report,
        )


def prepare(
    model: PreTrainedModel, options: Options, tokenizer: PreTrainedTokenizerBase | None, engine_of: Callable[[], Engine],
    assistants: Assistants, kept: dict[Kind, Preparation], beginning: Beginning | None = None,
) -> PreparedCall:  # fmt: skip
    """Turns a checked call into a request.

    Args:
        model: the user's model.
        tokenizer: the call's tokenizer or the model's.
        engine_of: returns the model's engine, created if needed; called after all checks that do not need the engine.
        assistants: draft models of `model`.
        kept: the preparations of earlier calls, by :func:`kind_of` the call; this call's preparation is added if others can use it.
        beginning: how the prompts begin; None: with token ids.
    """
    beside, options = options.apart(arguments_of(model) - PLAIN)
    if beside and beginning is not None:
        kept_anyway = "; leave the cache out, because the loop caches texts with images itself"
        hint = kept_anyway if isinstance(beginning, CallCache) else ""
        raise UnsupportedError(
            f"{beginning.name} does not go with {', '.join(sorted(beside))}: a prompt with images has to be given whole{hint}"
        )
    idle, options = options.apart(frozenset(IDLE))
    given, runtime = options.arguments, options.runtime
    kind = kind_of(model, options.configs, given)
    earlier = kept.get(kind) if kind is not None else None
    if earlier is not None:
        input_ids, mask = given["input_ids"], given["attention_mask"]
        if given.get("streamer") is not None:
            given["streamer"].put(input_ids.cpu())
        preparation = earlier.of_length(input_ids.shape[1], given["max_new_tokens"])
    else:
        input_ids, mask, preparation = prepared_by_transformers(model, options, tokenizer, beside)
        if kind is not None and preparation.reusable and len(input_ids) == 1:
            if len(kept) >= LIMIT:
                kept.clear()
            kept[kind] = preparation
    padded, mask = input_ids.to(model.device), mask.to(model.device) if mask is not None else None
    inferred_from = None if given.get("attention_mask") is not None else preparation.pad_token
    if beginning is None:
        prompts = unpad(padded, mask, inferred_from)
    else:
        prompts = beginning.prompts(padded, given.get("attention_mask"), mask, inferred_from)
    new_tokens = preparation.length - padded.shape[1]
    check_lengths(model, prompts, new_tokens)
    if preparation.processors is not None and not options.verifier.coupled:
        raise UnsupportedError(
            f"verifier={options.verifier.name!r} needs the distributions after all draft tokens at once, and a logits "
            "processor of this call works token by token: take verifier='coupled'"
        )
    if len(prompts) > 1 and preparation.pads_ended_rows:
        check_pad_token(model, preparation.pad_token)
    config, plan = preparation.config, preparation.plan
    copies, multimodal = config.num_return_sequences or 1, None
    grammars = Grammars.of(  # before the engine is created, which takes seconds: errors come at once
        options.grammar, len(prompts), copies, tokenizer, model, preparation.stop_tokens, runtime,
        options.thinking, prompts,
    )  # fmt: skip
    engine = engine_of()
    longest, rope_table = max(map(len, prompts)), engine.target.rope_table_of(max(map(len, prompts)))
    engine.target.check_lengths(longest + new_tokens, len(prompts))
    if engine.target.lengths.rope_tables is not None:
        cached = beginning.length if isinstance(beginning, CallCache) else None
        engine.target.lengths.rope_tables.check(type(model).__name__, longest, new_tokens, cached)
    if "token_type_ids" in idle:
        engine.own_forward(model, engine.target).check_type_ids()
    seen = engine.target.vocabulary.placeholders if isinstance(beginning, CallCache) else None
    if seen is not None and any(bool((torch.isin(prompt, seen) | (prompt < 0)).any()) for prompt in prompts):
        raise UnsupportedError(
            f"past_key_values of {type(model).__name__} does not say which positions its images have taken: leave it out and give the "
            "whole prompt with its images; the loop caches texts with images itself"
        )
    read = beginning.read(engine, model, mask, len(prompts), copies, rope_table) if beginning is not None else None
    if beside:
        of_prompts = padded[::copies], mask[::copies] if mask is not None else None
        own = engine.own_forward(model, engine.target)
        # A strategy that reads prompts reads all prompts together, so their images are not divided.
        multimodal = inputs_of(own.model, beside, *of_prompts, copies, not options.strategy.reads_prompt)
    seed = resolve_seed(options.seed, options.generator, plan.sample)
    if options.seed is None:  # processes that share the model draw the same noise
        (seed,) = engine.target.ranks.first([seed])
    streamer = given.get("streamer")
    aligner = StreamAligner(streamer, preparation.pad_token) if streamer is not None else None
    assistant = given.get("assistant_model")
    draft_models = CallAssistants(assistants, model, engine, tokenizer, given.get("assistant_tokenizer"), runtime)
    request = Request(
        models=Models(model, tokenizer, assistant, draft_models),
        strategy=options.strategy, resolve=resolve_strategy, origin=registry().origin(type(options.strategy)),
        verifier=options.verifier, runtime=runtime, prompts=prompts, padded_prompt=padded, new_tokens=new_tokens,
        stopping=Stopping(preparation.stop_tokens, preparation.pad_token, preparation.criteria),
        plan=replace(plan, masked=grammars.any), sampling=Sampling(preparation.values, seed, preparation.sequences),
        processors=preparation.processors, grammars=grammars.rows,
        returned=Returned(
            logits=bool(config.return_dict_in_generate and config.output_logits),
            on_step=aligner.step if aligner is not None else None, observers=registry().listening(),
        ),
        given=read, multimodal=multimodal, rope_table=rope_table,
    )  # fmt: skip
    return PreparedCall(engine, request, padded.to(input_ids.device), grammars, aligner, config)


def prepared_by_transformers(
    model: PreTrainedModel, options: Options, tokenizer: PreTrainedTokenizerBase | None, beside: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, Preparation]:
    """The prompts ``[B, P]``, their mask and the preparation, from transformers' ``generate``.

    Args:
        beside: arguments that hold images and sounds. A model's own ``generate`` may act on them, by switching adapters for example.
    """

    def custom_generate(
        model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **model_kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Preparation]:  # fmt: skip
        mask = model_kwargs.get("attention_mask")
        padded = PaddedPrompts(input_ids, mask, number_of_logits(model))
        return input_ids, mask, Preparation.of(logits_processor, stopping_criteria, generation_config, padded)

    arguments = {name: value for name, value in options.arguments.items() if name not in _HANDLED}
    # transformers does not pass the tokenizer to a custom loop, so stop strings are added here.
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    # As in transformers, an argument overrides the configs even if it is None.
    strings = options.arguments.get("stop_strings", first_of(options.configs, "stop_strings"))
    if strings is not None:
        if not strings and not isinstance(strings, str):
            raise SettingsError("stop_strings is empty: give at least one string, or leave it out")
        if tokenizer is None:
            raise UnsupportedError("stop_strings needs a tokenizer: pass tokenizer= to enable() or generate()")
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    arguments["stopping_criteria"] = criteria
    if arguments.get("generation_config") is not None:
        arguments["generation_config"] = _without_own_work(arguments["generation_config"])
    # transformers takes unset options from the model's generation config: it gets a copy of the model whose config lacks our options.
    stand_in: Any = copy.copy(model)
    stand_in.generation_config = _without_own_work(model.generation_config)
    without_position_ids(stand_in)
    if may_change_itself(model):
        arguments |= beside
    prepared: tuple[Tensor, Tensor | None, Preparation] = type(stand_in).generate(
        stand_in, **arguments, custom_generate=custom_generate
    )
    return prepared


def _without_own_work(config: GenerationConfig) -> GenerationConfig:
    """A copy of `config` without the options that the loop handles: stop strings, the static cache, drafting."""
    config = copy.copy(config)
    for name in ("stop_strings", "cache_implementation", *HINTS, *TRANSLATED):
        setattr(config, name, None)
    return config
