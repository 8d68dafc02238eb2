"""Target and compiled graphs of one model, shared by all calls and strategies."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Literal

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..report import Report
from ..tree import Topology
from . import compiler
from .core import Core, Rows
from .sampling import SamplingInputs, SamplingPlan, row_keys
from .target import Target, fingerprint


class Engine:
    """Target and compiled graphs of one model. Calls on one engine run one after the other.

    Raises:
        UnsupportedError: see :class:`Target`.
    """

    def __init__(self, model: PreTrainedModel, attention: Literal["auto", "sdpa", "flex"] = "auto") -> None:
        self.lock = threading.RLock()  # a streamer or processor may call generate again
        self.attention = attention
        self.target = make_target(model, attention)
        self._steps: dict[tuple, Callable | None] = {}
        self._functions: dict[Callable, compiler.CompiledFunction] = {}

    def current(self, model: PreTrainedModel, attention: str) -> bool:
        """Whether weights and attention are still those this engine was built (and its graphs frozen) for."""
        return attention == self.attention and fingerprint(model) == self.target.weights

    def step_function(self, core: Core, rows: int, on_host: bool, report: Report) -> Callable:
        """`core.step` (or `core.forward` if the choice is made on the host), compiled and warmed up for `rows` rows.

        If the compiler fails, a warning says why, once, and the eager function is given back: the tokens are the same.
        """
        eager = core.forward if on_host else core.step
        key = ("forward" if on_host else core.plan, rows > 1)
        if key not in self._steps:
            started, before = time.perf_counter(), compiler.compilations()
            step = self._steps.get((key[0], not key[1])) or compiler.compile_core(eager, self.target.device)
            try:
                if self.target.device.type == "cpu":
                    with compiler.frozen_weights():
                        _warm_up(step, self.target, core.plan, 1 if rows == 1 else 3)
                self._steps[key] = step
            except Exception as error:
                warnings.warn(f"the step could not be compiled, decoding eagerly instead: {error}", stacklevel=2)
                self._steps[key] = None
            report.timings.compile += time.perf_counter() - started
            report.compilations += compiler.compilations() - before
        step = self._steps[key]
        report.compiled = step is not None
        return step or eager

    def compile_function(self, function: Callable, report: Report) -> Callable:
        """`function` compiled for use by strategies, one graph for all calls on this engine."""
        if function not in self._functions:
            self._functions[function] = compiler.CompiledFunction(function)
        compiled = self._functions[function]

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


def _warm_up(step: Callable, target: Target, plan: SamplingPlan, batch: int) -> None:
    """Compiles `step` on made-up rows whose sizes are pairwise different, so that Dynamo takes none for another."""
    device = target.device
    sampling = sampling_inputs((0.5,) * len(plan.operations), 0, batch, (), device)
    rows = Rows.allocate(target, [torch.zeros(2, dtype=torch.int64)] * batch, 176, 1, sampling)
    tree = Topology.chain(10).tensors(batch, device)
    guesses, view = torch.full((batch, 10), -1, device=device), rows.range[:80]
    per_row = [rows.length, rows.prompt_length, rows.finished, rows.limit, sampling.keys]
    sizes = [(guesses, (1,)), (view, (0,)), (rows.tokens, (1,)), (rows.range, (0,)), (tree.parents, (1,)),
             (tree.offsets, (1,)), (tree.visible, (1, 2)), (tree.ancestors, (1, 2))]  # fmt: skip
    sizes += [(t, (2,)) for t in (*rows.buffers.keys, *rows.buffers.values)]
    if batch > 1:
        sizes = [(t, (0, *dims) if t is not view and t is not rows.range else dims) for t, dims in sizes]
        sizes += [(t, (0,)) for t in per_row]
    compiler.mark_dynamic(sizes)
    step(guesses, tree, rows, view)


def sampling_inputs(
    values: tuple[float, ...], seed: int, rows: int, stop_tokens: tuple[int, ...], device: torch.device
) -> SamplingInputs:
    """The tensors of a plan. Stop tokens are padded to a multiple of 8 with -1, so that their number seldom matters."""
    padded = list(stop_tokens) + [-1] * (max(8, -len(stop_tokens) % 8 + len(stop_tokens)) - len(stop_tokens))
    return SamplingInputs(
        torch.tensor(values or (0.0,), dtype=torch.float32, device=device),
        row_keys(seed, rows, device),
        torch.tensor(padded, device=device),
    )
