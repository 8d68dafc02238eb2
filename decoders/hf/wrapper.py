"""Replaces ``model.generate``: the loop decodes calls with a strategy, and transformers decodes calls without a strategy."""

from __future__ import annotations

import inspect
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from ..constraints import Backend, Vocabulary
from ..engine.decode.call import decode
from ..engine.decode.engine import TEXTS, Engine, MemoryKey
from ..engine.decode.losses import warn_of_load
from ..engine.decode.output import RequestOutput
from ..engine.model.call_lock import CallLock
from ..engine.model.layout import number_of_logits, refuse_capture, refuse_unfit
from ..engine.model.ranks import Ranks
from ..engine.model.weights.quantization import Precision, scheme_of
from ..errors import SettingsError, UnsupportedError
from ..registry.resolve import resolve_backend
from ..settings import RuntimeSettings
from ..text_memory import TextMemory
from .arguments import OWN, PLAIN, check_inputs, refuse_arguments, shown
from .assistants import Assistants
from .attached import CopiedState, refuse_adapter_names, refuse_ignored_adapters
from .given import CallCache, Embeddings, beginning_of
from .grammars import vocabulary_of
from .multimodal import arguments_of, may_change_itself
from .options import NO_DEFAULTS, Defaults, Options
from .preparation import Kind, Preparation
from .prepared_call import PreparedCall, prepare
from .tokenizers import check_tokenizer

_POSITIONAL = [p for p in inspect.signature(GenerationMixin.generate).parameters if p not in ("self", "kwargs")]
_DEFAULTS = RuntimeSettings.model_validate({})
#: Greatest number of tokens that ``remember(texts=…)`` keeps; about 25 MB.
GIVEN_TOKENS = 1 << 18


