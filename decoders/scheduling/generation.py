"""The handle of a request: returns its result, yields its tokens as they are generated, and cancels it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common.pieces import TextPieces, text_behind
from ..enabling import PreparedCall
from ..engine.decode.output import RequestOutput, TokenLogprobs
from ..errors import CancelledError
from ..report import Report

log = logging.getLogger("decoders")


class Generation:
    """A request of a :class:`~decoders.Scheduler`; safe to use from any thread, and in any event loop.

    Iterating, with ``for`` or ``async for``, yields new output when it arrives: pieces of text if the prompt was text, else token ids.
    ``await`` returns the result.

    Attributes:
        submitted: time of submission, by ``time.monotonic()``.
        waited: seconds that the request was in the queue; None while it is in the queue.
    """

    def __init__(
        self, call: PreparedCall, tokenizer: PreTrainedTokenizerBase | None, priority: int, deadline: float | None,
        on_cancel: Callable[[Generation], None],
    ) -> None:  # fmt: skip
        self.call, self.tokenizer, self.priority = call, tokenizer, priority
        self.submitted = time.monotonic()
        self.expires = self.submitted + (math.inf if deadline is None else deadline)
        self.waited: float | None = None
        self.member: RequestOutput | None = None
        self.cancelled = False
        self._on_cancel = on_cancel
        self._unjudged = False
        self._renew_conditions()
        self._count = 0  # number of new tokens that readers may see
        self._times: list[tuple[float, int]] = []
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._report: Report | None = None
        self._listeners: list[Callable[[], None]] = []
        self._callbacks: list[Callable[[Generation], None]] = []

    def result(self, timeout: float | None = None) -> Any:
        """Waits until the request ends. Returns the new text if the prompt was text, else the result of ``generate`` for the prompt.

        Raises:
            TimeoutError: the request is not done within `timeout` seconds; the request continues.
            CancelledError, DeadlineError: the request was cancelled, or its deadline passed. Errors of ``generate`` are raised as
                they are. The ``partial`` of every error except TimeoutError is the output so far.
        """
        if (error := self.exception(timeout)) is not None:
            raise error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the request ends. Returns the error that :meth:`result` would raise; None without an error.

        Raises:
            TimeoutError: see :meth:`result`.
        """
        with self._over:
            if not self._over.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"not done after {timeout} s")
        self._judge()
        return self._error

    def done(self) -> bool:
        """Whether the request has ended: completed, failed or cancelled."""
        return self._done

    def add_done_callback(self, function: Callable[[Generation], None]) -> None:
        """Calls `function` with this generation when the request is done, or at once if it is done already.

        Usually the decoding thread makes the call, so `function` must be quick. An exception in `function` is logged by the logger
        ``decoders``; other requests continue.
        """
        with self._changed:
            if not self._done:
                self._callbacks.append(function)
                return
        self._call_back(function)

    def _call_back(self, function: Callable[[Generation], None]) -> None:
        try:
            function(self)
        except (Exception, SystemExit):
            log.exception("decoders: a callback of a request raised (add_done_callback(%r))", function)

    def cancel(self) -> bool:
        """Cancels the request; its row becomes free after the current step. Returns False if the request had already ended."""
        with self._changed:
            if self._done:
                return False
            self.cancelled, on_cancel = True, self._on_cancel
        on_cancel(self)
        return True

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return self._so_far("generated")

    @property
    def drafted(self) -> list[bool]:
        """For each of :attr:`tokens`, whether it was an accepted draft token; if not, the target model chose it."""
        return [drafter != "" for drafter in self._so_far("drafters")]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of :attr:`tokens`, if `top_logprobs` was passed to ``submit``; else an empty list."""
        return self._so_far("logprobs")

    @property
    def times(self) -> list[tuple[float, int]]:
        """For each step with new tokens: when it ended, by ``time.monotonic()``, and the number of the request's new tokens by then."""
        with self._changed:
            return list(self._times)

    def _so_far(self, name: str) -> list[Any]:
        with self._changed:
            return getattr(self.member, name)[0][: self._count] if self.member is not None else []

    @property
    def text(self) -> str:
        """The new text so far; needs a tokenizer."""
        assert self.tokenizer is not None, "without a tokenizer there are tokens only"
        return self.text_by(self.tokenizer)

    def text_by(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The new text so far, decoded by `tokenizer`."""
        return text_behind(tokenizer, self.prompt, self.tokens)

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        ids: list[int] = self.call.request.prompts[0].tolist()
        return ids

    @property
    def report(self) -> Report | None:
        """The report on this request; None until it is done. Times include steps that the request shared with other requests.

        If the grammar accepts more than its specification, the first thread that reads the report or the result validates the text. The
        decoding thread never validates texts, because validation may take long.
        """
        self._judge()
        return self._report

    def _judge(self) -> None:
        with self._judging:
            if self._unjudged:
                assert self.member is not None
                try:
                    self.call.judge(self.member)
                except Exception as error:  # a plugin's grammar may raise anything
                    error.partial, self._error = self._value, error  # type: ignore[attr-defined]
                self._unjudged = False

    def __iter__(self) -> Iterator[Any]:
        seen, done, pieces = 0, False, self._new_pieces()
        while not done:
            tokens, done = self._wait(seen)
            yield from _cut(tokens, seen, done, pieces)
            seen = len(tokens)
        if self._error is not None:
            raise self._error

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result_async().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        seen, pieces = 0, self._new_pieces()
        async with aclosing(self._progress()) as progress:
            async for tokens, done in progress:
                for piece in _cut(tokens, seen, done, pieces):
                    yield piece
                seen = len(tokens)

    async def batches(self) -> AsyncGenerator[list[int]]:
        """Yields new token ids as they arrive, the ids that arrive together in one list. Raises the request's error at the end."""
        seen = 0
        async with aclosing(self._progress()) as progress:
            async for tokens, _ in progress:
                if len(tokens) > seen:
                    yield tokens[seen:]
                seen = len(tokens)

    async def _progress(self) -> AsyncGenerator[tuple[list[int], bool]]:
        """Yields all tokens so far, and whether the request has ended, when tokens arrive. Raises the request's error at the end."""
        news = asyncio.Event()
        try:
            with self.telling(news.set):
                while True:
                    news.clear()
                    tokens, done = self._wait(-1)
                    yield tokens, done
                    if done:
                        break
                    await news.wait()
        except (asyncio.CancelledError, GeneratorExit):  # the caller has stopped listening
            self.cancel()
            raise
        if self._error is not None:
            raise self._error

    async def _result_async(self) -> Any:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def ended(_: Generation) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(over.set)

        self.add_done_callback(ended)
        try:
            await over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._unjudged:
            await asyncio.to_thread(self._judge)
        return self.result(0)

    @contextmanager
    def telling(self, function: Callable[[], object]) -> Iterator[None]:
        """A context in which the running event loop calls `function` after each step with new tokens, and when the request ends."""
        loop = asyncio.get_running_loop()

        def listener() -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(function)

        with self._changed:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def _new_pieces(self) -> TextPieces | None:
        return TextPieces(self.tokenizer, self.prompt) if self.tokenizer is not None else None

    def _wait(self, seen: int) -> tuple[list[int], bool]:
        """Waits for more than `seen` new tokens, or for the end. Returns all tokens so far, and whether the request has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._count > seen)
            return self.tokens, self._done

    # Called by the scheduler:

    def _show(self) -> None:
        """Makes a step's new tokens visible to readers, and wakes the readers."""
        assert self.member is not None
        count = len(self.member.generated[0])
        if count == self._count:
            return
        if not self._count:
            self.member.report.time_to_first_token = time.monotonic() - self.submitted
        with self._changed:
            self._count = count
            self._times.append((time.monotonic(), count))
            self._changed.notify_all()
        self._tell()

    def _end(self, error: BaseException | None = None) -> None:
        """Ends the request with its result, or with `error`."""
        value: Any = None
        if self.member is not None:
            self._show()
            self._report = self.member.report
            self._report.timings.wait += time.monotonic() - self.submitted - self._report.timings.call
            try:
                value = self.call.result(self.member) if error is None else self.call.partial(self.member)
                if self.tokenizer is not None:
                    value = self.text
            except BaseException as own:  # such as an error of a streamer
                error = error or own
        elif error is None:
            error = CancelledError("the request was never decoded")
        if error is not None:
            error.partial = value  # type: ignore[attr-defined]
        with self._changed:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            self._unjudged = error is None and self.call.grammars.any
            # Dropped, so that a caller who keeps the result does not keep the scheduler and the callbacks alive.
            self._on_cancel, callbacks, self._callbacks = _nothing, self._callbacks, []
            self._changed.notify_all()
            self._over.notify_all()
        self._tell()
        for function in callbacks:
            self._call_back(function)

    def _abandon(self, error: BaseException) -> None:
        """Ends the request with `error` in a forked child. The request's listeners belong to the parent process."""
        self._renew_conditions()
        self._listeners, self._callbacks = [], []
        if not self._done:
            self._error, self._done, self._on_cancel = error, True, _nothing

    def _renew_conditions(self) -> None:
        """Creates the locks. Readers of tokens wait for `_changed`, which every step notifies. Readers of results wait for `_over`."""
        lock = threading.RLock()
        self._changed, self._over = threading.Condition(lock), threading.Condition(lock)
        self._judging = threading.RLock()

    def _tell(self) -> None:
        with self._changed:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


def _nothing(generation: Generation) -> None: ...


def _cut(tokens: list[int], seen: int, done: bool, pieces: TextPieces | None) -> Iterator[Any]:
    """Yields ``tokens[seen:]``: the ids one by one or, with `pieces`, their text as one piece."""
    if pieces is None:
        yield from tokens[seen:]
    elif piece := pieces.next(tokens, done):
        yield piece
