"""The schedulers of a server: one for the default strategy, and a bounded number for other strategies that requests name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SettingsError, amount
from ..registry import resolve_strategy
from ..scheduling.generation import Generation
from ..scheduling.scheduler import Scheduler
from .refusals import Refusal


@dataclass
class _Entry:
    """A scheduler and its requests. Each request has a number, its turn. Waiting requests with smaller turns are decoded first.

    Attributes:
        outstanding: the scheduler's unfinished requests, each with its turn.
        leases: number of requests that are being submitted.
        turn: the greatest turn among the requests that have left the queue. A client without waiting requests gets the next turn.
        turns: for each client with waiting requests, the turn of its latest request.
    """

    strategy: str
    scheduler: Scheduler
    outstanding: dict[Generation, int] = field(default_factory=dict)
    leases: int = 0
    turn: int = 0
    turns: dict[str, int] = field(default_factory=dict)

    def next_turn(self, client: str) -> int:
        """The turn of a new request of `client`: requests of different clients alternate in the queue (start-time fair queueing)."""
        begun = [turn for generation, turn in self.outstanding.items() if generation.waited is not None]
        self.turn = max([self.turn, *begun])
        self.turns = {name: turn for name, turn in self.turns.items() if turn > self.turn}
        turn = self.turns[client] = self.turns.get(client, self.turn) + 1
        return turn


class SchedulerPool:
    """Submits each request to the scheduler of its strategy. The first request with a strategy creates the scheduler.

    Args:
        model, tokenizer: shared by all schedulers.
        strategy, config: the default strategy and its settings, for requests that name no strategy. The settings also apply to
            requests that name the default strategy, unless the request sets them.
        most: greatest number of schedulers of other strategies. The default strategy's scheduler is never closed to make room.
        assistant: draft model for strategies that take one.
        options: further arguments of every :class:`~decoders.Scheduler`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, strategy: str, config: Mapping[str, Any], most: int,
        assistant: PreTrainedModel | None, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.most, self.assistant = model, tokenizer, most, assistant
        self.strategy, self.config, self.options = strategy, dict(config), dict(options)
        self.default = resolve_strategy(strategy, self.config).name
        self._default_key = _key(self.default, self.config)
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}  # by strategy and settings, as JSON; the most recently used comes last

    def submit(
        self, strategy: str | None, config: Mapping[str, Any] | None, prompt: list[int], on_done: Callable[[Generation], None],
        client: str = "", **arguments: Any,
    ) -> Generation:  # fmt: skip
        """Puts a request in the queue of its strategy's scheduler, and returns it.

        Args:
            client: a name of the client. Requests of different clients alternate in the queue, however many each client sends.
            on_done: called in the decoding thread when the request is done.
            arguments: arguments of :meth:`decoders.Scheduler.submit`.

        Raises:
            Refusal: all schedulers are busy with other strategies. Errors of :meth:`decoders.Scheduler.submit` are raised as they
                are.
        """
        entry = self._lease(strategy, config)
        try:
            with self._lock:
                turn = entry.next_turn(client)
            generation = entry.scheduler.submit(prompt, priority=-turn, **arguments)
            with self._lock:
                entry.outstanding[generation] = turn
        finally:
            with self._lock:
                entry.leases -= 1

        def ended(generation: Generation) -> None:
            with self._lock:
                entry.outstanding.pop(generation, None)
            on_done(generation)

        generation.add_done_callback(ended)
        return generation

    def _lease(self, strategy: str | None, config: Mapping[str, Any] | None) -> _Entry:
        name, settings = self._resolved(strategy, config)
        key = _key(name, settings)
        idle: Scheduler | None = None
        with self._lock:
            entry = self._entries.pop(key, None)
            # If an error outside of any request has ended the scheduler, a new scheduler replaces it.
            if entry is None or not entry.scheduler.alive:
                if key != self._default_key:
                    idle = self._make_room()
                entry = _Entry(name, self._scheduler(name, settings, key == self._default_key))
            self._entries[key] = entry
            entry.leases += 1
        if idle is not None:
            idle.close()
        return entry

    def _resolved(self, strategy: str | None, config: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
        """The name and the settings of the strategy that a request runs with.

        Raises:
            UnknownNameError, PluginError: the strategy was not found. Refusal: the strategies cannot be merged, or a setting has a
                wrong value.
        """
        given = dict(config or {})
        if strategy is None and not given:
            return self.default, self.config
        try:
            name = resolve_strategy(strategy or self.strategy).name
        except SettingsError as error:  # strategies that cannot be merged
            raise Refusal(400, str(error), param="strategy", code="invalid_value") from error
        settings = {**self.config, **given} if name == self.default else given
        try:
            resolve_strategy(strategy or self.strategy, settings)
        except SettingsError as error:
            message = f"strategy_config.{str(error).partition(': ')[2]}"  # without the name of the settings class
            raise Refusal(400, message, param="strategy_config", code="invalid_value") from error
        return name, settings

    def _make_room(self) -> Scheduler | None:
        """If the pool is full, removes the idle scheduler that was used longest ago (not the default strategy's), and returns it.

        Raises:
            Refusal: no scheduler is idle.
        """
        others = {key: entry for key, entry in self._entries.items() if key != self._default_key}
        if len(others) < self.most:
            return None
        for key, entry in others.items():
            if not (entry.outstanding or entry.leases):
                return self._entries.pop(key).scheduler
        busy = ", ".join(sorted({each.strategy for each in others.values()}))
        message = (
            f"this server runs at most {amount(self.most, 'strategy', 'strategies')} beside {self.default} at once; "
            f"busy: {busy}. Try again later"
        )
        raise Refusal(429, message, param="strategy", code="strategies_busy", headers={"Retry-After": "2"})

    def _scheduler(self, name: str, settings: dict[str, Any], first: bool) -> Scheduler:
        strategy = resolve_strategy(name, settings)
        options = dict(self.options)
        if self.assistant is not None and (strategy.needs_assistant or strategy.takes_assistant):
            options["assistant_model"] = self.assistant
        return Scheduler(self.model, tokenizer=self.tokenizer, strategy=strategy, first=first, **options)

    @property
    def strategies(self) -> list[str]:
        """The strategies that have a scheduler."""
        with self._lock:
            return [entry.strategy for entry in self._entries.values()]

    @property
    def waiting(self) -> int:
        """The number of requests in all queues."""
        with self._lock:
            return sum(entry.scheduler.waiting for entry in self._entries.values())

    @property
    def running(self) -> int:
        """The number of rows in use."""
        with self._lock:
            return sum(entry.scheduler.running for entry in self._entries.values())

    @property
    def outstanding(self) -> int:
        """The number of unfinished requests."""
        with self._lock:
            return sum(len(entry.outstanding) for entry in self._entries.values())

    def cancel(self) -> None:
        """Cancels all requests."""
        with self._lock:
            every = [generation for entry in self._entries.values() for generation in entry.outstanding]
        for generation in every:
            generation.cancel()

    def close(self) -> None:
        """Cancels the remaining requests, and closes all schedulers."""
        with self._lock:
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.scheduler.close(cancel=True)


def _key(strategy: str, settings: Mapping[str, Any]) -> str:
    return json.dumps([strategy, settings], sort_keys=True)
