"""Decodes the requests of all threads together, in one thread. Requests join and leave between two steps."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..enabling import PreparedCall, check_arguments, enabled, refuse_misspelt
from ..engine.model.ranks import Ranks
from ..engine.model.threads import release_threads
from ..errors import CancelledError, ContextLengthError, QueueFull, SettingsError, UnsupportedError, amount
from ..strategy import Strategy
from .arguments import check_count, check_number, own_arguments, prompt_ids
from .generation import Generation
from .lanes import Lanes, copied, reason
from .queue import Waiting

log = logging.getLogger("decoders")

_FORKED = "the scheduler belongs to the process from which this process was forked: create another scheduler here"

#: If no request runs, the first requests wait for further requests, to share steps, until none has come for this many seconds.
GATHERING = 0.002
#: Greatest number of seconds that the first requests wait for further requests.
LONGEST_GATHERING = 0.05
#: A scheduler with `first` uses the model for this many times as long as all other users of the model together.
FIRST_SHARE = 2


class Scheduler:
    """Decodes many requests at a time on one model. Each request gets the tokens of a separate call with the same seed.

    One thread decodes. Requests share steps if they have the same strategy, verifier and kinds of processors, whatever their
    lengths, seeds, sampling values, stop tokens, grammars and budgets. Requests that cannot share steps take turns, step by step.
    Calls of ``generate`` on the same model take turns with the scheduler, too.

    Use it as a context manager, or :meth:`close` it. A scheduler belongs to the process that created it: in a forked child it is closed
    and its requests have ended, so create another scheduler in the child.

    Args:
        model: the model; the scheduler enables it if it is not enabled yet.
        tokenizer: as in :func:`decoders.enable`; required for prompts that are text.
        strategy, strategy_config: as in ``generate``, for requests without a strategy.
        rows: greatest number of requests decoded at once.
        slots: greatest number of tokens of a request, prompt and new tokens together.
        queue: greatest number of requests that wait.
        longest_pause: seconds per step by which prefilling a prompt may delay the requests that are being decoded.
        first: whether this scheduler has priority over other schedulers and calls on the model. While it has work, the others together
            get a third of the time. If False, all take turns.
        defaults: arguments of ``generate`` for requests that do not set them.

    Raises:
        SettingsError: a size below one, or a setting that no request can have. UnknownNameError: no strategy has the name.
        UnsupportedError: a model that cannot be decoded, or an argument that ``generate`` does not have.
    """

    def __init__(
        self, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None,
        strategy: str | Strategy = "autoregressive", strategy_config: Mapping[str, Any] | None = None, rows: int = 8,
        slots: int = 4096, queue: int = 1024, longest_pause: float = 0.25, first: bool = False, **defaults: Any,
    ) -> None:  # fmt: skip
        for name, value in (("rows", rows), ("slots", slots), ("queue", queue)):
            check_count(name, value)
        check_number("longest_pause", longest_pause, "more than 0 seconds", above=0)
        refuse_misspelt(defaults, Scheduler)
        self._generate = enabled(model, tokenizer)
        self._defaults = own_arguments(defaults)
        self._strategy: dict[str, Any] = {"strategy": strategy, "strategy_config": strategy_config}
        check_arguments(model, self._defaults | self._strategy)
        if (ranks := Ranks.of(model)).several:
            raise UnsupportedError(
                f"{ranks.size} processes share this model, and a request that reaches one of them is unknown to the others: call "
                "generate with whole batches in every process, or run a Scheduler in each of several processes that hold the whole "
                "model, as decoders-ray does (`pip install ./plugins/decoders-ray` in a checkout)"
            )
        self.rows, self.slots, self.queue, self.longest_pause, self.first = rows, slots, queue, longest_pause, first
        self._changed = threading.Condition()
        self._waiting = Waiting()
        self._coming = 0  # number of requests that are being prepared and will soon be in the queue
        self._lanes = Lanes(rows, longest_pause)
        self._admitting: Generation | None = None  # the request that has left the queue and has no row yet
        self._closing = self._forked = False
        self._error: BaseException | None = None  # an error outside of any request, which ended the scheduler
        self.steps = 0
        # Thread.is_alive is not used: after Ctrl-C interrupts Thread.join, Python before 3.13 reports that the thread has ended.
        self._ended = threading.Event()
        self._generate.share(self)
        release_threads()
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._ended), name="decoders-scheduler", daemon=True
        )
        self._thread.start()
        _open.add(self)

    def submit(
        self, prompt: str | list[int] | Tensor, *, priority: int = 0, deadline: float | None = None, wait: bool = False,
        top_logprobs: int | None = None, cache_salt: str = "", **arguments: Any,
    ) -> Generation:  # fmt: skip
        """Puts a request in the queue.

        Args:
            prompt: text, or token ids ``[P]`` or ``[1, P]``.
            priority: requests with a higher priority go first; ties are served in order of arrival.
            deadline: seconds from now after which an unfinished request ends with a DeadlineError; None for no deadline.
            wait: whether to wait for room in a full queue. Callbacks that run in the decoding thread, which makes room, never wait.
            top_logprobs: number of likeliest tokens whose log-probabilities to return besides each new token's own, in
                :attr:`Generation.logprobs`; 0 or more; None for no log-probabilities.
            cache_salt: requests with different salts share nothing that reveals their texts: neither keys and values of common
                prompt beginnings, nor what strategies learn from texts.
            arguments: arguments of ``generate``.

        Raises:
            QueueFull: the queue is full. CancelledError: the scheduler is closed, or belongs to another process.
            ContextLengthError: prompt and new tokens exceed `slots`.
            SettingsError, InputError: a wrong value. Errors of ``generate`` for the arguments are raised as they are.
        """
        refuse_misspelt(arguments, self.submit)
        check_number("priority", priority, "a number (higher numbers go first, 0 is the default)")
        if deadline is not None:
            check_number("deadline", deadline, "a number of seconds from now, or None for no deadline")
        if not isinstance(cache_salt, str):
            raise SettingsError(f'cache_salt must be a text ("" is the default), not {cache_salt!r}')
        if top_logprobs is not None:
            check_count("top_logprobs", top_logprobs, least=0)
        self._check_open()
        if not wait:
            self._check_room()
        with self._comes():
            tokenizer = arguments.get("tokenizer") or self._generate.tokenizer
            ids = prompt_ids(prompt, tokenizer).to(self._generate.model.device)
            call = self._prepared(ids, own_arguments(arguments))
            returned = replace(call.request.returned, top_logprobs=top_logprobs)
            call = replace(call, request=replace(call.request, returned=returned, salts=(cache_salt,)))
            text_of = tokenizer if isinstance(prompt, str) else None
            generation = Generation(call, text_of, priority, deadline, self._cancel)
            release_threads()  # frees the threads of loading and checking, since from here on the scheduler's thread decodes
        with self._changed:
            wait = wait and threading.current_thread() is not self._thread
            while wait and len(self._waiting) >= self.queue and not self._closing:
                self._changed.wait()
            self._check_open()
            self._check_room()
            self._waiting.put(generation, priority)
            self._changed.notify_all()
        return generation

    def close(self, cancel: bool = False) -> None:
        """Refuses new requests, waits for the submitted requests or cancels them, and frees their caches."""
        if not self.alive:  # does not wait, because waiting is impossible at interpreter exit
            return
        with self._changed:
            self._closing = True
            if cancel:
                for generation in self._all():
                    generation.cancelled = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._ended.wait()
        _open.discard(self)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(cancel=error is not None)

    @property
    def alive(self) -> bool:
        """Whether the scheduler's thread runs. The thread ends with :meth:`close`, or with an error outside of any request."""
        return not self._ended.is_set()

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests that have a row."""
        return self._lanes.running

    def _check_process(self) -> None:
        """Raises CancelledError in a child that was forked from the scheduler's process, where no thread decodes."""
        if self._forked:
            raise CancelledError(_FORKED)

    def _check_open(self) -> None:
        self._check_process()
        if self._error is not None:
            raise CancelledError(f"an error has ended the scheduler: {self._error!r}") from self._error
        if self._closing:
            raise CancelledError("the scheduler is closed")

    def _check_room(self) -> None:
        if len(self._waiting) >= self.queue:
            raise QueueFull(
                f"the queue takes no more waiting requests (queue={self.queue}): try again later, or submit(…, wait=True)"
            )

    def _prepared(self, ids: Tensor, arguments: dict[str, Any]) -> PreparedCall:
        if arguments.get("strategy", self) is None:
            del arguments["strategy"]
        strategy = {} if "strategy" in arguments else self._strategy
        everything = self._defaults | strategy | arguments
        call = self._generate.prepared(input_ids=ids, attention_mask=torch.ones_like(ids), **everything)
        if len(call.request.prompts) != 1:
            raise UnsupportedError("num_return_sequences: submit the prompt several times, with a seed each")
        tokens = len(call.request.prompts[0]) + call.request.new_tokens
        if tokens > self.slots:
            raise ContextLengthError(
                f"{amount(len(call.request.prompts[0]), 'prompt token')} plus {call.request.new_tokens} new tokens exceed the "
                f"{self.slots} slots of a row: ask for fewer tokens, or give the Scheduler more slots="
            )
        call.engine.target.check_lengths(tokens, self.rows)
        return call

    @contextmanager
    def _comes(self) -> Iterator[None]:
        """A context in which a request is prepared; `_coming` counts the requests that are being prepared for the queue."""
        with self._changed:
            self._coming += 1
        try:
            yield
        finally:
            with self._changed:
                self._coming -= 1

    def _cancel(self, generation: Generation) -> None:
        """Cancels a request: immediately if it is in the queue, after the current step if it has a row."""
        with self._changed:
            waited = self._waiting.remove(generation)
            self._changed.notify_all()
        if waited:
            generation._end(CancelledError("the request was cancelled"))

    def _all(self) -> list[Generation]:
        admitting = [self._admitting] if self._admitting is not None else []
        active = [generation for generation in self._lanes.generations() if generation is not self._admitting]
        return self._waiting.all() + admitting + active

    def _abandon(self) -> None:
        """Ends the scheduler in a forked child, which has no decoding thread, and where a thread of the parent may hold the lock."""
        self._changed = threading.Condition()
        self._closing = self._forked = True
        self._ended = threading.Event()
        self._ended.set()
        left = self._all()
        self._waiting, self._admitting, self._lanes = Waiting(), None, Lanes(self.rows, self.longest_pause)
        for generation in left:
            generation._abandon(CancelledError(_FORKED))

    # Run by the scheduler's thread:

    def _idle(self, seconds: float) -> bool:
        """Waits up to `seconds` for work. Returns False once the scheduler is closed and has no work left."""
        with self._changed:
            if not (self._waiting or self.running or self._closing):
                release_threads()
                self._changed.wait(seconds)
            return bool(self._waiting or self.running or not self._closing)

    def _turn(self) -> None:
        """Runs one round. With `first`, runs rounds for :data:`FIRST_SHARE` times the time that the scheduler waited for the model."""
        self._gather()
        if not self.first:
            self._round()
            return
        with self._generate.ahead() as waited:
            until = time.monotonic() + FIRST_SHARE * waited
            self._round()
            while self.running and time.monotonic() < until:
                self._round()

    def _round(self) -> None:
        """Ends cancelled and late requests, gives rows to waiting requests, and runs a step of every lane."""
        self._sweep()
        self._admit()
        self.steps += self._lanes.step()

    def _sweep(self) -> None:
        """Ends requests that were cancelled or whose deadline has passed."""
        now = time.monotonic()
        over = []
        with self._changed:
            # Before `expiry` no deadline has passed, and cancelled requests have left the queue: `_cancel` removes them.
            if now >= self._waiting.expiry or self._closing:
                over = self._waiting.take_over(now)
                self._changed.notify_all()
        for generation in over:
            generation._end(reason(generation))
        self._lanes.sweep(now)

    def _gather(self) -> None:
        """If no request runs yet, waits a moment for further requests, since steps with empty rows cost more than this wait."""
        until = time.monotonic() + LONGEST_GATHERING
        with self._changed:
            while not (self.running or self._closing) and 0 < (count := len(self._waiting)) < self.rows:
                self._changed.wait(GATHERING)
                others = self._coming or len(self._waiting) > count
                if not others or time.monotonic() >= until:
                    return

    def _admit(self) -> None:
        """Gives free rows to waiting requests."""
        while self.running < self.rows:
            with self._changed:
                if not self._waiting:
                    break
                generation = self._waiting.next()
                self._changed.notify_all()
                cancelled = generation.cancelled  # if so, `_cancel` will not find the request in the queue
                self._admitting = None if cancelled else generation
            if cancelled:
                generation._end(reason(generation))
                continue
            try:
                self._lanes.admit(generation)
            except Exception as error:
                generation._end(error)
            with self._changed:
                self._admitting = None
        self._lanes.close_idle()

    def _shut(self, error: BaseException | None = None) -> None:
        """Closes all lanes and ends the remaining requests."""
        with self._changed:
            self._closing, self._error = True, error
            left = self._all()
            self._waiting.clear()
            self._changed.notify_all()
        try:
            self._lanes.close()
        except Exception:
            log.exception("decoders: a batch of the scheduler could not be closed")
        for generation in left:
            generation._end(copied(error) if error else CancelledError("the scheduler was closed"))


def _work(reference: weakref.ref[Scheduler], ended: threading.Event) -> None:
    """The thread's function. It drops its reference to the scheduler after every turn, so that an unused scheduler can be freed."""
    error: BaseException | None = None
    try:
        try:
            while (scheduler := reference()) is not None and scheduler._idle(0.5):
                if scheduler._waiting or scheduler._lanes.used:
                    scheduler._turn()
                del scheduler
        except BaseException as caught:
            error = caught
        if (scheduler := reference()) is not None:
            scheduler._shut(error)
    finally:
        ended.set()


_open: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def _abandon_all() -> None:
    for scheduler in list(_open):
        scheduler._abandon()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_abandon_all)


@atexit.register
def _close_all() -> None:
    """Closes all schedulers at interpreter exit, where a decoding thread would crash."""
    for scheduler in list(_open):
        scheduler.close(cancel=True)
