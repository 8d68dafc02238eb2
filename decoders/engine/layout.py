"""What a model is made of: its backbone, its sizes, and what its layers store, learnt by running one token."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from . import attention, flex
from .cache import LayerSpec, LayoutProbe


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its output head: the child that holds the input embeddings."""
    embeddings = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embeddings for module in child.modules()))


def embeddings_of(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    return int(cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)


def context_length(model: PreTrainedModel) -> int:
    """How many positions the model can express; unbounded if its config does not say."""
    text = model.config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or (1 << 31)


@torch.no_grad()
def probe_layout(model: PreTrainedModel, kinds: int, packed: bool) -> tuple[list[LayerSpec], set[int]]:
    """What each layer stores per token, and how many query heads share a key head, learnt by running one token."""
    probe = LayoutProbe()
    device = model.device
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    mask = torch.zeros(1, kinds, 1, 1, dtype=dtype, device=device)
    if packed:
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        mask = flex.pack_mask(torch.zeros(1, dtype=torch.int64, device=device), one[0].long() - 1, one)
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    shape = attention.Probe()
    attention.tell_shape(mask, shape)
    model(input_ids=token, attention_mask=mask, position_ids=token, past_key_values=probe, use_cache=True)
    if not probe.layouts or sorted(probe.layouts) != list(range(len(probe.layouts))):
        raise UnsupportedError(
            f"{type(model).__name__} stored keys and values for layers {sorted(probe.layouts)}: every layer must go through "
            "the cache. Call generate without strategy=."
        )
    return [probe.layouts[i] for i in range(len(probe.layouts))], shape.groups
