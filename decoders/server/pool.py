"""Schedulers, one for each strategy that requests ask for: made on demand, a bounded number, the one that rested longest closed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..plugins import resolve_strategy
from ..serving.generation import Generation
from ..serving.scheduler import Scheduler
from .refusals import Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Settings that name files or models. What a server loads is its operator's to say.
OPERATORS = ("draft_model", "heads", "head", "table")


@dataclass
class _Entry:
    """A scheduler and the requests that it has.

    Attributes:
        used: a count that grows with every request of the pool.
    """

    strategy: str
    scheduler: Scheduler
    outstanding: set[Generation] = field(default_factory=set)
    leases: int = 0
    used: int = 0


class SchedulerPool:
    """Submits requests to the scheduler of their strategy.

    Args:
        model, tokenizer: of all of them.
        strategy, config: of requests that name none; the settings also hold for requests that name this strategy.
        most: schedulers at a time.
        assistant: draft model for strategies that take one.
        options: of every :class:`~decoders.Scheduler`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, strategy: str, config: Mapping[str, Any], most: int,
        assistant: PreTrainedModel | None, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.most, self.assistant = model, tokenizer, most, assistant
        self.strategy, self.config, self.options = strategy, dict(config), dict(options)
        self.default = resolve_strategy(strategy, self.config).name
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._closing: list[threading.Thread] = []
        self._count = 0

    def submit(
        self, strategy: str | None, config: Mapping[str, Any] | None, prompt: list[int], told: Callable[[Generation], None],
        **arguments: Any,
    ) -> Generation:  # fmt: skip
        """Puts a request in the queue of its strategy's scheduler.

        Args:
            told: called once it is done, in the thread that decodes.
            arguments: of :meth:`decoders.Scheduler.submit`.

        Raises:
            Refusal: all schedulers are busy with other strategies, or a setting is the operator's.
            Whatever :meth:`decoders.Scheduler.submit` raises.
        """
        entry = self._lease(strategy, config)
        try:
            generation = entry.scheduler.submit(prompt, **arguments)
            with self._lock:
                entry.outstanding.add(generation)
        finally:
            with self._lock:
                entry.leases -= 1

        def ended(generation: Generation) -> None:
            with self._lock:
                entry.outstanding.discard(generation)
            told(generation)

        generation.add_done_callback(ended)
        return generation

    def _lease(self, strategy: str | None, config: Mapping[str, Any] | None) -> _Entry:
        name, settings = self._resolved(strategy, config)
        key = json.dumps([name, settings], sort_keys=True)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._make_room()
                entry = self._entries[key] = _Entry(name, self._scheduler(name, settings))
            self._count += 1
            entry.used = self._count
            entry.leases += 1
            return entry

    def _resolved(self, strategy: str | None, config: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
        """Name and settings in force.

        Raises:
            UnknownNameError, SettingsError, PluginError: there is no such strategy, or setting. Refusal: it is the operator's.
        """
        given = dict(config or {})
        if strategy is None and not given:
            return self.default, self.config
        _refuse_operators(given, "strategy_config")
        name = resolve_strategy(strategy or self.strategy).name
        settings = {**self.config, **given} if name == self.default else given
        resolve_strategy(strategy or self.strategy, settings)
        return name, settings

    def _make_room(self) -> None:
        """Closes the scheduler that has rested longest, if there are as many as there may be."""
        if len(self._entries) < self.most:
            return
        resting = [(key, each) for key, each in self._entries.items() if not (each.outstanding or each.leases)]
        if not resting:
            busy = ", ".join(sorted({each.strategy for each in self._entries.values()}))
            message = f"{len(self._entries)} strategies are busy, which is all that run at a time: {busy}. Try again later, or take one"
            raise Refusal(429, message, param="strategy", code="strategies_busy", headers={"Retry-After": "2"})
        key, entry = min(resting, key=lambda pair: pair[1].used)
        del self._entries[key]
        thread = threading.Thread(target=entry.scheduler.close, name="decoders-closing", daemon=True)
        thread.start()
        self._closing = [*(each for each in self._closing if each.is_alive()), thread]

    def _scheduler(self, name: str, settings: dict[str, Any]) -> Scheduler:
        strategy = resolve_strategy(name, settings)
        options = dict(self.options)
        if self.assistant is not None and (strategy.needs_assistant or strategy.takes_assistant):
            options["assistant_model"] = self.assistant
        return Scheduler(self.model, tokenizer=self.tokenizer, strategy=strategy, **options)

    @property
    def strategies(self) -> list[str]:
        """Those that have a scheduler."""
        with self._lock:
            return [entry.strategy for entry in self._entries.values()]

    @property
    def waiting(self) -> int:
        """Requests in all queues."""
        with self._lock:
            return sum(entry.scheduler.waiting for entry in self._entries.values())

    @property
    def running(self) -> int:
        """Rows in use."""
        with self._lock:
            return sum(entry.scheduler.running for entry in self._entries.values())

    @property
    def outstanding(self) -> int:
        """Requests that have not come to their end."""
        with self._lock:
            return sum(len(entry.outstanding) for entry in self._entries.values())

    def cancel(self) -> None:
        """Ends all requests."""
        with self._lock:
            every = [generation for entry in self._entries.values() for generation in entry.outstanding]
        for generation in every:
            generation.cancel()

    def close(self) -> None:
        """Cancels what is left and frees everything."""
        with self._lock:
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.scheduler.close(cancel=True)
        for thread in self._closing:
            thread.join()


def _refuse_operators(config: Any, place: str) -> None:
    """Raises for settings that name files or models, at any depth."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in OPERATORS and value is not None:
                message = f"{place}.{key} names a file or a model: the server's operator says which, with --set or --assistant"
                raise Refusal(400, message, param=f"{place}.{key}", code="operators_setting")
            _refuse_operators(value, f"{place}.{key}")
    elif isinstance(config, list):
        for number, value in enumerate(config):
            _refuse_operators(value, f"{place}.{number}")
    elif isinstance(config, str) and any(mark in config for mark in "/\\~"):
        message = f"{place}: {config!r} looks like a path, and a server reads none that a client names"
        raise Refusal(400, message, param=place, code="operators_setting")
