"""Turns the bodies of all routes into requests of a scheduler."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import config_value
from ..constraints import Backend, Vocabulary, regex
from ..enabling import OwnDefaults, compiles_grammars_with, enable
from ..errors import QueueFull, UnsupportedError, amount, shortened
from ..registry import resolve_strategy
from .arguments import Stops, callbacks, sampling, wrapped
from .bodies import BaseBody, Body
from .client_settings import ClientSettings
from .grammars import wanted_of
from .limits import LONGEST_HOLD, Arrival, Limits, Pace, digest
from .metrics import Metrics
from .offered import Offered
from .pool import SchedulerPool
from .prompts import Conversations
from .refusals import Refusal, log, refusal
from .texts import Choice, Job, Spelling
from .workshop import Wanted, Workshop, broken_rule

#: Number of threads that parse bodies, render prompts and submit requests, which would take too long in the event loop.
THREADS = 4
#: Number of threads for requests that take long (large ones, images, new grammars), so that other requests do not wait for them.
PATIENT_THREADS = 2
#: Greatest number of seconds by which prefilling prompts may delay a step. Without this limit, a client that sends one long prompt
#: after another would stop the decoding of all other requests.
LONGEST_PAUSE = 0.02
#: A body is large from this number of bytes on: tokenizing its prompt takes 10 ms or more.
LARGE = 32 << 10


class Service:
    """Submits the requests of all routes to the schedulers of one model.

    Args:
        model, tokenizer: the served model, which the service enables if it is not enabled yet. The service adapts the model's
            generation config (:class:`~decoders.enabling.OwnDefaults`).
        name: the model's name for clients.
        strategy, strategy_config: the default strategy and its settings.
        assistant: draft model for strategies that take one.
        limits: limits of requests.
        chat_template: replaces the tokenizer's chat template.
        thinking: begin and end markers of thoughts, for models whose markers are not known.
        tool_format: name of the format in which the model writes function calls, if the chat template does not show it.
        config: ``decoders_config`` of every request.
        processor: the processor of a vision model.

    Attributes:
        offered: the strategies that requests can name.
        pace: delays the answers to large requests (large bodies, images, long conversations).
        keys: number of API keys. Requests of different clients alternate in the queue: with several keys each key counts as a client,
            otherwise each request does.
        draining: whether the server is shutting down, so that new requests are refused.
        arrivals: the arrivals of requests, so that :meth:`cancel` reaches requests that are still being prepared.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str, strategy: str = "autoregressive",
        strategy_config: dict[str, Any] | None = None, assistant: PreTrainedModel | None = None, limits: Limits = Limits(),
        chat_template: str | None = None, thinking: tuple[str, str] | None = None, tool_format: str | None = None,
        config: dict[str, Any] | None = None, processor: Any = None,
    ) -> None:  # fmt: skip
        enable(model, tokenizer)
        self.model, self.tokenizer, self.name, self.limits = model, tokenizer, name, limits
        text = model.config.get_text_config(decoder=True)
        self.slots = min(limits.slots, config_value(text, "max_position_embeddings") or limits.slots)
        options: dict[str, Any] = dict(
            rows=limits.rows, slots=limits.slots, queue=limits.queue, longest_pause=LONGEST_PAUSE
        )
        if config:
            options["decoders_config"] = dict(config)
        strategy_config, own = self._settle(strategy, strategy_config or {}), model.generation_config
        if own.eos_token_id is None and tokenizer.eos_token_id is not None:
            options["eos_token_id"] = tokenizer.eos_token_id
        if own.pad_token_id is None:
            options["pad_token_id"] = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        eos = options.get("eos_token_id", own.eos_token_id)
        self._stops = tuple(eos) if isinstance(eos, list | tuple) else (eos,) if eos is not None else ()
        self._config = config
        self.pool = SchedulerPool(
            model, tokenizer, strategy, strategy_config, limits.schedulers, assistant, options
        )  # fmt: skip
        self.offered = Offered(model, self.pool, ClientSettings(limits.client_settings))
        self.metrics = Metrics(self.pool, limits.rows, name)
        self.conversations = Conversations(tokenizer, chat_template, thinking, tool_format, processor)
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="decoders-prepare")
        self.patient = ThreadPoolExecutor(PATIENT_THREADS, thread_name_prefix="decoders-compile")
        self.arrivals: WeakSet[Arrival] = WeakSet()
        self._long = self.keys = 0
        self.pace = Pace(LONGEST_HOLD)
        self.created, self.draining = int(time.time()), False

    def _settle(self, strategy: str, config: dict[str, Any]) -> dict[str, Any]:
        """Drops fields of the model's generation config with which requests cannot be decoded, and logs a warning about them.

        Returns:
            `config` (the settings of `strategy`), extended by the drafting arguments in the checkpoint's generation config.
        """
        defaults = OwnDefaults.of(self.model.generation_config, strategy, config)
        self.model.generation_config = defaults.config
        if defaults.left_out:
            values = ", ".join(f"{name}={value}" for name, value in defaults.left_out.items())
            log.warning(
                "the checkpoint's generation config sets %s: requests are decoded without these settings. To avoid this warning, "
                "remove them from generation_config.json or config.json", values,
            )  # fmt: skip
        return defaults.strategy_config

    @cached_property
    def spelling(self) -> Spelling:
        """The bytes of each token. The first call takes a moment for a large vocabulary."""
        return Spelling(self.tokenizer)

    def warm_up(self) -> None:
        """Decodes a token to make the model ready, starts the process that compiles grammars, and finds out which strategies run."""
        grammar = regex("a") if resolve_strategy(self.pool.strategy, self.pool.config).needs_grammar else None
        self.pool.submit(None, None, [0], lambda _: None, max_new_tokens=1, grammar=grammar).result()
        with suppress(UnsupportedError):  # the tokens' bytes are unknown: requests with grammars will be refused
            self.workshop.begin()
        _ = self.offered.names

    def check(self, body: BaseBody) -> None:
        """Raises Refusal if a body names another model, or if the server is shutting down."""
        if self.draining:
            raise self.shutting_down()
        self.check_name(body.model)

    def shutting_down(self) -> Refusal:
        """The refusal of requests that arrive during shutdown."""
        return Refusal(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})

    def check_name(self, model: str | None) -> None:
        """Raises Refusal if `model` is not the served model."""
        if model is not None and model != self.name:
            message = f"there is no model {shortened(repr(model))} here, only {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    @cached_property
    def workshop(self) -> Workshop:
        """The workshop that compiles grammars. The first call takes a moment for a large vocabulary."""
        vocabulary, backend, seconds = compiles_grammars_with(self.model, self._stops, self._config)
        return _workshop(vocabulary, type(backend), seconds)

    async def validate(self, job: Job, choice: Choice) -> None:
        """Validates the text of an ended choice if the grammar's end was reached. Stores the broken rule in `choice.invalid`."""
        grammar = choice.generation.call.request.grammars[0]
        if grammar is not None and choice.use is not None and choice.use.complete:
            check = functools.partial(job.arrival.check, job.seconds)
            choice.invalid = await self.run(self.patient, broken_rule, grammar, choice.generation.tokens, check)

    async def run(self, pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function` in a thread of `pool` and returns its result. Raises Refusal if shutdown has closed the pool."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        except RuntimeError as error:
            if not self.draining:
                raise
            raise self.shutting_down() from error

    def takes_long(self, body: Body) -> bool:
        """Whether preparing a body may take long: it has images or continues a long conversation, or its grammar is new."""
        if body.heavy:
            return True
        wanted = wanted_of(body, self.conversations.style)
        return wanted is not None and not self.workshop.known(wanted)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """A context that counts a slow request (:meth:`takes_long`) while it waits and is prepared. Called in the event loop.

        Raises:
            QueueFull: the greatest allowed number of slow requests already waits.
        """
        most = self.limits.constrained + PATIENT_THREADS
        if self._long >= most:
            raise QueueFull(
                f"{self._long} slow requests (large ones, with images or with new grammars) already wait to be prepared: "
                "try again later"
            )
        self._long += 1
        try:
            yield
        finally:
            self._long -= 1

    def check_length(self, text: str) -> None:
        """Raises Refusal if `text` has too many characters for a prompt, however they are tokenized. This check tokenizes nothing."""
        with suppress(UnsupportedError):  # the tokens' bytes are unknown: no text is refused here
            least = len(text) // max(self.workshop.vocabulary.longest, 1)
            if least > self.limits.prompt_tokens:
                raise self.limits.too_long(f"more than {least}", self.slots)

    def check_count(self, body: Body, prompts: int) -> int:
        """The number of choices that a body asks for. prompts: its number of prompts. Raises Refusal for more choices than allowed."""
        count, most = (body.n or 1) * prompts, min(self.limits.choices, self.limits.queue + self.limits.rows)
        if count > most:
            message = f"the request asks for {count} texts (n times prompts); the limit is {most}"
            raise Refusal(400, message, param="prompt" if prompts > most else "n", code="too_many_choices")
        return count

    def seconds(self, body: Body | None = None) -> float:
        """The seconds that a request may take, counted from its arrival; without a body, the server's limit."""
        return min((body.deadline if body is not None else None) or self.limits.deadline, self.limits.deadline)

    def start(
        self, kind: str, body: Body, prompts: Sequence[list[int]], arrival: Arrival, wanted: Wanted | None = None,
        default_tokens: int | None = None, thinking: Any = None, images: Mapping[str, Any] = MappingProxyType({}),
    ) -> Job:  # fmt: skip
        """Submits all choices of a body to the scheduler; if one cannot be submitted, all are cancelled. This takes a millisecond or
        more, which is too long for the event loop.

        Args:
            kind: prefix of the answer's id.
            arrival: the request's arrival. Submitting ends with an error once `arrival.gone` is True.
            wanted: the calls or response format from which the grammar of all choices is compiled; None: free text.
            thinking: the argument ``thinking=`` of ``generate`` for all choices.
            default_tokens: number of new tokens if the body sets none; None: as many as the limits allow.
            images: images of the prompts, as arguments of ``generate``.

        Raises:
            Refusal, and the errors of :meth:`decoders.Scheduler.submit`.
        """
        count = self.check_count(body, len(prompts))
        self.offered.check(body.strategy, body.strategy_config or {}, wanted is not None)
        new = [self.new_tokens(body, prompt, default_tokens) for prompt in prompts]
        shared = sampling(body, self.model)
        seed = body.seed if body.seed is not None else secrets.randbits(62)
        seconds = self.seconds(body)
        grammar = None
        if wanted is not None:
            grammar = self.workshop.prepared(wanted, functools.partial(arrival.check, seconds))
        needs_validation = grammar is not None and any(part.language.whole is not None for part in grammar.parts)
        salt = arrival.salt(body.cache_salt) if self.limits.sharing else digest(secrets.token_hex(16))
        stops = Stops.of(body.stops, self.conversations.special)
        job = Job(f"{kind}{secrets.token_hex(12)}", [], stops, arrival, seconds)
        try:
            for index in range(count):
                arrival.check(seconds)
                prompt, own = prompts[index // (body.n or 1)], wrapped(seed + index)
                most = new[index // (body.n or 1)]
                generation = self.pool.submit(
                    body.strategy, body.strategy_config, prompt, self.metrics.ended, arrival.client if self.keys > 1 else job.id,
                    deadline=arrival.left(seconds), cache_salt=salt,
                    top_logprobs=body.listed, max_new_tokens=most, seed=own, grammar=grammar, thinking=thinking, **shared, **images,
                    **callbacks(body, self.tokenizer, len(prompt), stops),
                )  # fmt: skip
                job.choices.append(Choice(index, own, generation, prompt, needs_validation))
            arrival.check(seconds)
            if self.draining:
                raise self.shutting_down()
        except BaseException:
            job.cancel()
            raise
        return job

    def new_tokens(self, body: Body, prompt: list[int], default: int | None = None) -> int:
        """The number of tokens to generate after `prompt`. Raises Refusal if `prompt` is empty, or if `prompt` or this number exceeds
        its limit. default: see `default_tokens` of :meth:`start`.
        """
        limits, left = self.limits, self.slots - len(prompt)
        if not prompt:
            raise Refusal(400, "the prompt is empty: it needs at least one token", param="prompt", code="invalid_value")
        if len(prompt) > limits.prompt_tokens or left < 1:
            raise limits.too_long(str(len(prompt)), self.slots)
        wanted, field = body.most_tokens
        if wanted is None:
            return min(default or limits.new_tokens, limits.new_tokens, left)
        if wanted > limits.new_tokens:
            message = f"{field} is {wanted}; the limit is {limits.new_tokens}"
            raise Refusal(400, message, param=field, code="invalid_value")
        if wanted > left:
            both = f"{amount(len(prompt), 'prompt token')} and {wanted} new ones"
            message = f"{both} exceed the context of {self.slots}: {field} can be {left} at most"
            raise Refusal(400, message, param=field, code="context_length_exceeded")
        return wanted

    def refused(self, endpoint: str, error: BaseException) -> Refusal:
        """The refusal for `error`, counted in the metrics."""
        answer = refusal(error)
        self.metrics.requests.labels(endpoint, answer.outcome).inc()
        return answer

    def cancel(self) -> None:
        """Cancels all requests, including those that are being prepared. Called in the event loop."""
        for arrival in list(self.arrivals):
            arrival.gone = True
        self.pool.cancel()

    def close(self) -> None:
        """Cancels the remaining requests, closes the schedulers, and ends the threads."""
        self.draining = True
        self.pool.close()
        self.patient.shutdown(wait=False, cancel_futures=True)
        self.threads.shutdown(wait=True, cancel_futures=True)


@functools.lru_cache(2)
def _workshop(vocabulary: Vocabulary, backend: type[Backend], seconds: float) -> Workshop:
    """A workshop for these arguments. It is cached, because starting a workshop takes seconds."""
    return Workshop(vocabulary, backend(), seconds)
