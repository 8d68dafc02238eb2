"""Target and compiled graphs of one model, shared by all calls and strategies."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..report import Report
from ..tree import Topology
from ..verifier import Verifier
from . import compiler
from .core import Core, Rows
from .sampling import Masks, SamplingInputs, row_keys
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
        self._compiled: dict[tuple, Callable | None] = {}
        self._functions: dict[Callable, compiler.CompiledFunction] = {}
        self._judges: dict[tuple, compiler.CompiledFunction] = {}

    def current(self, model: PreTrainedModel, attention: str) -> bool:
        """Whether weights and attention are still those this engine was built (and its graphs frozen) for."""
        return attention == self.attention and fingerprint(model) == self.target.weights

    def compiled(self, core: Core, method: str, rows: int, report: Report) -> tuple[Callable, bool]:
        """A method of `core` compiled and warmed up for `rows` rows, and whether it is.

        If the compiler fails, a warning says why, once, and the eager method is given back: the tokens are the same.
        """
        eager = getattr(core, method)
        key = (method, *core.key(method), rows > 1)
        if key not in self._compiled:
            started, before = time.perf_counter(), compiler.compilations()
            twin = self._compiled.get((*key[:-1], not key[-1]))
            function = twin or compiler.compile_core(eager, self.target.device)
            try:
                if self.target.device.type == "cpu":
                    apart = compiler.separate_loops() if core.plan.masked else nullcontext()
                    with compiler.frozen_weights(), apart:
                        warm_up(function, method, core, 1 if rows == 1 else 3)
                self._compiled[key] = function
            except Exception as error:
                warnings.warn(f"{method} could not be compiled, decoding eagerly instead: {error}", stacklevel=2)
                self._compiled[key] = None
            report.timings.compile += time.perf_counter() - started
            report.compilations += compiler.compilations() - before
        found = self._compiled[key]
        return found or eager, found is not None

    def judge_function(self, core: Core, verifier: Verifier, report: Report) -> Callable:
        """`core.judge` compiled; one graph per verifier, plan and shape of tree."""
        key = ("judge", *core.key("judge"), type(verifier))
        if key not in self._judges:
            self._judges[key] = compiler.CompiledFunction(core.judge)
        return self._booked(self._judges[key], report)

    def compile_function(self, function: Callable, report: Report) -> Callable:
        """`function` compiled for use by strategies, one graph for all calls on this engine."""
        if function not in self._functions:
            self._functions[function] = compiler.CompiledFunction(function)
        return self._booked(self._functions[function], report)

    @staticmethod
    def _booked(compiled: compiler.CompiledFunction, report: Report) -> compiler.CompiledFunction:
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


def warm_up(function: Callable, method: str, core: Core, batch: int) -> None:
    """Compiles `function` on made-up rows whose sizes are pairwise different, so that Dynamo takes none for another."""
    target, plan, device = core.target, core.plan, core.target.device
    sampling = sampling_inputs((0.5,) * len(plan.operations), 0, batch, (), device)
    rows = Rows.allocate(target, [torch.zeros(20, dtype=torch.int64)] * batch, 176, 64, sampling)
    view, unread = rows.range[:80], torch.arange(5, device=device)
    tree, bigger = (Topology.chain(n).tensors(batch, device) for n in (10, 12))
    guesses = torch.full((batch, 10), -1, device=device)
    nodes = guesses[:, :6].clone()
    arguments = {
        "step": (guesses, tree, rows, view), "forward": (guesses, tree, rows, view),
        "advance": (guesses, tree, rows, view, unread), "extend": (rows, view, unread),
        "root": (rows, view, unread), "grow": (nodes, bigger, rows, view),
    }  # fmt: skip
    sizes = [(view, (0,)), (unread, (0,)), (rows.range, (0,))]
    per_row = [(guesses, (1,)), (nodes, (1,)), (rows.tokens, (1,))]
    per_row += [(t, (1,)) for b in (tree, bigger) for t in (b.parents, b.offsets)]
    per_row += [(t, (1, 2)) for b in (tree, bigger) for t in (b.visible, b.ancestors)]
    per_row += [(t, (2,)) for t in (*rows.buffers.keys, *rows.buffers.values)]
    masks = []
    if plan.masked and method != "forward":
        # The masks are the deciding model's, whose vocabulary may be larger than this one's.
        count = {"step": 11, "advance": 11, "grow": 6}.get(method, 1)
        allowed = torch.ones(batch, count, core.vocabulary, dtype=torch.bool, device=device)
        masks.append(Masks(allowed))
        per_row.append((allowed, (1,) if count > 1 else ()))
    if batch > 1:
        per_row = [(t, (0, *dims)) for t, dims in per_row]
        per_row += [(t, (0,)) for t in (rows.length, rows.prompt_length, rows.finished, rows.limit, sampling.keys)]
    compiler.mark_dynamic(sizes + per_row)
    function(*arguments[method], *masks)


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
