"""Settings for the training of heads and draft models. This file does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import SettingsError, amount

Origin = Literal["layers", "scratch"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings that all kinds of training share.

    Attributes:
        tokens: greatest number of training tokens.
        length: number of tokens per row.
        own_share: share of the rows that the target itself continues after their first quarter.
        epochs: greatest number of passes over the examples.
        rate: peak learning rate.
        bf16: whether to compute in bfloat16; the trained weights are float32.
        checks: number of measurements of the held-out scores per epoch.
        patience: training stops after this number of checks without a gain.
        seed: seed of the initial weights and of the order of the data.
    """

    tokens: int = 2_000_000
    length: int = 256
    own_share: float = 0.5
    epochs: int = 2
    rate: float = 1e-3
    bf16: bool = True
    checks: int = 4
    patience: int = 4
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HeadsTraining(Recipe):
    """Settings of Medusa heads and of their training. Further attributes are in :class:`Recipe`.

    Attributes:
        heads: number of heads.
        layers: number of residual blocks in each head.
        projection: each head's projection to the vocabulary: tied, low_rank or full.
        rank: rank of a low_rank projection.
        tokens: greatest number of training tokens. Their hidden states are stored on disk.
        batch: number of positions per step.
        decay: head k's loss has the weight ``decay ** k`` (the paper's λ_k).
    """

    heads: int = 4
    layers: int = 1
    projection: Literal["tied", "low_rank", "full"] = "tied"
    rank: int = 0
    tokens: int = 1_000_000
    epochs: int = 4
    batch: int = 512
    decay: float = 0.8
    checks: int = 2


