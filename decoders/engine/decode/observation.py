"""One request as its observers are told of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ...report import ObservedCall, Observer, Report
from .request import Request


class Observation:
    """Tells the observers of a request what happens to it; what they raise is a warning."""

    def __init__(self, request: Request) -> None:
        self._observers: tuple[Observer, ...] = request.observers
        self._call = ObservedCall(
            request.model, request.strategy.name, [len(prompt) for prompt in request.prompts], request.new_tokens,
            request.plan.sample,
        )  # fmt: skip
        self._over = False
        self._tell("start", lambda observer: observer.start(self._call))

    def step(self, tokens: list[list[int]]) -> None:
        """See :meth:`~decoders.report.Observer.step`."""
        self._tell("step", lambda observer: observer.step(self._call, [list(row) for row in tokens]))

    def end(self, report: Report, error: BaseException | None) -> None:
        """See :meth:`~decoders.report.Observer.end`. Only the first time counts."""
        if not self._over:
            self._over = True
            self._tell("end", lambda observer: observer.end(self._call, report, error))

    def _tell(self, method: str, action: Callable[[Observer], Any]) -> None:
        for observer in self._observers:
            try:
                action(observer)
            except Exception as error:
                warnings.warn(
                    f"decoders: {method} of observer {observer.name!r} raised {error!r}; the call goes on", RuntimeWarning,
                    stacklevel=3,
                )  # fmt: skip
