"""Recurrent layers (linear attention, state space, short convolution) in a block of nodes: each node continues its parent's state.

Such a layer keeps a state per row instead of keys and values per token: it cannot look past a rejected draft token, and a state
cannot be cut back. So the module that keeps the state runs level by level, all nodes of one depth at once, each from a copy of its
parent's state; what stands behind every node is kept until the block is decided, and commit takes that of the last accepted node.
Everything else of the model (attention, experts, the projections of the module itself, :mod:`.hoisting`) runs on the whole block.

The modules are not known by name. They are those that update a state in transformers' cache (:class:`StateProbe`), and
:meth:`Recurrent.check` tries whether they continue one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from ..errors import UnsupportedError
from . import hoisting
from .cache import LayoutProbe, RowStates, SlotCache, StateSpec
from .transformers_compat import keeps_recurrent_state

LAYER_ATTRIBUTE = "decoders_recurrent_layer"
CONTINUES_ATTRIBUTE = "decoders_continues_text"
#: Tokens that a layer is tried on, and how far two ways of reading them may differ, relative to the largest number.
TRIED, TOLERANCE, LOW_TOLERANCE = 6, 1e-3, 0.1

#: Runs a module on some of the tokens that it was called with, ``[M, n, …]`` each, with a cache of its own.
Run = Callable[[Callable[[Tensor], Tensor], Cache], Tensor]


class StatePass(Protocol):
    """How recurrent layers run in one pass of the model."""

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: Run) -> Tensor:
        """What `module` gives for all `tokens` of the pass, ``[B, N, H]``; its states are kept."""
        ...


@dataclass(frozen=True)
class Level:
    """Nodes that run at once, because all that they continue has been run.

    Attributes:
        nodes: places in ``[B·N]``. parents, places: of what they continue and of themselves in ``[B·(N+1)]``.
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

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: Run) -> Tensor:
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

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: Run) -> Tensor:
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
            layer.dtype, layer.device = state.dtype, state.device
    cache = Cache(layers=[])
    cache.layers = _OneLayer([layer])
    return cache, layer


def states_in(layer: LinearAttentionLayer, specs: Sequence[StateSpec]) -> list[Tensor]:
    """What a call has left in its cache."""
    return [cast(Tensor, getattr(layer, spec.part)[spec.index]) for spec in specs]


@dataclass(frozen=True)
class Recurrent:
    """A module that keeps states, as it was called in a trial pass.

    Attributes:
        layer: the number that its states have in the cache.
        states: what it keeps.
    """

    layer: int
    module: nn.Module
    states: tuple[StateSpec, ...]
    args: tuple
    keywords: dict[str, Any]

    def __call__(self, hidden: Tensor, cache: Cache) -> Tensor:
        """What the module gives for `hidden` ``[1, n, H]``, called as it was."""
        first = self.tokens

        def replaced(value: Any) -> Any:
            if isinstance(value, StateProbe):
                return cache
            if value is first:
                return hidden
            if isinstance(value, Tensor):
                if value.dim() == 4:
                    return None
                return value.expand(1, hidden.shape[1], *value.shape[2:]) if value.shape[:2] == (1, 1) else value
            return type(value)(map(replaced, value)) if type(value) in (tuple, list) else value

        keywords = {name: replaced(value) for name, value in self.keywords.items() if name != "attention_mask"}
        return cast(Tensor, self.module(*map(replaced, self.args), **keywords))

    @property
    def tokens(self) -> Tensor:
        """The hidden states that it was called with, ``[1, 1, H]``."""
        return tokens_of(self.args, self.keywords)

    def projections(self) -> tuple[tuple[str, ...], str | None]:
        """See :func:`.hoisting.projections`."""
        hidden = self.tokens.expand(1, 2, -1).contiguous()
        return hoisting.projections(self.module, lambda hidden: self(hidden, cache_of(self.states, None)[0]), hidden)

    def check(self) -> bool:
        """Whether a text that it has begun can go on with several tokens at once.

        Raises:
            UnsupportedError: it gives something else if it reads a text token by token.
        """
        like, generator = self.tokens, torch.Generator().manual_seed(0)
        hidden = torch.randn(1, TRIED, like.shape[2], generator=generator).to(like)
        zero = [torch.zeros(1, *spec.shape, dtype=spec.dtype, device=spec.device) for spec in self.states]

        def read(counts: list[int], states: list[Tensor] | None = None) -> list[Tensor]:
            given, done = [], 0
            for count in counts:
                cache, own = cache_of(self.states, states)
                given.append(self(hidden[:, done : done + count], cache))
                if not isinstance(given[-1], Tensor):
                    raise UnsupportedError(
                        f"{type(self.module).__name__} keeps a recurrent state and gives more than hidden states, which nodes of a "
                        "block would need of their parent. Call generate without strategy=."
                    )
                states, done = states_in(own, self.states), done + count
            return [torch.cat(given, dim=1), *(states or ())]

        whole = read([TRIED])
        tolerance = TOLERANCE if like.dtype in (torch.float32, torch.float64) else LOW_TOLERANCE

        def same(other: list[Tensor]) -> bool:
            return all(
                a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-6))
                for a, b in zip(other, whole, strict=True)
            )

        half = TRIED // 2
        if not same(read([1] * TRIED, zero)) or not same(read([half, *[1] * (TRIED - half)])):
            raise UnsupportedError(
                f"{type(self.module).__name__} does not continue its own recurrent state token by token, so nodes of a block cannot be "
                "given their parent's. Call generate without strategy=."
            )
        return same(read([half, TRIED - half]))