@dataclass(frozen=True, kw_only=True)
class HeadTraining(Recipe):
    """Settings of an EAGLE-3 head and of its training. Further attributes are in :class:`Recipe`.

    Attributes:
        depth: number of drafted tokens that training simulates. The head's outputs are fed back ``depth - 1`` times.
        layers: indices of the target's decoder layers that are read, -1 is the last; None: :func:`default_layers`.
        intermediate: width of the layer's MLP; None: the target's.
        draft_vocab: number of tokens that the head can propose (the most frequent tokens of the text); None: all.
        rows: number of rows per step.
        chains: share of positions at which more than one token is simulated. The positions are drawn anew in every step.
        decay: the loss at simulated token k has the weight ``decay ** k``.
    """

    depth: int = 5
    layers: tuple[int, ...] | None = None
    intermediate: int | None = None
    draft_vocab: int | None = None
    rows: int = 8
    rate: float = 2e-3
    chains: float = 1.0
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.depth < 1 or self.length < self.depth + 2:
            raise SettingsError(
                f"eagle3: for depth={self.depth}, length must be at least {self.depth + 2} tokens, not {self.length}"
            )

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The indices (from 0) of the layers that the head reads in a target with `count` layers.

        Raises:
            SettingsError: the target lacks one of the layers.
        """
        layers = default_layers(count) if self.layers is None else self.layers
        if not layers or not all(-count <= layer < count for layer in layers):
            raise SettingsError(f"eagle3: layers must lie in 0 … {count - 1}, not {', '.join(map(str, layers))}")
        return tuple(layer % count for layer in layers)


@dataclass(frozen=True, kw_only=True)
class BlockTraining(Recipe):
    """Settings of a block draft model and of its training. Further attributes are in :class:`Recipe`.

    Attributes:
        block: number of tokens that are drafted in one pass.
        depth: number of the draft model's decoder layers.
        layers: indices of the target's decoder layers that are read; None: three, spread over all layers but the last.
        intermediate: width of the MLPs in the draft model's layers; None: the target's.
        rank: rank of the bias that the head adds (DSpark); 0: no head.
        head: what the bias at a draft token depends on. vanilla: the token before it. rnn: all tokens before it in the block, and the
            network's hidden state at this place.
        draft_vocab: number of tokens that the draft model can propose (the most frequent tokens of the text); None: all.
        rows: number of rows per step.
        blocks: share of a row's positions at which a block begins. The positions are drawn anew in every step.
        decay: the loss at a block's draft token k has the weight ``decay ** k``.
    """

    block: int = 8
    depth: int = 2
    layers: tuple[int, ...] | None = None
    intermediate: int | None = None
    rank: int = 64
    head: Literal["vanilla", "rnn"] = "vanilla"
    draft_vocab: int | None = None
    rows: int = 8
    rate: float = 6e-3
    blocks: float = 1 / 16
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.head not in ("vanilla", "rnn"):
            raise SettingsError(f"dflash: the head must be vanilla or rnn, not {self.head!r}")
        if not 2 <= self.block <= self.length // 2:
            raise SettingsError(
                f"dflash: a block must have 2 … {self.length // 2} tokens (half a row), not {self.block}"
            )

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The indices (from 0) of the layers that the draft model reads in a target with `count` layers.

        Raises:
            SettingsError: the target lacks one of the layers, or one of them is the last layer. Inference engines differ in whether
                they read the last layer's output before or after the final norm.
        """
        if count < 2:
            raise SettingsError("dflash: the target has 1 layer, and its last layer is not read: it needs 2 or more")
        layers = self.layers
        if layers is None:
            first, last = min(1, count - 2), count - 2
            layers = tuple(sorted({first, (first + last + 1) // 2, last}))
        if not layers or not all(0 <= layer % count < count - 1 and layer >= -count for layer in layers):
            raise SettingsError(
                f"dflash: layers must lie in 0 … {count - 2} (inference engines differ in what they take as the last layer's output), "
                f"not {', '.join(map(str, layers))}"
            )
        return tuple(layer % count for layer in layers)


def default_layers(count: int) -> tuple[int, int, int]:
    """The indices of a low, a middle and a high layer. From 12 layers on this is EAGLE-3's choice, else one nearer to the top."""
    return (1, count // 2 - 1, count - 4) if count >= 12 else (count // 6, count // 2, count - 1)


@dataclass(frozen=True, kw_only=True)
class DraftTraining(Recipe):
    """Settings of a draft model and of its training. Further attributes are in :class:`Recipe`.

    Attributes:
        origin: ``layers``: some of the target's own layers, with its embedding and output head (pruning). ``scratch``: a model of the
            target's class with random weights.
        count: number of layers of the draft model; None: a sixth of the target's.
        keep: indices of the target's layers that are kept, as an alternative to `count`; -1 is the last layer.
        hidden: hidden size of a model from scratch; None: about a quarter of the target's. Attention heads keep their size.
        rows: number of rows per step.
    """

    origin: Origin = "layers"
    count: int | None = None
    keep: tuple[int, ...] | None = None
    hidden: int | None = None
    rows: int = 8

    def __post_init__(self) -> None:
        if self.origin not in ("layers", "scratch"):
            raise SettingsError(f"the origin of a draft model must be 'layers' or 'scratch', not {self.origin!r}")
        if self.keep is not None and (self.count is not None or self.origin == "scratch"):
            raise SettingsError("keep names layers of the target: it needs origin 'layers', and excludes count")
        if self.hidden is not None and self.origin == "layers":
            raise SettingsError("hidden needs origin 'scratch', because the target's own layers keep their size")
        if self.count is not None and self.count < 1:
            raise SettingsError(f"a draft model has 1 or more layers, not {self.count}")

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The indices (from 0) of the layers that are kept of a target with `count` layers: `keep`, or evenly spaced layers.

        Raises:
            SettingsError: the target lacks one of the layers.
        """
        if self.keep is not None:
            if not self.keep or not all(-count <= layer < count for layer in self.keep):
                raise SettingsError(f"layers to keep must lie in 0 … {count - 1}, not {', '.join(map(str, self.keep))}")
            return tuple(layer % count for layer in self.keep)
        kept = self.count_of(count)
        if kept > count:
            raise SettingsError(f"the target has {amount(count, 'layer')}, {kept} cannot be kept")
        return tuple(round(i * (count - 1) / (kept - 1)) for i in range(kept)) if kept > 1 else (0,)

    def count_of(self, count: int) -> int:
        """The number of layers of a draft model for a target with `count` layers."""
        return self.count or max(1, round(count / 6))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Settings of the ``speculative`` calls that are measured for the card of a draft model.

    Attributes:
        length: number of tokens that are drafted in a step.
        prompts: number of prompts. They are beginnings of held-out text.
        new_tokens: greatest number of new tokens after each prompt.
        seed: seed of the sampled text.
    """

    length: int = 5
    prompts: int = 8
    new_tokens: int = 64
    seed: int = 0
