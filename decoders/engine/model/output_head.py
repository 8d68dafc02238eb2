"""The output head of a model, without the model's other layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OutputHead:
    """The output head of our copy of a model, and everything that the model does with the head's logits, for example a softcap.

    A call runs the model's own forward pass, with the modules before the head replaced by a stand-in.
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
        """Raises UnsupportedError unless the head computes `logits` from `hidden`, up to rounding."""
        gap, largest = (self(hidden) - logits).abs().max().item(), max(logits.abs().max().item(), 1.0)
        tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 0.1
        if not gap <= tolerance * largest:
            raise UnsupportedError(
                f"{type(self._model).__name__}: the logits of its output head, run separately, differ from the model's by {gap:.2g} "
                f"(largest logit {largest:.2g}), so it cannot be used for drafting"
            )


@dataclass
class _Output(BaseModelOutputWithPast):
    """The output of the stand-in :class:`_Given`: hidden states. All other attributes are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@dataclass
class _HiddenStates:
    """The head's input. hidden: ``[B, N, H]`` during a call of :class:`OutputHead`; otherwise None."""

    hidden: Tensor | None = None


class _Given(nn.Module):
    """A stand-in for the backbone (the module that computes hidden states): returns the hidden states in `given`.

    If a model calls a module inside the backbone directly (OPT), a stand-in replaces this module, too. If a model reads another
    attribute of the backbone (Falcon-H1 reads a multiplier), the stand-in returns the backbone's value.
    """

    def __init__(self, replaced: Callable, given: _HiddenStates) -> None:
        super().__init__()
        vars(self).update(replaced=replaced, given=given)  # so that they are not registered as submodules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        value = getattr(self.replaced, name)
        return _Given(value, self.given) if callable(value) else value

    def forward(self, *args: object, **kwargs: object) -> _Output:
        return _Output(last_hidden_state=self.given.hidden)
