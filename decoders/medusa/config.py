"""What heads are, and how they are trained, as plain settings: nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import SettingsError

Projection = Literal["tied", "low_rank", "full"]


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Shape of the heads, the tree they are verified in, and where they come from.

    Attributes:
        heads: ``K``; head k predicts the token k places behind the one that the output head gives.
        layers: residual blocks of each head.
        hidden_size: of the model they belong to.
        vocab_size: of the model they belong to.
        projection: ``tied``: the model's own output head, nothing is stored; ``low_rank``: that plus a difference of rank
            `rank`; ``full``: a projection of each head's own, as in the paper.
        rank: of the difference; 0 with the other projections.
        tree: paths in Medusa's notation, best first, so that its first n paths are the tree of n nodes; None: the default.
        figures: what training measured, for the model card.
    """

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    projection: Projection = "full"
    rank: int = 0
    tree: tuple[tuple[int, ...], ...] | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.heads, self.layers, self.hidden_size, self.vocab_size) < 1:
            raise SettingsError("Medusa heads: heads, layers, hidden_size and vocab_size must be at least 1")
        if self.projection not in ("tied", "low_rank", "full"):
            raise SettingsError(f"Medusa heads: projection must be tied, low_rank or full, not {self.projection!r}")
        if (self.projection == "low_rank") != (self.rank > 0):
            raise SettingsError("Medusa heads: a rank goes with projection low_rank, and only with that")


@dataclass(frozen=True, kw_only=True)
class HeadsTraining:
    """All that decides what heads learn from the same text.

    Attributes:
        heads: see :class:`HeadsConfig`.
        layers: see :class:`HeadsConfig`.
        projection: see :class:`HeadsConfig`.
        rank: see :class:`HeadsConfig`.
        tokens: most tokens of text that hidden states are kept for.
        length: tokens per row.
        own_share: share of the rows that the model writes itself from their first quarter on.
        epochs: passes over all positions.
        batch: positions per step.
        rate: peak learning rate.
        decay: weight of head k's loss is ``decay ** k`` (the paper's λ_k).
        bf16: compute in bfloat16.
        checks: how often per epoch head accuracy is measured.
        patience: checks without a gain before training stops.
        seed: of the order of the data.
    """

    heads: int = 4
    layers: int = 1
    projection: Projection = "tied"
    rank: int = 0
    tokens: int = 1_000_000
    length: int = 256
    own_share: float = 0.5
    epochs: int = 4
    batch: int = 512
    rate: float = 1e-3
    decay: float = 0.8
    bf16: bool = True
    checks: int = 2
    patience: int = 4
    seed: int = 0

    def config(self, hidden_size: int, vocab_size: int) -> HeadsConfig:
        """The shape of the heads for a model of these sizes."""
        return HeadsConfig(
            heads=self.heads, layers=self.layers, projection=self.projection, rank=self.rank, hidden_size=hidden_size,
            vocab_size=vocab_size,
        )  # fmt: skip