class Generate:
    """Replaces ``model.generate``. A call without a strategy goes to transformers' ``generate``.

    Holds the model, not a bound method, so that ``copy.deepcopy(model)`` copies this object with the model.

    Args:
        previous: the ``generate`` that was set on the model object before, or None.
        wrapper: the ``PeftModel`` around the model whose ``generate`` is replaced, or None.
        defaults: options for calls that do not set them.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, previous: Any, wrapper: Any = None,
        defaults: Defaults = NO_DEFAULTS,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.previous, self.wrapper = model, tokenizer, previous, wrapper
        self.defaults = defaults
        self._remembered: dict[MemoryKey, Any] = {}
        self._assistants = Assistants()
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_engine", "_lock", "_preparations", "_schedulers")
        return {k: v for k, v in vars(self).items() if k not in left_out} | {"_remembered": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of the model gets its own engine, because it may move to another device.
        self._engine: Engine | None = None
        self._lock = CallLock()
        self._preparations: dict[Kind, Preparation] = {}
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()  # schedulers that decode with this model
        vars(self).update(state)

    def state(self) -> CopiedState:
        """The model's state for copies; ``enable`` sets this method as the model's ``__getstate__``."""
        return CopiedState(vars(self.model if self.wrapper is None else self.wrapper), self.previous)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(GenerationMixin.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of ``model.generate``: in the loop if the call has a strategy, else with transformers."""
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"generate() takes {len(_POSITIONAL)} positional arguments, {len(args)} were given")
        positional = dict(zip(_POSITIONAL, args, strict=False))
        if twice := positional.keys() & kwargs.keys():
            raise TypeError(f"generate() got two values for {', '.join(sorted(twice))}")
        begun = time.perf_counter()
        with self._unchanged_by_others(positional | kwargs):
            options = Options.read(positional | kwargs, self.model.generation_config, self.defaults)
            if options is None:
                return self.plain(*args, **{name: value for name, value in kwargs.items() if name not in OWN})
            with ordinary_device(self.model):
                call = self._prepared(options)
                try:
                    written = decode(call.engine, replace(call.request, begun=begun))
                except BaseException as error:
                    if isinstance(getattr(error, "partial", None), RequestOutput):
                        error.partial = call.partial(error.partial)  # type: ignore[attr-defined]
                    raise
                call.judge(written)
                result = call.result(written)
                written.report.finished(begun)
                warn_of_load(written.report)  # comes last: `call.result` ends a streamer's line of output
                return result

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the ``generate`` that the model had before ``enable``."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        model: Any = self.wrapper if self.wrapper is not None else self.model
        # deepcopy would leave a stored bound method bound to the old model.
        return type(model).generate(model, *args, **kwargs)

    @contextmanager
    def _unchanged_by_others(self, given: Mapping[str, Any]) -> Iterator[None]:
        """A context in which no other call changes the model. Does nothing for a model that calls cannot change.

        Raises:
            UnsupportedError: the call has images or sounds, which may change the model, while a scheduler decodes with the model.
        """
        if not may_change_itself(self.model):
            yield
            return
        with self._lock:  # held from the change of the model to the last token
            if any(scheduler.alive for scheduler in self._schedulers):
                self._refuse_change(given)
            yield

    def share(self, scheduler: Any) -> None:
        """Makes calls that may change the model fail while `scheduler` is ``alive``. First waits for a running call."""
        with self._lock if may_change_itself(self.model) else nullcontext():
            self._schedulers.add(scheduler)

    def _refuse_change(self, given: Mapping[str, Any]) -> None:
        beside = [name for name in arguments_of(self.model) - PLAIN if given.get(name) is not None]
        if beside:
            raise UnsupportedError(
                f"generate of {type(self.model).__name__} may change the model for {', '.join(sorted(beside))}, and other requests are "
                "decoded at the same time: close the Scheduler, and call generate"
            )

    def prepared(self, **kwargs: Any) -> PreparedCall:
        """Checks and prepares a call of ``generate`` with a strategy, for a scheduler to decode. Raises the errors of ``generate``."""
        options = Options.read(kwargs, self.model.generation_config, self.defaults)
        assert options is not None, "only calls with a strategy are decoded in the loop"
        with ordinary_device(self.model):
            return self._prepared(options, shares=True)

    @torch.no_grad()
    def _prepared(self, options: Options, shares: bool = False) -> PreparedCall:
        """Checks a call before anything is changed, then prepares it. shares: whether a scheduler decodes the call with others."""
        refuse_capture(self.model.device)
        ready = self.ready_engine(options.runtime)
        if ready is None:  # an existing engine means that the model was checked
            refuse_unfit(self.model)
        refuse_ignored_adapters(self.model, self.wrapper)
        refuse_adapter_names(self.model)
        given = options.arguments
        refuse_arguments(options.configs, given, arguments_of(self.model))
        input_ids = given.get("input_ids")
        beginning = beginning_of(given, options.strategy, self.model, self.wrapper)
        if shares and beginning is not None:
            raise UnsupportedError(
                f"a prompt that begins with {beginning.name} does not share steps with other requests yet: call generate(strategy=…)"
            )
        changes = may_change_itself(self.model)
        if changes and shares:
            self._refuse_change(given)
        # With inputs_embeds, the mask covers the vectors and not input_ids.
        mask = None if isinstance(beginning, Embeddings) else given.get("attention_mask")
        check_inputs(
            self.model, given.get("inputs") if input_ids is None else input_ids, mask,
            beginning.length if isinstance(beginning, CallCache) else 0,
        )  # fmt: skip
        options.check()
        tokenizer = given.get("tokenizer") or self.tokenizer
        if tokenizer is not self.tokenizer:  # enable() has checked self.tokenizer
            check_tokenizer(self.model, tokenizer)

        def engine_of() -> Engine:  # called after transformers' preparation, which may change the model
            return (self.ready_engine(options.runtime) if changes else ready) or self.engine(options.runtime)

        return prepare(self.model, options, tokenizer, engine_of, self._assistants, self._preparations, beginning)

    def compiles_with(
        self, stops: Sequence[int], config: Mapping[str, Any] | None
    ) -> tuple[Vocabulary, Backend, float]:
        """The vocabulary, the backend and the time limit in seconds with which calls compile grammars.

        Args:
            stops: stop tokens.
            config: ``decoders_config`` of the calls.

        Raises:
            UnsupportedError: there is no tokenizer or no stop token, or the bytes of the tokens are unknown.
        """
        options = Options.read({"strategy": "autoregressive", "decoders_config": config}, None)
        assert options is not None
        vocabulary = vocabulary_of(self.tokenizer, number_of_logits(self.model), stops)
        return vocabulary, resolve_backend(options.runtime.constraint_backend), options.runtime.constraint_seconds

    def engine(self, runtime: RuntimeSettings = _DEFAULTS) -> Engine:
        """The engine for the model's current weights, and for the attention and precision that `runtime` sets. The engine is built on
        first use, and renewed or built again when the weights, the attention or the precision change.
        """
        # The lock lets first calls in two threads share an engine. Calls hold the same lock: with two locks, a streamer's nested
        # call and a call in another thread could deadlock.
        precision = _precision(runtime)
        with self._lock:
            Ranks.of(self.model).check("how they prepare it", runtime.attention, precision, self._engine is None)
            if self._engine is not None and not self._engine.refresh(self.model, runtime.attention, precision):
                self._remembered = self._given
                self._drop()
            if self._engine is None:
                self._engine = Engine(self.model, runtime.attention, self._lock, precision)
            if self._remembered:
                self._engine.remember(self._remembered)
                self._remembered = {}
            return self._engine

    def prepared_since(self, begun: float) -> float:
        """Seconds spent on preparing and checking the model since `begun` (``time.perf_counter()``)."""
        return sum(self._engine.prepared_since(begun)) if self._engine is not None else 0.0

    def ready_engine(self, runtime: RuntimeSettings) -> Engine | None:
        """The existing engine if it fits the model's current state and `runtime`, else None. Does not wait for the lock.

        A scheduler holds the lock during a step, and submitting a request should not wait for the step.
        """
        present = self._engine
        if present is None or self._remembered:
            return None
        return present if present.serves(self.model, runtime.attention, _precision(runtime)) else None

    @contextmanager
    def ahead(self) -> Iterator[float]:
        """A context that holds the model's lock. This thread gets it before other waiting threads. Yields the seconds of waiting."""
        begun = time.monotonic()
        self._lock.acquire(first=True)
        try:
            yield time.monotonic() - begun
        finally:
            self._lock.release()

    def release(self) -> None:
        """Frees the engines of the model and of its draft models; see :func:`decoders.release`."""
        with self._lock:
            self._drop()
            self._assistants.release()

    def forget(self) -> None:
        """Drops the texts and memories that earlier calls have left or the user has given; see :func:`decoders.forget`."""
        with self._lock:
            if self._engine is not None:
                self._engine.forget()
            self._remembered = {}
            self._assistants.forget()

    def memories(self) -> dict[MemoryKey, Any]:
        """Copies of the memories of strategies; see :func:`decoders.memories`."""
        with self._lock:
            kept = self._engine.memories() if self._engine is not None else {}
            return kept | self._remembered

    def remember(self, memories: Mapping[MemoryKey, Any]) -> None:
        """Gives `memories` to strategies, see :func:`decoders.remember`. They are stored here until there is an engine."""
        with self._lock:
            if self._engine is not None:
                self._engine.remember(memories)
            else:
                self._remembered |= memories

    def remember_texts(self, texts: Iterable[str | Sequence[int]]) -> int:
        """Adds texts to draft from, see :func:`decoders.remember`. Returns the number of tokens that were dropped to make room.

        Raises:
            SettingsError: a text is neither a string nor a list of the model's token ids, or there is no tokenizer for a string.
        """
        if isinstance(texts, str):
            raise SettingsError("remember() takes a list of texts: texts=[text]")
        tokens = [self._tokens_of(number, text) for number, text in enumerate(texts)]
        if not tokens:
            return 0
        with self._lock:
            known = self._engine.texts if self._engine is not None else self._remembered.get(TEXTS)
            kept: TextMemory = TextMemory(GIVEN_TOKENS) if known is None else known
            before = kept.dropped
            for text in tokens:
                kept.add(text)
            self.remember({TEXTS: kept})
            return kept.dropped - before

    @property
    def _given(self) -> dict[MemoryKey, Any]:
        """What the next engine, or the engine of a copy, drafts from: the user's texts, and memories that no engine has yet."""
        engine = self._engine  # another thread may drop it
        texts = engine.texts if engine is not None else None
        return self._remembered if texts is None else self._remembered | {TEXTS: texts}

    def _tokens_of(self, number: int, text: str | Sequence[int]) -> array[int]:
        if not isinstance(text, str):
            try:
                tokens = array("i", text)
            except (TypeError, OverflowError):
                raise SettingsError(
                    f"texts[{number}] is neither a text nor a list of token ids: {shown(text)}"
                ) from None
        elif self.tokenizer is not None:
            tokens = array("i", self.tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            raise SettingsError("remember() reads texts with a tokenizer: decoders.enable(model, tokenizer=…)")
        size = number_of_logits(self.model)
        if not all(0 <= token < size for token in tokens):
            raise SettingsError(f"texts[{number}] has token ids outside of the model's ids, 0 to {size - 1}")
        return tokens

    def _drop(self) -> None:
        if self._engine is not None:
            self._engine.release()
            self._engine = None


def _precision(runtime: RuntimeSettings) -> Precision:
    """The number formats of weights and cache that the settings ask for."""
    cache = runtime.kv_cache if runtime.kv_cache != "keep" else None
    return Precision(scheme_of(runtime.weights), cache, runtime.exact_products)


def ordinary_device(model: PreTrainedModel) -> AbstractContextManager:
    """A context in which torch's default device is a device that the loop can work with.

    The default stays if it is the model's device or the CPU, because the caller's processors and streamers may rely on it.
    """
    default = torch.get_default_device().type
    return nullcontext() if default in ("cpu", model.device.type) else torch.device("cpu")
