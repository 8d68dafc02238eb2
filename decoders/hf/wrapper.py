"""What stands in the place of ``model.generate``: transformers' own without a strategy, the loop with one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from ..engine.decode.engine import Engine, MemoryKey
from ..engine.model.fitness import refuse_capture, refuse_unfit
from ..engine.model.locks import CallLock
from ..engine.model.weights.quantization import Precision, scheme_of
from ..settings import Attention, RuntimeSettings
from .arguments import refuse_arguments
from .assistants import Assistants
from .call import GenerateCall, PreparedCall
from .copies import CopiedState
from .inputs import check_inputs
from .options import OWN, Options
from .peft import refuse_adapter_names, refuse_prompt_learning
from .preparations import Preparations

_POSITIONAL = [p for p in inspect.signature(GenerationMixin.generate).parameters if p not in ("self", "kwargs")]


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
        self._remembered: dict[MemoryKey, Any] = {}
        self._lock = CallLock()
        self._assistants = Assistants()
        self._preparations = Preparations()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_engine", "_lock")}  # they stay with this copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _engine=None, _lock=CallLock())

    def state(self) -> CopiedState:
        """What copies of the model are made of; ``enable`` puts it in the place of the model's ``__getstate__``."""
        return CopiedState(vars(self.model if self.wrapper is None else self.wrapper), self.previous)

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
        self,
        attention: Attention = "auto",
        weights: Literal["keep", "packed", "int8", "int4"] = "keep",
        kv_cache: Literal["keep", "int8"] = "keep",
        exact_products: bool = True,
    ) -> Engine:
        """The engine for the model's present weights; built on first use and again after weights change."""
        # Two first calls from two threads share one. Calls hold the same lock: with two, a call made within a call (by a
        # streamer) and one in another thread would wait for each other.
        precision, originals = _formats(weights, kv_cache, exact_products)
        with self._lock:
            if self._engine is not None and not self._engine.refresh(self.model, attention, precision):
                self._drop()
            if self._engine is None:
                self._engine = Engine(self.model, attention, self._lock, precision)
            if self._remembered:
                self._engine.remember(self._remembered)
                self._remembered = {}
            self._engine.settle_originals(self.model, originals)
            return self._engine

    def ready_engine(self, runtime: RuntimeSettings) -> Engine | None:
        """The engine if it is there and the model is as it was; nobody is waited for. None: :meth:`engine` has something to do.

        A scheduler holds the lock for a step at a time: requests that are submitted need not wait for each.
        """
        present = self._engine
        if present is None or self._remembered:
            return None
        formats = _formats(runtime.weights, runtime.kv_cache, runtime.exact_products)
        return present if present.serves(self.model, runtime.attention, *formats) else None

    def give_way(self) -> None:
        """Lets other threads' calls on the model go first that wait for it; for whoever decodes step after step."""
        self._lock.give_way()

    def release(self) -> None:
        """See :func:`decoders.release`."""
        with self._lock:
            self._drop()
            self._assistants.release()

    def forget(self) -> None:
        """See :func:`decoders.forget`."""
        with self._lock:
            if self._engine is not None:
                self._engine.forget()
            self._remembered = {}
            self._assistants.forget()

    def memories(self) -> dict[MemoryKey, Any]:
        """See :func:`decoders.memories`."""
        with self._lock:
            kept = self._engine.memories() if self._engine is not None else {}
            return kept | self._remembered

    def remember(self, memories: Mapping[MemoryKey, Any]) -> None:
        """See :func:`decoders.remember`. Kept until there is an engine, which packs the weights."""
        with self._lock:
            if self._engine is not None:
                self._engine.remember(memories)
            else:
                self._remembered |= memories

    def _drop(self) -> None:
        if self._engine is not None:
            self._engine.release(self.model)
            self._engine = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate``."""
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"generate() takes {len(_POSITIONAL)} positional arguments, {len(args)} were given")
        positional = dict(zip(_POSITIONAL, args, strict=False))
        if twice := positional.keys() & kwargs.keys():
            raise TypeError(f"generate() got two values for {', '.join(sorted(twice))}")
        options = Options.read(positional | kwargs, self.model.generation_config)
        if options is None:
            return self.plain(*args, **{name: value for name, value in kwargs.items() if name not in OWN})
        with ordinary_device(self.model):
            return self._call(options).generate()

    def prepared(self, **kwargs: Any) -> PreparedCall:
        """A call of ``generate`` with a strategy, checked and prepared, for whoever decodes it.

        Raises:
            what ``generate`` raises.
        """
        options = Options.read(kwargs, self.model.generation_config)
        assert options is not None, "only calls with a strategy are decoded in the loop"
        with ordinary_device(self.model):
            return self._call(options).prepared()

    def _call(self, options: Options) -> GenerateCall:
        """Refuses what cannot be honoured, before anything is touched."""
        refuse_capture(self.model.device)
        runtime = options.runtime
        ready = self.ready_engine(runtime)
        if ready is None:  # else it is the model that was found fit
            refuse_unfit(self.model)
        refuse_prompt_learning(self.model, self.wrapper)
        refuse_adapter_names(self.model)
        arguments = options.arguments
        refuse_arguments(options.configs, arguments)
        input_ids = arguments.get("input_ids")
        check_inputs(
            self.model, arguments.get("inputs") if input_ids is None else input_ids, arguments.get("attention_mask")
        )
        options.check()
        anew = partial(self.engine, runtime.attention, runtime.weights, runtime.kv_cache, runtime.exact_products)
        engine = anew if ready is None else lambda: ready
        tokenizer = arguments.get("tokenizer") or self.tokenizer
        return GenerateCall(self.model, engine, self._assistants, self._preparations, options, tokenizer)


def _formats(
    weights: Literal["keep", "packed", "int8", "int4"], kv_cache: Literal["keep", "int8"], exact_products: bool
) -> tuple[Precision, Literal["keep", "packed"]]:
    """The number formats that an engine computes in, and what becomes of the model's own weights."""
    precision = Precision(scheme_of(weights), kv_cache if kv_cache != "keep" else None, exact_products)
    return precision, "packed" if weights == "packed" else "keep"


def ordinary_device(model: PreTrainedModel) -> AbstractContextManager:
    """Within it, tensors for which nobody names a device are made where the loop expects them.

    A default device that is the model's, or the CPU, stays: processors and streamers of the caller may count on it.
    """
    default = torch.get_default_device().type
    return nullcontext() if default in ("cpu", model.device.type) else torch.device("cpu")
