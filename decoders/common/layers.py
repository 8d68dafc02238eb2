"""Where the decoder layers of a model are, whatever it calls them."""

from __future__ import annotations

from torch import nn

#: Modules that transformers numbers by decoder layer: attention modules are.
LAYER_INDEX = "layer_idx"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of `model`: members of the outermost lists each of which holds attention of one layer index."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            indices = [_indices(layer) for layer in module]
            if all(len(index) == 1 for index in indices) and len(set().union(*indices)) == len(module):
                return list(module)
    return []


def _indices(layer: nn.Module) -> set[int]:
    return {i for m in layer.modules() if isinstance(i := getattr(m, LAYER_INDEX, None), int)}