class StateProbe(LayoutProbe):
    """Notes which modules update which states, besides what layers store per token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._running: list[tuple[nn.Module, tuple, dict[str, Any]]] = []
        self._calls: dict[int, tuple[nn.Module, tuple, dict[str, Any]]] = {}
        self.layers = _Noting(self, model.config.get_text_config(decoder=True))

    @property
    def recurrent(self) -> list[Recurrent]:
        """All modules that keep states, with what they left."""
        found = []
        for layer, (module, args, keywords) in sorted(self._calls.items()):
            states = []
            for part in ("conv_states", "recurrent_states"):
                for index, state in getattr(self.layers[layer], part).items():
                    if state is not None:
                        states.append(StateSpec(part, index, tuple(state.shape[1:]), state.dtype, state.device))  # type: ignore[arg-type]
            found.append(Recurrent(layer, module, tuple(states), args, keywords))
        return found

    def note(self, layer: int) -> None:
        """The module that runs has updated a state of this layer."""
        self._calls[layer] = self._running[-1]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Knows meanwhile which module runs."""

        def begins(module: nn.Module, args: tuple, keywords: dict[str, Any]) -> None:
            self._running.append((module, args, keywords))

        def ends(*_: Any) -> None:
            self._running.pop()

        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
            handles.append(module.register_forward_hook(ends, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Noting(list):
    """The layers of a :class:`StateProbe`, made when they are asked for."""

    def __init__(self, probe: StateProbe, config: Any) -> None:
        super().__init__()
        self._probe, self._config, self._made = probe, config, dict[int, LinearAttentionLayer]()

    def __getitem__(self, index: Any) -> Any:
        if index not in self._made:
            try:
                like = DynamicCache(config=self._config).layers[index]
            except (IndexError, KeyError, TypeError, ValueError):
                like = None
            self._made[index] = _noting_layer(self._probe, index, getattr(like, "number_of_states", 1))
        return self._made[index]

    def __len__(self) -> int:
        return 1 << 20


def _noting_layer(probe: StateProbe, index: int, states: int) -> LinearAttentionLayer:
    class NotingLayer(LinearAttentionLayer):
        def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
            probe.note(index)
            return cast(Tensor, super().update_conv_state(*args, **kwargs))

        def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
            probe.note(index)
            return cast(Tensor, super().update_recurrent_state(*args, **kwargs))

    return NotingLayer(number_of_states=states)


def may_keep_states(model: PreTrainedModel) -> bool:
    """Whether a model's config, or transformers, says that some layers keep a recurrent state."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return keeps_recurrent_state(model) or bool(
        {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"} & set(types)
    )


def adopt(found: Sequence[Recurrent]) -> bool:
    """Makes modules of a private tree run as the pass says that they are called in.

    Returns:
        whether all of them read a text in pieces of several tokens.

    Raises:
        UnsupportedError: one of them does not fit.
    """
    tried: dict[tuple, tuple[bool, tuple[tuple[str, ...], str | None]]] = {}
    for recurrent in found:
        module = recurrent.module
        if "forward" in vars(module):
            raise UnsupportedError(
                f"the forward of {type(module).__name__}, which keeps a recurrent state, was replaced: nodes of a block cannot be "
                "given their own states. Call generate without strategy=."
            )
        kind = type(module), recurrent.states
        if kind not in tried:
            tried[kind] = recurrent.check(), recurrent.projections()
        setattr(module, LAYER_ATTRIBUTE, recurrent.layer)
        setattr(module, CONTINUES_ATTRIBUTE, tried[kind][0])
    for recurrent in found:
        module = recurrent.module
        hoisting.hoist(module, tried[type(module), recurrent.states][1])
        module.__class__ = _by_node(cast(Hashable, type(module)))
    return all(continues for continues, _ in tried.values())


def tokens_of(args: tuple, keywords: dict[str, Any]) -> Tensor:
    """The hidden states in a module's arguments."""
    named = keywords.get("hidden_states")
    if isinstance(named, Tensor):
        return named
    return next(value for value in (*args, *keywords.values()) if isinstance(value, Tensor))


@cache
def _by_node(plain: type[nn.Module]) -> type[nn.Module]:
    """The class that stands in for `plain`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, SlotCache)]
        if not caches or caches[0].states is None:
            return plain.forward(self, *args, **kwargs)
        tokens = tokens_of(args, kwargs)
        shape = tokens.shape[0], tokens.shape[1]

        def call(select: Callable[[Tensor], Tensor], cache: Cache) -> Tensor:
            def chosen(value: Any) -> Any:
                if isinstance(value, SlotCache):
                    return cache
                if isinstance(value, Tensor):
                    if value.dim() == 4:  # a mask of the whole block: no token of these is padding
                        return None
                    return select(value) if value.shape[:2] == shape else value
                return type(value)(map(chosen, value)) if type(value) in (tuple, list) else value

            keywords = {name: chosen(value) for name, value in kwargs.items() if name != "attention_mask"}
            return cast(Tensor, plain.forward(self, *map(chosen, args), **keywords))

        return caches[0].states.run(getattr(self, LAYER_ATTRIBUTE), tokens, self, call)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
