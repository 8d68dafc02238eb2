"""What strategies get from a pass besides logits: hidden states of decoder layers, and the output head's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...common.transformers_compat import decoder_layers
from ...errors import UnsupportedError
from .modules_compat import remove_hooks


class HeadInputs:
    """Stores the output head's input during a pass, for strategies, and can restrict the head to some nodes."""

    def __init__(self, head: nn.Module) -> None:
        # The input is kept in a list, because Dynamo can trace a list.
        seen: list[Tensor] = []
        kept: list[Tensor] = []

        def note(_: nn.Module, args: tuple) -> tuple | None:
            seen.append(args[0])
            return (args[0].index_select(1, kept.pop()), *args[1:]) if kept else None

        self._seen, self._kept = seen, kept
        self._id = head.register_forward_pre_hook(note).id

    def unwatch(self, head: nn.Module) -> None:
        """Removes the hook from a copy of the head."""
        remove_hooks(head, [self._id])

    def restrict_to(self, nodes: Tensor | None) -> None:
        """Restricts the head to `nodes` ``[K]`` int64 in the next pass; None for all nodes."""
        self._kept.clear()
        if nodes is not None:
            self._kept.append(nodes)

    def taken(self) -> Tensor:
        """Returns the head's input for all nodes of the last pass, ``[B, N, H]``, and drops it."""
        states = self._seen[-1]
        self._seen.clear()
        return states

    def forget(self) -> None:
        """Drops the stored inputs, after trial passes."""
        self._seen.clear()


class LayerStates:
    """Stores the outputs of some decoder layers during a pass. layers: the indices of these decoder layers, in any order."""

    def __init__(self, model: nn.Module, layers: tuple[int, ...]) -> None:
        self._order = sorted(set(layers))
        self._places = [self._order.index(layer) for layer in layers]
        self._seen: list[Tensor] = []
        decoder = decoder_layers(model)
        self._ids = [decoder[i].register_forward_hook(self._note()).id for i in self._order]

    def unwatch(self, model: nn.Module) -> None:
        """Removes the hooks from a copy of the model."""
        for module in model.modules():
            remove_hooks(module, self._ids)

    def taken(self) -> Tensor:
        """Returns the layers' outputs in the last pass, ``[B, N, T, H]``, in the order of `layers`, and drops them."""
        states = self._seen[-len(self._order) :]
        self._seen.clear()
        return torch.stack([states[place] for place in self._places], dim=2)

    def forget(self) -> None:
        """Drops the stored outputs, after a trial pass."""
        self._seen.clear()

    def _note(self):  # type: ignore[no-untyped-def]
        seen = self._seen

        def note(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            if states.dim() != 3:
                raise UnsupportedError(
                    f"{type(module).__name__} returns shape {list(states.shape)}, not a hidden state per token [B, N, H]"
                )
            seen.append(states)

        return note


class Taps:
    """The hooks in our copy of a model that store outputs of a pass besides logits.

    Attributes:
        head: stores the input of the output head.
        layers: indices of the decoder layers whose outputs are stored.
        states: stores the outputs of `layers`; None if `layers` is empty.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...] = ()) -> None:
        self.head, self.layers = HeadInputs(model.get_output_embeddings()), layers
        self.states = LayerStates(model, layers) if layers else None

    def unwatch(self, model: PreTrainedModel) -> None:
        """Removes the hooks from a copy of the model."""
        self.head.unwatch(model.get_output_embeddings())
        if self.states is not None:
            self.states.unwatch(model)
