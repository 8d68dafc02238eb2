"""The engine of one model: the prepared model (the target), its sessions and its compiled code. All calls and strategies share them."""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...common import devices
from ...common.transformers_compat import decoder_layers
from ...errors import SettingsError, UnsupportedError
from ...report import Report
from ...settings import Attention
from ...strategy import Strategy
from ..model.call_lock import CallLock
from ..model.compiled.forward_pass import ForwardPass
from ..model.compiled.functions import CompiledFunction, TieredFunction
from ..model.compiled.tiers import Compile
from ..model.output_head import OutputHead
from ..model.own_forward import OwnForward
from ..model.recordings import recorder_of
from ..model.self_check import target_of
from ..model.target import Target
from ..model.threads import Threads, own_number_afterwards
from ..model.torch_compat import float32_precision
from ..model.weights.quantization import Precision
from ..model.weights.state import WeightState
from ..model.weights.twin import first_layers
from .calibration import Calibrator
from .drafters.modules import ModuleTwin
from .losses import warn_of_format
from .sessions import Sessions
from .verify import StepFunctions

#: Greatest number of strategies' compiled functions that an engine keeps.
KEPT_FUNCTIONS = 64
#: Limits on the memories (objects that strategies keep between calls): their number, and the sum of their ``nbytes``. An object without
#: ``nbytes`` counts as 0.
KEPT_MEMORIES = 16
KEPT_MEMORY_BYTES = 256 << 20

#: Key of a strategy's memory: the strategy's class name, the strategy's ``repr`` (it shows the settings), and the memory's name. If
#: the call has a salt, the name includes it.
MemoryKey = tuple[str, str, str]
#: The key of the texts that the user gave. All strategies read these texts, independent of their settings and of salts.
TEXTS: MemoryKey = ("", "", "texts")


