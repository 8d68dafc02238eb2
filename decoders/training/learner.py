"""What differs from one trained model to the next: the weights, the optimizers, and what one step learns from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Learner(ABC):
    """A model that is trained.

    Attributes:
        model: its weights are what is learnt.
        optimizers: each is stepped once per step; together they hold the model's parameters.
        positions: tokens, or positions, that one step learns from; for the speed that is shown.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    positions: int

    @abstractmethod
    def learn(self, step: int) -> Tensor:
        """Leaves the gradients of one step in the model; returns the loss, a scalar.

        The data of a step depends on the seed and on `step` alone: that is what makes a resumed run equal to a whole one.
        """

    def scores(self) -> list[float]:
        """Accuracies on held-out data; the weights with the greatest mean are kept. For runs with checks."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to check")
