"""How a head is trained, as plain settings: nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """All that decides what a head learns from the same text.

    Attributes:
        depth: drafted tokens that training simulates; the head's own outputs are fed back ``depth - 1`` times.
        layers: decoder layers of the target whose outputs are read, -1 is the last; None: see :func:`default_layers`.
        intermediate: width of the layer's MLP; None: the target's.
        draft_vocab: tokens that the head can propose, the most frequent ones of the data; None: all.
        tokens: most tokens of text.
        length: tokens per row.
        own_share: share of the rows that the model writes itself from their first quarter on.
        epochs: passes over the text.
        rows: per step.
        rate: peak learning rate.
        chains: share of the positions at which more than one token is simulated, drawn anew in every step.
        decay: weight of the loss at simulated token k is ``decay ** k``.
        bf16: compute in bfloat16; the weights that are learnt are float32.
        checks: how often per epoch acceptance is measured on held-out text.
        patience: checks without a gain before training stops.
        seed: of the weights and of the order of the data.
    """

    depth: int = 5
    layers: tuple[int, ...] | None = None
    intermediate: int | None = None
    draft_vocab: int | None = None
    tokens: int = 2_000_000
    length: int = 256
    own_share: float = 0.5
    epochs: int = 2
    rows: int = 8
    rate: float = 2e-3
    chains: float = 1.0
    decay: float = 0.8
    bf16: bool = True
    checks: int = 4
    patience: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.length < self.depth + 2:
            raise SettingsError(f"eagle3: rows of {self.length} tokens have no room for {self.depth} simulated ones")

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers that are read of a target with `count`, counted from 0.

        Raises:
            SettingsError: the target has no such layer.
        """
        layers = default_layers(count) if self.layers is None else self.layers
        if not layers or not all(-count <= layer < count for layer in layers):
            raise SettingsError(f"eagle3: layers must lie in 0 … {count - 1}, not {', '.join(map(str, layers))}")
        return tuple(layer % count for layer in layers)


def default_layers(count: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer: the authors' choice, which needs some depth; of fewer layers more of the upper ones."""
    return (1, count // 2 - 1, count - 4) if count >= 12 else (count // 6, count // 2, count - 1)
