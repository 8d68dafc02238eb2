"""What a draft model is before it learns: some of the target's layers, or a smaller model of the same kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..common.layers import decoder_layers
from ..errors import SettingsError
from ..training import TrainingError
from .recipe import DraftTraining


def new_draft(model: PreTrainedModel, training: DraftTraining) -> PreTrainedModel:
    """A draft model for `model`, float32, on its device.

    Raises:
        TrainingError: the target's layers cannot be told. SettingsError: it has not these layers, or no such size.
    """
    count = len(decoder_layers(model))
    if not count:
        raise TrainingError(
            f"{type(model).__name__} has no list of decoder layers, so no draft model can be made of it"
        )
    if training.origin == "layers":
        return cut(model, training.layers_of(count))
    return smaller(model, training.count_of(count), training.hidden, training.seed)


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """`model` with some of its decoder layers, in that order; everything else is the same."""
    own = decoder_layers(model)
    name = next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and list(m) == own)
    config = copy.deepcopy(model.config)
    _set_layers(config, len(own), layers)
    draft = _build(model, config, seed=0)
    state, source = {}, model.state_dict()
    for key in draft.state_dict():
        place = key.removeprefix(f"{name}.") if key.startswith(f"{name}.") else None
        if place is None:
            state[key] = source[key]
        else:
            number, rest = place.split(".", 1)
            state[key] = source[f"{name}.{layers[int(number)]}.{rest}"]
    draft.load_state_dict(state)
    return draft.to(model.device)  # type: ignore[arg-type]


def smaller(model: PreTrainedModel, count: int, hidden: int | None, seed: int) -> PreTrainedModel:
    """A model of the same class with `count` layers and random weights; heads keep their size, and their groups if they can.

    Raises:
        SettingsError: `hidden` holds no whole number of heads.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    width, heads = text.hidden_size, text.num_attention_heads
    head = getattr(text, "head_dim", None) or width // heads
    own = max(1, round(heads / 4)) if hidden is None else hidden * heads // width
    size = own * width // heads if hidden is None else hidden
    if own < 1 or size * heads != own * width or size > width:
        raise SettingsError(
            f"hidden is a multiple of {width // heads}, the target's width for each of its heads, up to {width}, not {hidden}"
        )
    groups = getattr(text, "num_key_value_heads", None)
    text.num_attention_heads = own
    if groups is not None:
        text.num_key_value_heads = max(1, own * groups // heads) if own % max(1, own * groups // heads) == 0 else own
    if getattr(text, "head_dim", None) is not None:
        text.head_dim = head
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if isinstance(getattr(text, name, None), int) and name not in getattr(type(text), "attribute_map", {}):
            setattr(text, name, max(1, getattr(text, name) * size // width))
    text.hidden_size = size
    _set_layers(config, len(decoder_layers(model)), range(count))
    return _build(model, config, seed).to(model.device)  # type: ignore[arg-type]


def _set_layers(config: Any, count: int, layers: Sequence[int]) -> None:
    """Config of a model with these of `count` layers: lists with an entry for each layer lose the others."""
    text = config.get_text_config(decoder=True)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)


def _build(model: PreTrainedModel, config: Any, seed: int) -> PreTrainedModel:
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = type(model)(config).float()
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft
