"""A strategy around another one, for tests that want to see or to change what passes between it and the loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..settings import Configured
from ..strategy import Draft, Sequences, Strategy

#: Every method of a strategy that the loop calls.
HOOKS = [
    name
    for cls in (Configured, Strategy)
    for name, value in vars(cls).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "declare"
]


class Wrapped(Strategy):
    """Is to the loop what `inner` is: it declares the same, and passes every hook on.

    It does not rest: it is there to be asked in every step, whatever steps cost on this machine.
    """

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.settings = inner, inner.settings
        self.declare(replace(inner.traits, rests=False))
        vars(self).update({name: getattr(inner, name) for name in ("name", "summary", "hints", "settings_class")})

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return self.inner.propose(state, sequences)


def _passed_on(hook: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Strategy, hook))
    def passed_on(self: Wrapped, *arguments: Any) -> Any:
        return getattr(self.inner, hook)(*arguments)

    return passed_on


for _hook in HOOKS:
    setattr(Wrapped, _hook, _passed_on(_hook))
