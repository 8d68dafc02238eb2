"""The target's outputs for strategies: hidden states of decoder layers, the head's input, and the head itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...common.transformers_compat import decoder_layers
from ...errors import SettingsError, UnsupportedError
from .torch_compat import remove_hooks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...strategy import Strategy


def layer_indices(model: PreTrainedModel, strategy: Strategy) -> tuple[int, ...]:
    """The decoder layers of `model` that `strategy` reads, counted from the first.

    Raises:
        SettingsError: the model lacks these layers. UnsupportedError: its layers were not found.
    """
    name, count = type(model).__name__, len(decoder_layers(model))
    if not count:
        raise UnsupportedError(f"{strategy.name} reads hidden layers, and {name} has no list of decoder layers")
    named = strategy.layers_for(model.config, count)
    if not isinstance(named, tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in named):
        raise SettingsError(f"{strategy.name}: hidden_layers is a tuple of integers, not {named!r}")
    wrong = [i for i in named if not -count <= i < count]
    if wrong:
        raise SettingsError(
            f"{strategy.name}: hidden_layers asks for layer {wrong[0]}; {name} has layers 0 … {count - 1}, or -{count} … -1 from the "
            "end"
        )
    return tuple(i % count for i in named)


class HeadInputs:
    """Keeps the input of the output head in a pass, for strategies, and restricts the head to some nodes."""

    def __init__(self, head: nn.Module) -> None:
        # A list, because Dynamo can trace it.
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

    def let_read(self, nodes: Tensor | None) -> None:
        """Restricts the head to `nodes` ``[K]`` int64 in the next pass; None: all nodes."""
        self._kept.clear()
        if nodes is not None:
            self._kept.append(nodes)

    def taken(self) -> Tensor:
        """``[B, N, H]``, the head's unrestricted input in the last pass."""
        states = self._seen[-1]
        self._seen.clear()
        return states

    def forget(self) -> None:
        """Drops the inputs of trial passes."""
        self._seen.clear()


class LayerStates:
    """Keeps the outputs of decoder layers in a pass. layers: their indices, from 0 on, in any order."""

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
        """``[B, N, T, H]``, the layers' outputs in the last pass, in the order of `layers`."""
        states = self._seen[-len(self._order) :]
        self._seen.clear()
        return torch.stack([states[place] for place in self._places], dim=2)

    def forget(self) -> None:
        """Drops the outputs of a trial pass."""
        self._seen.clear()

    def _note(self):  # type: ignore[no-untyped-def]
        seen = self._seen

        def note(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            if states.dim() != 3:
                raise UnsupportedError(
                    f"{type(module).__name__} gives {list(states.shape)}, which is no hidden state per token"
                )
            seen.append(states)

        return note


class Taps:
    """The outputs besides logits that a private tree's passes keep.

    Attributes:
        head: the input of its head.
        layers: indices of the decoder layers whose outputs are kept.
        states: the layers' outputs; None if `layers` is empty.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...] = ()) -> None:
        self.head, self.layers = HeadInputs(model.get_output_embeddings()), layers
        self.states = LayerStates(model, layers) if layers else None

    def unwatch(self, model: PreTrainedModel) -> None:
        """Removes the hooks from a copy of the tree."""
        self.head.unwatch(model.get_output_embeddings())
        if self.states is not None:
            self.states.unwatch(model)


class OutputHead:
    """The output head of a private model, with everything that the model applies to logits after it.

    Runs the model's own forward, with a stand-in for the modules before the head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        embeddings, head, given = model.get_input_embeddings(), model.get_output_embeddings(), _HiddenStates()
        for name, child in list(model.named_children()):
            if any(module is embeddings for module in child.modules()):
                setattr(model, name, _Given(child, given))
        head.register_forward_pre_hook(lambda _, args: (given.hidden, *args[1:]))
        self._model, self._given = model, given

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``[B, N, V]`` float32 for the head's input ``[B, N, H]``."""
        self._given.hidden = hidden
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        try:
            return self._model(input_ids=ids, use_cache=False).logits.float()
        finally:
            self._given.hidden = None

    def check(self, hidden: Tensor, logits: Tensor) -> None:
        """Raises UnsupportedError unless the head gives `logits` for `hidden`, up to rounding."""
        gap, largest = (self(hidden) - logits).abs().max().item(), max(logits.abs().max().item(), 1.0)
        tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 0.1
        if not gap <= tolerance * largest:
            raise UnsupportedError(
                f"{type(self._model).__name__}: its output head by itself differs from the model by {gap:.2g} (largest logit "
                f"{largest:.2g}), so nothing can be drafted with it"
            )


@dataclass
class _Output(BaseModelOutputWithPast):
    """Hidden states; all other attributes are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@dataclass
class _HiddenStates:
    """``[B, N, H]`` during a call of the head; otherwise None."""

    hidden: Tensor | None = None


class _Given(nn.Module):
    """Replaces the module that computes hidden states, and returns given hidden states.

    So do its inner modules that the model calls (OPT). Other attributes (Falcon-H1 reads a multiplier) are passed through.
    """

    def __init__(self, replaced: Callable, given: _HiddenStates) -> None:
        super().__init__()
        vars(self).update(replaced=replaced, given=given)  # not registered as submodules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        value = getattr(self.replaced, name)
        return _Given(value, self.given) if callable(value) else value

    def forward(self, *args: object, **kwargs: object) -> _Output:
        return _Output(last_hidden_state=self.given.hidden)
