"""The training loop that everything trained in this project shares: schedule, early stop, progress, state on disk.

A :class:`Learner` says what is learnt from which data, a :class:`Run` how long and at which pace. :class:`Trainer` does the rest.
Nothing here is needed to decode.
"""

from __future__ import annotations

from .learner import Learner
from .trainer import Run, Step, Trainer, TrainingError

__all__ = ["Learner", "Run", "Step", "Trainer", "TrainingError"]
