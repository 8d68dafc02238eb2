"""Recurrent layers (linear attention, state space, short convolution) in a block of nodes: each node continues its parent's state.

A recurrent layer keeps a state per row instead of keys and values per token. A state that has processed a rejected token cannot be
rolled back. So the module with the state runs level by level: all nodes of a depth at once, each from a copy of its parent's state. The
state after every node is kept until the block is verified; then the state after the last accepted node becomes the row's state. All
other parts of the model (attention, experts, the module's projections) run on the whole block at once.

A module counts as recurrent if it updates a state in transformers' cache, whatever its name (:mod:`.state_probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from .row_states import RowStates, StateSpec
from .slot_cache import RunPart, SlotCache

LAYER_ATTRIBUTE = "decoders_recurrent_layer"
CONTINUES_ATTRIBUTE = "decoders_continues_text"


@dataclass(frozen=True)
class Level:
    """Nodes of equal depth, which run together.

    Attributes:
        nodes: indices of the level's nodes among all ``B·N`` nodes.
        parents: for each of these nodes, the index of its parent's state among all ``B·(N+1)`` states (:attr:`RowStates.nodes`).
        places: for each of these nodes, the index of its own state among all ``B·(N+1)`` states.
    """

    nodes: Tensor
    parents: Tensor
    places: Tensor


def levels_of(visible: Tensor, nodes: Tensor) -> list[Level]:
    """The levels in which the nodes of a block run, computed on the host from the visibility.

    A node continues the state of the node with the longest path among the nodes that it sees. For a draft token, this node is the
    parent; in a window of lookahead decoding, the preceding token. Nodes without a draft token do not run.

    Args:
        visible: ``[B, N, N]`` bool.
        nodes: ``[B, N]`` int64, -1 for no draft token.
    """
    seen = visible.cpu().numpy()
    rows, n = seen.shape[:2]
    depth = seen.sum(-1)
    shorter = seen & (depth[:, None, :] < depth[:, :, None])
    parent = np.where(shorter.any(-1), np.where(shorter, depth[:, None, :], -1).argmax(-1), n)
    row = np.arange(rows)[:, None]
    place, source, flat = row * (n + 1) + np.arange(n), row * (n + 1) + parent, row * n + np.arange(n)
    real = (nodes >= 0).cpu().numpy()
    device = visible.device
    levels = []
    for length in np.unique(depth[real]):
        chosen = real & (depth == length)
        levels.append(Level(*(torch.from_numpy(index[chosen]).to(device) for index in (flat, source, place))))
    return levels


class NodePass:
    """Runs a block of nodes, each from its parent's states. base: ``[B]``, number of tokens before the block; 0 for zero states."""

    def __init__(
        self, states: RowStates, specs: Sequence[Sequence[StateSpec]], visible: Tensor, nodes: Tensor, base: Tensor
    ) -> None:
        self.states, self.specs = states, specs
        self.levels = levels_of(visible, nodes)
        fresh = base <= 0
        self.fresh = fresh if bool(fresh.any()) else None
        states.nodes.clear()

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: RunPart) -> Tensor:
        rows, n = tokens.shape[:2]
        specs, behind = self.specs[layer], []
        for state in self.states.layers[layer]:
            kept = state.new_zeros(rows, n + 1, *state.shape[1:])
            kept[:, n] = state
            if self.fresh is not None:
                kept[self.fresh, n] = 0
            behind.append(kept)
        flat, out, running = [kept.flatten(0, 1) for kept in behind], None, Running()
        with hoisted(module, tokens, running) as result:
            for level in self.levels:
                running.nodes = level.nodes
                cache, own = cache_of(specs, [kept[level.parents] for kept in flat])
                given = call(lambda tokens: tokens.flatten(0, 1)[running.nodes][:, None], cache)
                if out is None:
                    out = given.new_zeros(rows * n, *given.shape[2:])
                out[level.nodes] = given[:, 0]
                for kept, state in zip(flat, states_in(own, specs), strict=True):
                    kept[level.places] = state
            assert out is not None, "the root is always run"
            self.states.nodes[layer] = behind
            return result(out).unflatten(0, (rows, n))


