"""Recurrent layers (linear attention, state space, short convolution) in a block of nodes: each node continues its parent's state.

Such a layer keeps a state per row instead of keys and values per token: it cannot look past a rejected draft token, and a state
cannot be cut back. So the module that keeps the state runs level by level, all nodes of one depth at once, each from a copy of its
parent's state; what stands behind every node is kept until the block is decided, and commit takes that of the last accepted node.
Everything else of the model (attention, experts, the projections of the module itself,
:mod:`~decoders.engine.model.compiled.hoisting`) runs on the whole block.

The modules are not known by name. They are those that update a state in transformers' cache (:mod:`.state_probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from .cache import RowStates, SlotCache, StateSpec
from .compiled import hoisting

LAYER_ATTRIBUTE = "decoders_recurrent_layer"
CONTINUES_ATTRIBUTE = "decoders_continues_text"

#: Runs a module on some of the tokens that it was called with, ``[M, n, …]`` each, with a cache of its own.
RunPart = Callable[[Callable[[Tensor], Tensor], Cache], Tensor]


class StatePass(Protocol):
    """How recurrent layers run in one pass of the model."""

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: RunPart) -> Tensor:
        """What `module` gives for all `tokens` of the pass, ``[B, N, H]``; its states are kept."""
        ...


@dataclass(frozen=True)
class Level:
    """Nodes that run at once, because all that they continue has been run.

    Attributes:
        nodes: places in ``[B·N]``.
        parents: places of what they continue in ``[B·(N+1)]``.
        places: their own places in ``[B·(N+1)]``.
    """

    nodes: Tensor
    parents: Tensor
    places: Tensor


def levels_of(visible: Tensor, nodes: Tensor) -> list[Level]:
    """In which order the nodes of a block run, read from who sees whom; on the host.

    A node continues the one with the longest path of those that it sees. For nodes that can be accepted that is their parent, and
    for those of a lookahead window the token before. Nodes without a draft token are never accepted: they are left out.

    Args:
        visible: ``[B, N, N]`` bool.
        nodes: ``[B, N]`` int64, -1 where there is no draft token.
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
    """A block of nodes: each continues what its parent has left.

    Args:
        base: ``[B]``, tokens in front of the block; where there are none the states are zero.
    """

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
        flat, out, present = [kept.flatten(0, 1) for kept in behind], None, hoisting.Level()
        with hoisting.hoisted(module, tokens, present) as result:
            for level in self.levels:
                present.nodes = level.nodes
                cache, own = cache_of(specs, [kept[level.parents] for kept in flat])
                given = call(lambda tokens: tokens.flatten(0, 1)[present.nodes][:, None], cache)
                if out is None:
                    out = given.new_zeros(rows * n, *given.shape[2:])
                out[level.nodes] = given[:, 0]
                for kept, state in zip(flat, states_in(own, specs), strict=True):
                    kept[level.places] = state
            assert out is not None, "the root is always run"
            self.states.nodes[layer] = behind
            return result(out).unflatten(0, (rows, n))


class TextPass:
    """A stretch of text: every row by itself, through the module's own path for many tokens, as far as its own text goes.

    Args:
        begin: tokens in front of it, per row.
        counts: how many tokens of every row count; what follows is padding, and leaves no trace in the states.
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
            # Some modules begin a text in one pass and continue one token by token only.
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
        if out is None:  # nothing but padding
            out = torch.zeros_like(call(lambda tokens: tokens, cache_of(specs, None)[0]))
        return out


class _OneLayer(list):
    """The layers of a cache of which a module asks for one, by whatever index."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)

    def __len__(self) -> int:
        return 1 << 20


def cache_of(specs: Sequence[StateSpec], states: Sequence[Tensor] | None) -> tuple[Cache, LinearAttentionLayer]:
    """A cache for one call of a module, and its layer. states: ``[M, …]`` each, written in place; None at the beginning of a text."""
    layer = LinearAttentionLayer(number_of_states=1 + max(spec.index for spec in specs))
    if states is not None:
        for spec, state in zip(specs, states, strict=True):
            getattr(layer, spec.part)[spec.index] = state
            getattr(layer, f"is_{spec.part}_initialized")[spec.index] = True
            layer.has_previous_state[spec.index] = True
            if spec.part == "conv_states":
                layer.conv_kernel_size[spec.index] = state.shape[-1]
            vars(layer).update(dtype=state.dtype, device=state.device)  # by their annotations they are None
    cache = Cache(layers=[])
    cache.layers = _OneLayer([layer])
    return cache, layer


def states_in(layer: LinearAttentionLayer, specs: Sequence[StateSpec]) -> list[Tensor]:
    """What a call has left in its cache."""
    return [cast(Tensor, getattr(layer, spec.part)[spec.index]) for spec in specs]


def tokens_of(args: tuple, keywords: dict[str, Any]) -> Tensor:
    """The hidden states in a module's arguments."""
    named = keywords.get("hidden_states")
    if isinstance(named, Tensor):
        return named
    return next(value for value in (*args, *keywords.values()) if isinstance(value, Tensor))


def on_others(
    args: tuple, keywords: dict[str, Any], kind: type[Cache], cache: Cache, tensor: Callable[[Tensor], Tensor]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a module's call, for one on other tokens.

    Args:
        kind: the class of cache in whose place `cache` stands.
        tensor: gives the tensor in the place of each; of masks there is none, since no token of these calls is padding.
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
    """The class that stands in for `plain`."""

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
