"""A model cut off behind its first layers: its own draft, on the same weights."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ...errors import SettingsError, UnsupportedError
from .compiled.regions import decoder_layers
from .weights.twin import share_weights


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """`model` with its first `count` decoder layers only, then its own last norm and output head. Weights are shared, modules are not.

    Raises:
        UnsupportedError: its layers cannot be told. SettingsError: it does not have more layers than `count`.
    """
    name, twin = type(model).__name__, share_weights(model)
    layers = decoder_layers(twin)
    if not layers:
        raise UnsupportedError(f"{name} has no list of decoder layers that could be left early")
    if not 0 < count < len(layers):
        raise SettingsError(
            f"{name} has {len(layers)} layers and can be left behind layer 1 … {len(layers) - 1}, not {count}"
        )
    for module in twin.modules():
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            del module[count:]
    config = twin.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = count
    if isinstance(kinds, list):
        config.layer_types = kinds[:count]
    return twin