class Engine:
    """Everything that is kept between the calls on one model. Calls run one after the other.

    Attributes:
        target: the model, prepared for the passes of the loop.
        forward_pass: the target's forward pass, uncompiled or compiled.
        sessions: KV cache buffers, and the texts that they hold.
        calibration: the costs of the model's steps, measured or observed.
        threads: sets the number of threads that steps use; None unless the model is on the CPU.

    Raises:
        UnsupportedError: see :class:`Target`.
    """

    def __init__(
        self, model: PreTrainedModel, attention: Attention = "auto", lock: CallLock | None = None,
        precision: Precision = Precision(),
    ) -> None:  # fmt: skip
        self.lock = lock or CallLock()  # re-entrant: a streamer or processor may call generate
        self.attention, self.precision = attention, precision
        started = time.perf_counter()
        with torch.autocast(model.device.type, enabled=False):
            self.target = target_of(model, attention, precision)
        seconds, target = time.perf_counter() - started, self.target
        making = seconds - target.checks.kernel_seconds - target.checks.seconds
        self._prepared = started, making, target.checks.kernel_seconds, target.checks.seconds
        warn_of_format(self.target)
        self._float32_precision = float32_precision(self.target.device)
        # Processes that share a model do not record steps, because all would have to start and stop replaying at the same step.
        records = self.target.static and not self.target.ranks.several
        recorder = recorder_of(self.target.device) if records else None
        self.sessions = Sessions(self.target, recorder)
        self.forward_pass = _pass_of(self.target)
        self._watching: dict[tuple[int, ...], ForwardPass] = {}
        self._own: dict[tuple[int, ...], OwnForward] = {}
        self._cut: dict[int, PreTrainedModel] = {}
        self._modules: weakref.WeakKeyDictionary[nn.Module, ModuleTwin] = weakref.WeakKeyDictionary()
        self._head: OutputHead | None = None
        self.calibration = Calibrator(self.forward_pass, self.sessions)
        self.threads = Threads.now() if self.target.device.type == "cpu" else None
        self._memories: dict[MemoryKey, Any] = {}
        self._functions: dict[Callable, TieredFunction] = {}
        self._stream: Any = None  # the last call's stream

    def refresh(self, model: PreTrainedModel, attention: str, precision: Precision = Precision()) -> bool:
        """Returns whether this engine still fits `model` and the settings. Renews or drops data computed from changed weights."""
        if (attention, precision) != (self.attention, self.precision):
            return False
        with self.lock:
            weights, ranks = WeightState.of(model), self.target.ranks
            known = self.target.weights
            if ranks.any(self._rounds_otherwise or weights.modules != known.modules):
                return False
            if ranks.any(weights.contents != known.contents):
                self._forget_compiled()
                self.sessions.forget_recordings()
            if ranks.any(weights != known):
                if weights.places != known.places:
                    self.sessions.forget_recordings()
                started = time.perf_counter()
                if not self.target.renew(weights):
                    return False
                self._prepared = started, time.perf_counter() - started, 0.0, 0.0
                self.sessions.forget()
            return True

    @property
    def _rounds_otherwise(self) -> bool:
        """Whether torch's setting for the rounding of float32 products has changed since the target was checked."""
        return float32_precision(self.target.device) != self._float32_precision

    def prepared_since(self, begun: float) -> tuple[float, float, float]:
        """Returns the seconds spent on packing the model, compiling kernels and checks; zeros if that work began before `begun`."""
        started, *seconds = self._prepared
        making, kernels, checking = seconds if started >= begun else (0.0, 0.0, 0.0)
        return making, kernels, checking

    def serves(self, model: PreTrainedModel, attention: str, precision: Precision) -> bool:
        """Whether :meth:`refresh` would return True without changing anything. Does not wait for a running call.

        False if several processes share the model, because they would have to agree on the answer.
        """
        if (
            (attention, precision) != (self.attention, self.precision)
            or self._rounds_otherwise
            or self.target.ranks.several
        ):
            return False
        return WeightState.of(model) == self.target.weights

    def active(self) -> AbstractContextManager:
        """A context in which the model's device is current, because kernels, streams and graphs are created for the current device."""
        return devices.current(self.target.device)

    @contextmanager
    def decoding(self, rope_table: int = 0) -> Iterator[None]:
        """A context in which one call, or one step of a scheduler's lane, has exclusive use of the model; other calls wait.

        Args:
            rope_table: which rotary table the call's texts need, see :meth:`Target.rope_table_of`.
        """
        with (
            self.lock,
            self.active(),
            own_number_afterwards(),
            # The caller's autocast and grad modes are switched off: kept texts and compiled code are in the model's own precision.
            torch.autocast(self.target.device.type, enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            self._follow_stream()
            if self.threads is not None:
                self.threads.use()
            self.target.use_rope_table(rope_table)
            yield

    def _follow_stream(self) -> None:
        """Makes this call's work on the device wait for the previous call's work, if that call used another stream. A superfluous last
        step of the previous call may still be running.
        """
        if (module := devices.accelerator(self.target.device)) is not None:
            last, self._stream = self._stream, module.current_stream(self.target.device)
            if last is not None and last != self._stream:
                self._stream.wait_stream(last)

    def release(self) -> None:
        """Frees buffers, compiled code, recorded steps and the memories of strategies."""
        with self.lock:
            self.sessions.release()
            self._forget_compiled()
            self._functions.clear()
            self._memories.clear()

    def forget(self) -> None:
        """Drops the memories of strategies and the kept texts of earlier calls; weights and compiled code stay."""
        with self.lock:
            self._memories.clear()
            self.sessions.forget()
            self.sessions.forget_recordings()  # recordings write to the dropped memories

    def memories(self) -> dict[MemoryKey, Any]:
        """Copies of the memories that strategies keep between calls."""
        with self.lock:
            return {key: pickle.loads(pickle.dumps(kept)) for key, kept in self._memories.items()}

    def remember(self, memories: Mapping[MemoryKey, Any]) -> None:
        """Replaces the memories of strategies by copies of `memories`; memories with other keys stay."""
        with self.lock:
            for key, kept in memories.items():
                copied = pickle.loads(pickle.dumps(kept))
                self._memories.pop(key, None)
                self._memories[key] = copied.to(self.target.device) if isinstance(copied, Tensor) else copied
            self._bound_memories()
            self.sessions.forget_recordings()  # recordings read and write the replaced memories

    @property
    def texts(self) -> Any:
        """The texts that the user gave for all strategies, see :attr:`Context.texts`."""
        return self._memories.get(TEXTS)

    def _bound_memories(self) -> None:
        # Texts that callers gave are not counted here: they have their own limit.
        sizes = {key: getattr(kept, "nbytes", 0) for key, kept in self._memories.items() if key != TEXTS}
        while len(sizes) > KEPT_MEMORIES or (len(sizes) > 1 and sum(sizes.values()) > KEPT_MEMORY_BYTES):
            key = next(iter(sizes))  # the least recently used
            del self._memories[key], sizes[key]

    def _forget_compiled(self) -> None:
        self.forward_pass.tiers.forget()
        self._watching.clear()
        self._own.clear()
        self._cut.clear()
        self._modules.clear()
        self._head = None

    def forward_pass_for(self, strategy: Strategy) -> ForwardPass:
        """The forward pass for calls with `strategy`; it also returns the hidden states of the layers that the strategy reads, if any.

        Raises:
            SettingsError: the model lacks a layer that is read. UnsupportedError: the model's decoder layers were not found.
        """
        if not strategy.reads_layers:
            return self.forward_pass
        with self.lock:
            layers = layer_indices(self.target.model, strategy)
            if not layers:
                return self.forward_pass
            if layers not in self._watching:
                self._watching[layers] = _pass_of(self.target.sibling(layers))
            return self._watching[layers]

    def own_forward(self, model: PreTrainedModel, target: Target) -> OwnForward:
        """The unmodified forward pass of `model`, for prompts with images. It is created once per set of layers.

        Args:
            model: the model of this engine.
            target: decides which hidden states the pass also returns, by its attribute `layers`.
        """
        # The first look-up takes no lock. With a lock, a submitted request would wait here until the running step has ended.
        if (own := self._own.get(target.layers)) is not None:
            return own
        with self.lock:
            if target.layers not in self._own:
                self._own[target.layers] = OwnForward(target, model)
            return self._own[target.layers]

    def first_layers(self, model: PreTrainedModel, count: int) -> PreTrainedModel:
        """The first `count` layers of `model`, the model of this engine, as a draft model. It is created once per `count`.

        See :attr:`decoders.strategy.Context.first_layers`.

        Raises:
            UnsupportedError, SettingsError: the model's first layers cannot draft.
        """
        if self.target.recurrent:
            raise UnsupportedError(
                f"the first layers of {type(model).__name__} cannot draft, because its recurrent states cannot be rolled back when a "
                "draft token is rejected: take a strategy without early exit"
            )
        with self.lock:
            if count not in self._cut:
                self._cut[count] = first_layers(model, count)
            return self._cut[count]

    def is_part(self, model: object) -> bool:
        """Whether `model` was returned by :meth:`first_layers`."""
        return any(part is model for part in self._cut.values())

    @property
    def functions_ready(self) -> int:
        """Number of compiled variants of strategies' functions. Arguments that differ only in sizes above 1 share a variant."""
        return sum(len(tiered.ready) for tiered in self._functions.values())

    def memory(self, strategy: Strategy, name: str, factory: Callable[[], Any], salt: str = "") -> Any:
        """The memory that `strategy` keeps between calls under `name`; see :attr:`decoders.strategy.Context.memory`.

        Args:
            salt: calls with different salts get different memories.
        """
        cls = type(strategy)
        key = f"{cls.__module__}.{cls.__qualname__}", repr(strategy), f"{name} of {salt}" if salt else name
        kept = self._memories.pop(key) if key in self._memories else factory()
        self._memories[key] = kept
        self._bound_memories()
        return kept

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits from `hidden` with the target's output head, see :attr:`decoders.strategy.Context.head`."""
        if self._head is None:
            self._head = self.target.output_head()
        return self._head(hidden)

    def module(self, module: nn.Module, example: tuple[Tensor, ...]) -> ModuleTwin:
        """The :class:`ModuleTwin` of a drafter's module, created once; see :attr:`decoders.strategy.Context.module`."""
        if module not in self._modules:
            self._modules[module] = ModuleTwin(module, example, self.target.device, self.target.attends)
        return self._modules[module]

    def function(self, function: Callable, compile: Compile, report: Report) -> Callable:
        """Returns a strategy's tensor function, compiled once for all calls on this engine if `compile` and the device allow it."""
        if not compile or not devices.compiles(self.target.device):
            return function
        tiered = self._functions.pop(function, None)
        if tiered is None:
            # Within a recorded step the function cannot be timed alone, so it is compiled once the forward pass is worth compiling.
            due = self.forward_pass.tiers.worth_compiling if self.target.static else lambda: False
            tiered = TieredFunction(function, CompiledFunction(function), due)
        self._functions[function] = tiered
        # If a strategy creates functions in every call, they pile up. So the least recently used function is dropped.
        if len(self._functions) > KEPT_FUNCTIONS:
            del self._functions[next(iter(self._functions))]
        _book(tiered.compiled, report, waited_for=compile is True)
        return tiered if compile == "auto" else tiered.compiled


def layer_indices(model: PreTrainedModel, strategy: Strategy) -> tuple[int, ...]:
    """The indices, from 0 on, of the decoder layers of `model` whose outputs `strategy` reads.

    Raises:
        SettingsError: the strategy names a layer that the model lacks. UnsupportedError: the model's layers were not found.
    """
    name, count = type(model).__name__, len(decoder_layers(model))
    if not count:
        raise UnsupportedError(f"{strategy.name} reads hidden layers, and {name} has no list of decoder layers")
    named = strategy.layers_for(model.config, count)
    if not isinstance(named, tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in named):
        raise SettingsError(f"{strategy.name}: hidden_layers must be a tuple of integers, not {named!r}")
    if wrong := [i for i in named if not -count <= i < count]:
        raise SettingsError(
            f"{strategy.name}: hidden_layers asks for layer {wrong[0]}; {name} has layers 0 … {count - 1}, or -{count} … -1 from the "
            "end"
        )
    return tuple(i % count for i in named)


def _pass_of(target: Target) -> ForwardPass:
    """Creates the forward pass of a target, and the :class:`StepFunctions` that belong to the pass."""
    forward_pass = ForwardPass(target)
    StepFunctions.of(forward_pass)
    return forward_pass


def _book(compiled: CompiledFunction, report: Report, *, waited_for: bool) -> None:
    """Makes later compilations of `compiled` add to the counts and seconds in `report`. waited_for: whether calls wait for them."""

    def book(seconds: float) -> None:
        if waited_for:
            report.timings.compile += seconds
        else:
            report.timings.background += seconds
        report.compilations += 1

    compiled.on_compile = book
