"""The process around a hook: random states, default dtype, grad mode. A hook leaves all of it as it found it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _set_rng(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_state() -> tuple:
    name, keys, *rest = np.random.get_state(legacy=True)
    return name, np.asarray(keys).tobytes(), *rest


def _set_numpy_state(state: tuple) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _cuda_states() -> list[bytes]:
    if not torch.cuda.is_initialized():
        return []
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]


def _set_cuda_states(states: list[bytes]) -> None:
    for index, state in enumerate(states):
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), index)


#: Name for messages → how to look at it and how to put it back.
STATES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's global random state": (lambda: torch.get_rng_state().numpy().tobytes(), _set_rng),
    "CUDA's global random state": (_cuda_states, _set_cuda_states),
    "Python's global random state": (random.getstate, random.setstate),
    "NumPy's global random state": (_numpy_state, _set_numpy_state),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, lambda d: torch.set_default_device(None if d.type == "cpu" else d)),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}  # fmt: skip
RANDOM = "draw with decoders.sampling.gumbel_noise, or with a generator of the state's own"


def surroundings() -> dict[str, Any]:
    """What there is around a hook now, by the names of :data:`STATES`."""
    return {name: look() for name, (look, _) in STATES.items()}


def restore(before: Mapping[str, Any]) -> list[str]:
    """Puts everything back that differs from `before`; gives the names of what did."""
    changed = [name for name, (look, _) in STATES.items() if look() != before[name]]
    for name in changed:
        STATES[name][1](before[name])
    return changed


@contextmanager
def undisturbed(hook: str) -> Iterator[None]:
    """Raises AssertionError if what runs inside leaves the process changed, by name, and puts it back in any case."""
    before = surroundings()
    try:
        yield
    finally:
        changed = restore(before)
    if changed:
        name = changed[0]
        how = f"; {RANDOM}" if "random" in name else f": it was {before[name]}" if "CUDA" not in name else ""
        raise AssertionError(f"{hook} leaves {name} changed{how}")


@contextmanager
def kept() -> Iterator[None]:
    """Puts the process back as it was, whatever runs inside."""
    before = surroundings()
    try:
        yield
    finally:
        restore(before)
