"""The values of a model's config, as something that can be compared: they decide what a forward pass computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from ....common.transformers_compat import NO_PART_OF_NETWORK

#: Values that are compared as they are.
_VALUES = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
#: How deep containers are looked at.
_DEPTH = 6


def config_state(config: PreTrainedConfig, other: Callable[[Any], object], depth: int = _DEPTH) -> tuple[object, ...]:
    """Something that differs whenever a value of `config`, or of a config in it, does.

    It is asked for before every call, hence no copy and no ``to_dict``: some five microseconds.

    Args:
        other: the same for what is neither a plain value nor a container nor a config.
    """
    return tuple(
        [
            (name, value if type(value) in _VALUES else _state(value, other, depth))
            for name, value in vars(config).items()
            if name not in NO_PART_OF_NETWORK
        ]
    )


def _state(value: Any, other: Callable[[Any], object], depth: int) -> object:
    if type(value) in _VALUES:
        return value
    if depth == 0:
        return id(value)
    if isinstance(value, PreTrainedConfig):
        return id(value), config_state(value, other, depth - 1)
    if isinstance(value, (list, tuple)):
        # Entries for each layer: a kind of attention, a window.
        return (
            tuple(value) if _VALUES.issuperset(map(type, value)) else tuple(_state(v, other, depth - 1) for v in value)
        )
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, dict):
        return tuple([(key, _state(entry, other, depth - 1)) for key, entry in value.items()])
    return other(value)
