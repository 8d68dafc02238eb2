"""Finds out by a trial pass which keys, values and recurrent states a model stores, and checks that states can be continued."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from ...common.transformers_compat import keeps_recurrent_state
from ...errors import UnsupportedError
from .cache import LayerSpec
from .recurrent import (
    CONTINUES_ATTRIBUTE,
    LAYER_ATTRIBUTE,
    by_node,
    cache_of,
    hoist,
    on_others,
    projections,
    states_in,
    tokens_of,
)
from .row_states import StateSpec

#: Number of layers of the probe's cache. It is finite, because a model may iterate over the layers.
MOST_LAYERS = 4096
#: Number of tokens of a trial text.
TRIED = 6
#: Tolerated relative difference between the results for a text in one piece and in two pieces, in float32 and in lower precision.
IN_PIECES, LOW_IN_PIECES = 1e-3, 2e-2
#: Tolerated relative difference between the results in one piece and token by token. Some models use other equations for single
#: tokens: Nemotron-H and Zamba2 differ by 3e-2.
TOKEN_BY_TOKEN = 0.1


@dataclass(frozen=True)
class Recurrent:
    """A module with recurrent states, and its arguments in a trial pass. layer: index of the cache layer that holds the states."""

    layer: int
    module: nn.Module
    states: tuple[StateSpec, ...]
    args: tuple
    keywords: dict[str, Any]

    def __call__(self, hidden: Tensor, cache: Cache) -> Tensor:
        """The module's output for `hidden` ``[1, n, H]``. All other arguments are as in the trial pass."""
        first = self.tokens

        def tensor(value: Tensor) -> Tensor:
            if value is first:
                return hidden
            return value.expand(1, hidden.shape[1], *value.shape[2:]) if value.shape[:2] == (1, 1) else value

        args, keywords = on_others(self.args, self.keywords, StateProbe, cache, tensor)
        return cast(Tensor, self.module(*args, **keywords))

    @property
    def tokens(self) -> Tensor:
        """The module's input in the trial pass, ``[1, 1, H]``."""
        return tokens_of(self.args, self.keywords)

    def projections(self) -> tuple[tuple[str, ...], str | None]:
        """The names of the linear layers that read the module's input and compute its output (:func:`.recurrent.projections`)."""
        hidden = self.tokens.expand(1, 2, -1).contiguous()
        return projections(self.module, lambda hidden: self(hidden, cache_of(self.states, None)[0]), hidden)

    def check(self) -> bool:
        """Whether the module can continue a text with several tokens at once.

        Raises:
            UnsupportedError: the module's results for a text are different if the text is read token by token.
        """
        like, generator = self.tokens, torch.Generator().manual_seed(0)
        hidden = torch.randn(1, TRIED, like.shape[2], generator=generator, device="cpu").to(like)
        zero = [torch.zeros(1, *spec.shape, dtype=spec.dtype, device=spec.device) for spec in self.states]

        def read(counts: list[int], states: list[Tensor] | None = None) -> list[Tensor]:
            given, done = [], 0
            for count in counts:
                cache, own = cache_of(self.states, states)
                given.append(self(hidden[:, done : done + count], cache))
                if not isinstance(given[-1], Tensor):
                    raise UnsupportedError(
                        f"{type(self.module).__name__} keeps a recurrent state and returns more than hidden states: the loop cannot "
                        "run it node by node. Call generate without strategy=."
                    )
                states, done = states_in(own, self.states), done + count
            return [torch.cat(given, dim=1), *(states or ())]

        whole = read([TRIED])

        def same(other: list[Tensor], tolerance: float) -> bool:
            return all(
                a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-6))
                for a, b in zip(other, whole, strict=True)
            )

        half = TRIED // 2
        one_by_one = read([1] * TRIED, zero), read([half, *[1] * (TRIED - half)])
        if not all(same(other, TOKEN_BY_TOKEN) for other in one_by_one):
            raise UnsupportedError(
                f"{type(self.module).__name__} does not continue its own recurrent state token by token, so a node of a block cannot "
                "continue its parent's state. Call generate without strategy=."
            )
        return same(
            read([half, TRIED - half]), IN_PIECES if like.dtype in (torch.float32, torch.float64) else LOW_IN_PIECES
        )


