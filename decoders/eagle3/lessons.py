"""What a head learns from at a stretch of text: the target's features, embeddings and distributions, computed on the fly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..common.layers import decoder_layers
from ..training import TrainingError
from ..training.texts import Texts, counted


@dataclass(frozen=True)
class Lesson:
    """Rows of text, as the target reads them.

    Attributes:
        features: ``[B, T, F]``, outputs of the target's layers side by side.
        embedded: ``[B, T, H]``, of the tokens themselves.
        logits: ``[B, T, V]`` float32, the target's after every token.
        counted: ``[B, T]`` bool, after which tokens a prediction counts.
    """

    features: Tensor
    embedded: Tensor
    logits: Tensor
    counted: Tensor


class Teacher:
    """The frozen target.

    Args:
        layers: indices of the decoder layers that are read.
        bf16: compute in bfloat16.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], bf16: bool) -> None:
        decoder = decoder_layers(model)
        if not decoder:
            raise TrainingError(f"eagle3 reads hidden layers, and {type(model).__name__} has no list of decoder layers")
        self.model, self.layers, self.bf16 = model, [decoder[layer] for layer in layers], bf16

    @torch.no_grad()
    def lesson(self, texts: Texts, stops: Sequence[int]) -> Lesson:
        """Reads all rows of `texts` at once. stops: what ends the model's own text; nothing behind it counts."""
        model, ids = self.model, texts.ids.to(self.model.device)
        with self._noting() as noted, self.precision():
            logits = model(input_ids=ids, use_cache=False).logits
        features = torch.cat([noted[layer].float() for layer in self.layers], dim=-1)
        embedded = model.get_input_embeddings()(ids).float()
        return Lesson(features, embedded, logits.float(), counted(texts, stops).to(ids.device))

    def precision(self) -> torch.autocast | nullcontext:
        """What the target, and the head, compute in."""
        return torch.autocast(self.model.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    @contextmanager
    def _noting(self) -> Iterator[dict[torch.nn.Module, Tensor]]:
        noted: dict[torch.nn.Module, Tensor] = {}

        def note(layer: torch.nn.Module, _: object, output: Tensor | tuple) -> None:
            noted[layer] = output if isinstance(output, Tensor) else output[0]

        hooks = [layer.register_forward_hook(note) for layer in dict.fromkeys(self.layers)]
        try:
            yield noted
        finally:
            for hook in hooks:
                hook.remove()
