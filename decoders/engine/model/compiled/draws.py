"""How tokens are drawn after a forward pass, in two tiers: by many small kernels, or by what the compiler makes of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ....report import Report
from ....sampling.processors import SamplingPlan
from ...decode.core import draw_tokens
from .compiler import CompiledFunction
from .tiered_function import TieredFunction, kind_of


class Draws:
    """:func:`~decoders.engine.decode.core.draw_tokens` of every sampling plan.

    Args:
        due: whether it is worth compiling.
    """

    def __init__(self, due: Callable[[], bool]) -> None:
        self._due = due
        self._functions: dict[SamplingPlan, TieredFunction] = {}

    def __call__(
        self, logits: Tensor, plan: SamplingPlan, *arguments: Any, now: Report | None, allows: Callable[[Hashable], bool]
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Draws; compiled if that is ready.

        Args:
            now: compile first, and book it here.
            allows: says what may run compiled, of :meth:`ready`.
        """
        if plan not in self._functions:
            self._functions[plan] = TieredFunction(draw_tokens, CompiledFunction(draw_tokens), self._due)
        draw, args = self._functions[plan], (logits, plan, *arguments)
        kind = kind_of(args)
        if now is not None:
            return draw.now(kind, args, now.waited)
        return draw(*args) if allows((plan, kind)) else draw.uncompiled(kind, *args)

    def ready(self, plan: SamplingPlan | None = None) -> frozenset[Hashable]:
        """What has been compiled: plans, or the one, with the kinds of arguments they are compiled for."""
        chosen = [(own, draw) for own, draw in self._functions.items() if plan is None or own == plan]
        return frozenset((own, kind) for own, draw in chosen for kind in draw.ready)