class LayoutProbe(Cache):
    """An empty cache for a trial pass. Records every layer's keys and layout, and whether a layer calls :meth:`get_seq_length`."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layouts: dict[int, LayerSpec] = {}
        self.keys: list[Tensor] = []
        self.counted = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layouts[layer_idx] = LayerSpec(
            key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3],
            key_states.dtype, key_states.device,
        )  # fmt: skip
        self.keys.append(key_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.counted = True
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def watching(self, model: nn.Module) -> AbstractContextManager:
        """The context in which to run `model` with this cache. It has no effect here; subclasses override it."""
        return nullcontext()


class StateProbe(LayoutProbe):
    """A :class:`LayoutProbe` that also records which module updates the states of which layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._running: list[tuple[nn.Module, tuple, dict[str, Any]]] = []
        self._calls: dict[int, tuple[nn.Module, tuple, dict[str, Any]]] = {}
        self.layers = _Noting(self, model.config.get_text_config(decoder=True))

    @property
    def recurrent(self) -> list[Recurrent]:
        modules = []
        for layer, (module, args, keywords) in sorted(self._calls.items()):
            states = []
            for part in ("conv_states", "recurrent_states"):
                for index, state in getattr(self.layers[layer], part).items():
                    if state is not None:
                        states.append(StateSpec(part, index, tuple(state.shape[1:]), state.dtype, state.device))
            modules.append(Recurrent(layer, module, tuple(states), args, keywords))
        return modules

    def note(self, layer: int) -> None:
        """Records that the module that runs now has updated a state of `layer`."""
        self._calls[layer] = self._running[-1]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within this context, tracks which module of `model` runs now."""

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
    """The layers of a :class:`StateProbe`, created on access."""

    def __init__(self, probe: StateProbe, config: Any) -> None:
        super().__init__()
        self._probe, self._config, self._made = probe, config, dict[int, LinearAttentionLayer]()

    @functools.cached_property
    def _usual(self) -> list[Any]:
        """The layers of transformers' own cache; empty if transformers cannot create the layers in advance."""
        try:
            return list(DynamicCache(config=self._config).layers)
        except (KeyError, TypeError, ValueError):
            return []

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index not in self._made:
            usual = self._usual[index] if index < len(self._usual) else None
            self._made[index] = _noting_layer(self._probe, index, getattr(usual, "number_of_states", 1))
        return self._made[index]

    def __len__(self) -> int:
        return MOST_LAYERS


def _noting_layer(probe: StateProbe, index: int, states: int) -> LinearAttentionLayer:
    class NotingLayer(LinearAttentionLayer):
        def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
            probe.note(index)
            return super().update_conv_state(*args, **kwargs)

        def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
            probe.note(index)
            return super().update_recurrent_state(*args, **kwargs)

    return NotingLayer(number_of_states=states)


def may_keep_states(model: PreTrainedModel) -> bool:
    """Whether the config's layer types, or the model's class in transformers, indicate a recurrent state."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return keeps_recurrent_state(model) or bool(
        {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"} & set(types)
    )


def adopt(entries: Sequence[Recurrent]) -> bool:
    """Lets a :class:`~decoders.engine.model.slot_cache.StatePass` decide how the recurrent modules in our copy of a model run.

    Returns whether they can all continue a text with several tokens at once. Raises UnsupportedError if one cannot run node by node.
    """
    tried: dict[tuple, tuple[bool, tuple[tuple[str, ...], str | None]]] = {}
    for recurrent in entries:
        module = recurrent.module
        if "forward" in vars(module):
            raise UnsupportedError(
                f"the forward of {type(module).__name__}, which keeps a recurrent state, was replaced: the loop cannot run it node by "
                "node. Call generate without strategy=."
            )
        kind = type(module), recurrent.states
        if kind not in tried:
            tried[kind] = recurrent.check(), recurrent.projections()
        setattr(module, LAYER_ATTRIBUTE, recurrent.layer)
        setattr(module, CONTINUES_ATTRIBUTE, tried[kind][0])
    for recurrent in entries:
        module = recurrent.module
        hoist(module, tried[type(module), recurrent.states][1])
        module.__class__ = by_node(cast(Hashable, type(module)))
    return all(continues for continues, _ in tried.values())
