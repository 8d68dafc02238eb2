"""Going over examples in epochs: a new order in each, the same in every run; and how long such a run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .learner import Learner
from .trainer import Run


class Recipe(Protocol):
    """Settings of a training, a dataclass.

    Attributes:
        epochs: most passes over the examples.
        rate: peak learning rate.
        checks: checks of the held-out scores per epoch.
        patience: checks without a better score before training stops.
        seed: of the orders.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def epochs(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def checks(self) -> int: ...
    @property
    def patience(self) -> int: ...
    @property
    def seed(self) -> int: ...


class EpochLearner(Learner):
    """A learner that takes its examples in another order in every epoch.

    Args:
        examples: how many there are.
        per_step: how many a step learns from; what is left over at an epoch's end is not learnt from in it.
    """

    def __init__(self, training: Recipe, examples: int, per_step: int) -> None:
        self._recipe, self._examples, self._per_step = training, examples, per_step
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self._examples // self._per_step)

    def examples_of(self, step: int) -> Tensor:
        """``[per_step]`` int64, which examples a step learns from; it depends on the seed and on `step` alone."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._examples, generator=generator)
        return self._order[place * self._per_step : (place + 1) * self._per_step]

    def run_at(
        self, schedule: Callable[..., float], identity: Mapping[str, Any], clip: float | None = None, **shape: Any
    ) -> Run:
        """The run of this learner.

        Args:
            schedule: the learning rate by step, with `shape`; see :mod:`.schedules`.
            identity: fingerprints of data and model.
            clip: greatest norm of the gradients.
        """
        training, steps = self._recipe, self._recipe.epochs * self.steps_per_epoch
        return Run(
            steps=steps,
            rate=partial(schedule, steps=steps, peak=training.rate, **shape),
            identity={**asdict(training), **identity},
            clip=clip,
            check_every=max(1, self.steps_per_epoch // training.checks),
            patience=training.patience,
        )
