"""How a draft model is made and trained, as plain settings: nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import SettingsError

Origin = Literal["layers", "scratch"]


@dataclass(frozen=True, kw_only=True)
class DraftTraining:
    """All that decides what a draft model is and what it learns from the same text.

    Attributes:
        origin: ``layers``: some of the target's own layers, with its embedding and head (draft by pruning); ``scratch``: a model
            of the target's kind with random weights.
        count: layers of the draft model; None: a sixth of the target's.
        keep: which of the target's layers, instead of `count`; -1 is the last.
        hidden: hidden size of a model from scratch; None: about a quarter of the target's. Heads keep their size.
        tokens: most tokens of text.
        length: tokens per row.
        own_share: share of the rows that the target writes itself from their first quarter on.
        epochs: passes over the text.
        rows: per step.
        rate: peak learning rate.
        bf16: compute in bfloat16; the weights that are learnt are float32.
        checks: how often per epoch agreement with the target is measured on held-out text.
        patience: checks without a gain before training stops.
        seed: of the weights and of the order of the data.
    """

    origin: Origin = "layers"
    count: int | None = None
    keep: tuple[int, ...] | None = None
    hidden: int | None = None
    tokens: int = 2_000_000
    length: int = 256
    own_share: float = 0.5
    epochs: int = 2
    rows: int = 8
    rate: float = 1e-3
    bf16: bool = True
    checks: int = 4
    patience: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.origin not in ("layers", "scratch"):
            raise SettingsError(f"a draft model is made from layers or from scratch, not from {self.origin!r}")
        if self.keep is not None and (self.count is not None or self.origin == "scratch"):
            raise SettingsError("keep names layers of the target: it goes with origin 'layers', and without count")
        if self.hidden is not None and self.origin == "layers":
            raise SettingsError("the target's own layers keep their size: hidden goes with origin 'scratch'")
        if self.count is not None and self.count < 1:
            raise SettingsError(f"a draft model has 1 or more layers, not {self.count}")

    def layers_of(self, count: int) -> tuple[int, ...]:
        """Which layers of a target with `count` are kept, counted from 0: spread evenly, the first and the last among them.

        Raises:
            SettingsError: the target has no such layers.
        """
        if self.keep is not None:
            if not self.keep or not all(-count <= layer < count for layer in self.keep):
                raise SettingsError(f"layers to keep lie in 0 … {count - 1}, not {', '.join(map(str, self.keep))}")
            return tuple(layer % count for layer in self.keep)
        kept = self.count_of(count)
        if kept > count:
            raise SettingsError(f"the target has {count} layers, {kept} cannot be kept")
        return tuple(round(i * (count - 1) / (kept - 1)) for i in range(kept)) if kept > 1 else (0,)

    def count_of(self, count: int) -> int:
        """Layers of a draft model for a target with `count`."""
        return self.count or max(1, round(count / 6))
