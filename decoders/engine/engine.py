"""One model made ready: its target, its sessions, and everything compiled for it, shared by all calls and strategies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..report import Report
from ..verifier import Verifier
from . import compiler
from .core import Core, Passes
from .draft import DraftCore
from .packing import FreedParameter, FreedWeights, free_originals, freed_error, restore_originals
from .sampling import SamplingPlan
from .session import Sessions
from .target import Target, Weights
from .tiers import Compile, ForwardPass, TieredFunction


class Engine:
    """What outlives the calls on one model. They run one after the other.

    Attributes:
        target: the model as the loop sees it, its weights packed.
        forward: its forward pass, uncompiled or compiled.
        sessions: buffers and the texts they hold.

    Raises:
        UnsupportedError: see :class:`Target`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: Literal["auto", "sdpa", "flex"] = "auto",
        lock: threading.RLock | None = None,
    ) -> None:
        if any(isinstance(parameter, FreedParameter) for parameter in model.parameters()):
            raise freed_error()
        self.lock = lock or threading.RLock()  # a streamer or processor may call generate again
        self.attention = attention
        started = time.perf_counter()
        self.target = make_target(model, attention)
        self.preparing = time.perf_counter() - started
        self.sessions = Sessions(self.target)
        self.forward = ForwardPass(self.target)
        self._whole: dict[tuple, Callable | None] = {}
        self._functions: dict[Callable, TieredFunction] = {}
        self._judges: dict[tuple, compiler.CompiledFunction] = {}
        self._freed: FreedWeights | None = None

    def refresh(self, model: PreTrainedModel, attention: str) -> bool:
        """Whether this engine still serves `model`; weights that were written to since are packed again first."""
        if attention != self.attention:
            return False
        with self.lock:
            weights = Weights.of(model)
            if not weights.replaces(self.target.weights):
                return False
            # Pointers are compared first: samples are taken where they point.
            if weights != self.target.weights or self.target.samples.changed:
                self.target.repack(model)
                self.sessions.forget()
            return True

    def settle_originals(self, model: PreTrainedModel, weights: Literal["keep", "packed"]) -> None:
        """Frees the dense weights of `model`, or gives them back."""
        with self.lock:
            if weights == "packed" and self._freed is None:
                self._freed = free_originals(model, self.target.packing)
            elif weights == "keep" and self._freed is not None:
                restore_originals(self._freed, self.target.packing)
                self._freed = None
            else:
                return
            self.target.remember(model)

    def release(self, model: PreTrainedModel) -> None:
        """Frees what no call uses: buffers, compiled code, recorded steps. Gives `model` its dense weights back."""
        with self.lock:
            self.settle_originals(model, "keep")
            self.sessions.release()
            self.forward.forget()
            self._whole.clear()
            self._functions.clear()
            self._judges.clear()

    def core(self, plan: SamplingPlan) -> Core:
        return Core(self.target, plan, self._run())

    def draft_core(self, plan: SamplingPlan, vocabulary: int, children: int) -> DraftCore:
        return DraftCore(self.target, plan, vocabulary, children, self._run())

    def _run(self) -> Passes | None:
        """On the CPU the forward pass is compiled by itself; on other devices it is a part of whole steps."""
        return self.forward if self.target.device.type == "cpu" else None

    def whole(self, core: Core, method: str, rows: int, compile: Compile, report: Report) -> Callable:
        """A method of `core` as one compiled graph, where the device wants that.

        If the compiler fails, a warning says why, once, and the method itself is given back: the tokens are the same.
        """
        plain = getattr(core, method)
        if self.target.device.type == "cpu" or not compile:
            return plain
        key = (method, *core.key(method), rows > 1)
        if key not in self._whole:
            self._whole[key] = compiler.compile_whole(plain)
        return compiler.or_uncompiled(self._whole, key, plain, report)

    def judge(self, core: Core, verifier: Verifier, compile: Compile, report: Report) -> Callable:
        """`core.judge`, one graph per verifier, plan and shape of tree where whole steps are compiled."""
        if self.target.device.type == "cpu" or not compile:
            return core.judge
        key = ("judge", *core.key("judge"), type(verifier))
        if key not in self._judges:
            self._judges[key] = compiler.CompiledFunction(core.judge)
        return _booked(self._judges[key], report)

    def function(self, function: Callable, compile: Compile, report: Report) -> Callable:
        """A strategy's tensor function, compiled once for all calls on this engine."""
        if not compile:
            return function
        if function not in self._functions:
            self._functions[function] = TieredFunction(function, compiler.CompiledFunction(function))
        tiered = self._functions[function]
        compiled = _booked(tiered.compiled, report)
        return tiered if compile == "auto" and self.target.device.type == "cpu" else compiled


def _booked(compiled: compiler.CompiledFunction, report: Report) -> compiler.CompiledFunction:
    """`compiled`, with what it compiles from now on booked in `report`."""

    def book(seconds: float) -> None:
        report.timings.compile += seconds
        report.compilations += 1

    compiled.on_compile = book
    return compiled


def make_target(model: PreTrainedModel, attention: Literal["auto", "sdpa", "flex"]) -> Target:
    """The target with the attention that suits its device; ``auto`` is flex on CUDA where the model can carry it."""
    if attention == "auto" and model.device.type == "cuda":
        try:
            return Target(model, "flex")
        except UnsupportedError:
            return Target(model, "sdpa")
    return Target(model, "flex" if attention == "flex" else "sdpa")