class TextPass:
    """Runs a chunk of text, row by row, with the module's own code for many tokens.

    Args:
        begin: per row, number of tokens before the chunk.
        counts: per row, number of tokens in the chunk without padding. Padding does not change the states.
    """

    def __init__(
        self, states: RowStates, specs: Sequence[Sequence[StateSpec]], begin: list[int], counts: list[int]
    ) -> None:
        self.states, self.specs, self.begin, self.counts = states, specs, begin, counts
        for row, (start, count) in enumerate(zip(begin, counts, strict=True)):
            if count > 0:
                states.reached[row] = start + count

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: RunPart) -> Tensor:
        specs, out = self.specs[layer], None
        own_states = self.states.layers[layer]
        for row, (start, count) in enumerate(zip(self.begin, self.counts, strict=True)):
            if count <= 0:
                continue
            states = [state[row : row + 1].clone() for state in own_states] if start else None
            # Some modules can read several tokens at once only at the beginning of a text. They read all later tokens one at a time.
            whole = states is None or getattr(module, CONTINUES_ATTRIBUTE)
            for first, last in [(0, count)] if whole else [(i, i + 1) for i in range(count)]:
                cache, own = cache_of(specs, states)
                given = call(lambda tokens, a=first, b=last, r=row: tokens[r : r + 1, a:b], cache)  # type: ignore[misc]
                states = states_in(own, specs)
                if out is None:
                    out = given.new_zeros(*tokens.shape[:2], *given.shape[2:])
                out[row, first:last] = given[0]
            assert states is not None
            for state, new in zip(own_states, states, strict=True):
                state[row] = new[0]
        if out is None:  # only padding
            out = torch.zeros_like(call(lambda tokens: tokens, cache_of(specs, None)[0]))
        return out


class _OneLayer(list):
    """The list of layers of a cache. It returns the same layer for every index."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)

    def __len__(self) -> int:
        return 1 << 20


def cache_of(specs: Sequence[StateSpec], states: Sequence[Tensor] | None) -> tuple[Cache, LinearAttentionLayer]:
    """A cache for one call of a module, and the cache's only layer. states: ``[M, …]`` each; None at the beginning of a text."""
    layer = LinearAttentionLayer(number_of_states=1 + max(spec.index for spec in specs))
    if states is not None:
        for spec, state in zip(specs, states, strict=True):
            getattr(layer, spec.part)[spec.index] = state
            getattr(layer, f"is_{spec.part}_initialized")[spec.index] = True
            layer.has_previous_state[spec.index] = True
            if spec.part == "conv_states":
                layer.conv_kernel_size[spec.index] = state.shape[-1]
            # The attributes are set through vars, because the class annotates them as None.
            vars(layer).update(dtype=state.dtype, device=state.device)
    cache = Cache(layers=[])
    cache.layers = _OneLayer([layer])
    return cache, layer


def states_in(layer: LinearAttentionLayer, specs: Sequence[StateSpec]) -> list[Tensor]:
    """The states in `layer`, a layer of a cache, after a call of a module: one for each of `specs`."""
    return [cast(Tensor, getattr(layer, spec.part)[spec.index]) for spec in specs]


def tokens_of(args: tuple, keywords: dict[str, Any]) -> Tensor:
    """The hidden states ``[B, N, H]`` among a module's arguments."""
    named = keywords.get("hidden_states")
    if isinstance(named, Tensor):
        return named
    return next(value for value in (*args, *keywords.values()) if isinstance(value, Tensor))


def on_others(
    args: tuple, keywords: dict[str, Any], kind: type[Cache], cache: Cache, tensor: Callable[[Tensor], Tensor]
) -> tuple[tuple, dict[str, Any]]:
    """A module's arguments for a call on other tokens: `cache` replaces the cache of class `kind`, and ``tensor(value)`` replaces every
    tensor. Masks are removed, because the other tokens have no padding.
    """

    def replaced(value: Any) -> Any:
        if isinstance(value, kind):
            return cache
        if isinstance(value, Tensor):
            return None if value.dim() == 4 else tensor(value)
        return type(value)(map(replaced, value)) if type(value) in (tuple, list) else value

    named = {name: replaced(value) for name, value in keywords.items() if name != "attention_mask"}
    return tuple(map(replaced, args)), named


@cache
def by_node(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `plain` whose ``forward`` calls ``StatePass.run`` in passes that have a ``StatePass`` (:mod:`.slot_cache`)."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, SlotCache)]
        if not caches or caches[0].states is None:
            return plain.forward(self, *args, **kwargs)
        tokens = tokens_of(args, kwargs)
        shape = tokens.shape[0], tokens.shape[1]

        def call(select: Callable[[Tensor], Tensor], cache: Cache) -> Tensor:
            others, keywords = on_others(
                args, kwargs, SlotCache, cache, lambda value: select(value) if value.shape[:2] == shape else value
            )
            return cast(Tensor, plain.forward(self, *others, **keywords))

        return caches[0].states.run(getattr(self, LAYER_ATTRIBUTE), tokens, self, call)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


# Most weights of a recurrent module are in the linear layers that read its input, and in the layer that computes its output. A trial
# call finds these layers. They run once for a whole block; only the part between them runs level by level.

_STAND_IN = "decoders_stand_in"
_HOISTED = "decoders_hoisted"


def projections(
    module: nn.Module, call: Callable[[Tensor], Tensor], hidden: Tensor
) -> tuple[tuple[str, ...], str | None]:
    """The names of the linear layers in `module` that read `hidden`, and the name of the linear layer whose output is ``call(hidden)``
    (or None). Layers that run several times per call are left out.
    """
    seen: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        child.register_forward_hook(lambda _, args, out, name=name: seen.append((name, args[0], out)))
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    ]
    try:
        given = call(hidden)
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, _, _ in seen]
    once = [entry for entry in seen if names.count(entry[0]) == 1]
    first = tuple(name for name, read, _ in once if read is hidden)
    last = next((name for name, _, out in once if out is given and name not in first), None)
    return first, last


def hoist(module: nn.Module, names: tuple[tuple[str, ...], str | None]) -> None:
    """Prepares `module`, a part of our copy of a model, for :func:`hoisted`. names: the result of :func:`projections`."""
    first, last = names
    layers = [module.get_submodule(name) for name in (*first, *([last] if last else []))]
    for layer in layers:
        layer.__class__ = _replaceable(cast(Hashable, type(layer)))
    # Tuples, because a copy of the model then contains tuples of copied layers.
    setattr(module, _HOISTED, (tuple(layers[: len(first)]), tuple(layers[len(first) :])))


class Running:
    """The level that runs now. nodes: see :attr:`Level.nodes`."""

    nodes: Tensor


@contextmanager
def hoisted(module: nn.Module, tokens: Tensor, running: Running) -> Iterator[Callable[[Tensor], Tensor]]:
    """Runs the projections of `module` on all `tokens` ``[B, N, H]`` at once. Within this context, the module runs level by level.

    Yields a function that computes the module's result from the module's outputs in all levels, ``[B·N, …]``.
    """
    first, last = getattr(module, _HOISTED, ((), ()))
    inputs: list[Tensor] = []

    def reading(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        whole = layer(tokens).flatten(0, 1)
        return lambda _: whole[running.nodes][:, None]

    def writing(layer: Any) -> Callable[[Tensor], Tensor]:
        def keep(given: Tensor) -> Tensor:
            if not inputs:
                inputs.append(given.new_zeros(tokens.shape[0] * tokens.shape[1], *given.shape[2:]))
            inputs[0][running.nodes] = given[:, 0]
            return given.new_empty(*given.shape[:-1], layer.out_features)

        return keep

    def result(given: Tensor) -> Tensor:
        if not last:
            return given
        vars(last[0]).pop(_STAND_IN, None)
        return cast(Tensor, last[0](inputs[0].unflatten(0, tokens.shape[:2]))).flatten(0, 1)

    try:
        for layer in first:
            vars(layer)[_STAND_IN] = reading(layer)
        for layer in last:
            vars(layer)[_STAND_IN] = writing(layer)
        yield result
    finally:
        for layer in (*first, *last):
            vars(layer).pop(_STAND_IN, None)


@cache
def _replaceable(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `plain` whose ``forward`` calls the module's stand-in, if a stand-in is set."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        stand_in = vars(self).get(_STAND_IN)
        return cast(Tensor, plain.forward(self, x) if stand_in is None else stand_in(x))

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
