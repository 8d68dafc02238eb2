"""Settings for the training of heads and draft models: the options of ``decoders train``. This file does not import torch.

Every field has its description and its range in a :class:`typer.Option`. Python code that makes a recipe is not bound to the range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import BadParameter, Option

from ..errors import SettingsError, amount

Origin = Literal["layers", "scratch"]


def indices(layers: str) -> tuple[int, ...]:
    """Parses ``"1,15,28"`` to numbers. Raises BadParameter for a text of another form."""
    try:
        return tuple(int(layer) for layer in layers.split(","))
    except ValueError as error:
        raise BadParameter(f"layers must be numbers with commas between, such as 1,15,28, not {layers!r}") from error


#: The bounds of a seed. Training multiplies seeds by a million, and torch takes 64 bits.
SEEDS: dict[str, Any] = {"min": -(2**40), "max": 2**40}

Tokens = Annotated[int, Option(min=1, help="Maximum number of training tokens.")]
Epochs = Annotated[int, Option(min=1, help="Maximum number of passes over the training text.")]
Rate = Annotated[float, Option(min=0, help="Peak learning rate.")]
Checks = Annotated[int, Option(min=1, help="Number of evaluations on held-out text per epoch.")]
RowsPerStep = Annotated[int, Option(min=1, help="Number of sequences per training step (batch size).")]
Decay = Annotated[
    float, Option(min=0, max=1, help="Loss weight of each drafted token, relative to the token before (the papers' λ).")
]
ReadLayers = Annotated[
    Sequence[int] | None,
    Option(
        parser=indices,
        metavar="TEXT",
        help="Target layers whose hidden states are read, such as 1,15,28; -1 is the last. Default: by the target's depth.",
    ),
]
Intermediate = Annotated[
    int | None, Option(min=1, help="MLP width of each layer (intermediate_size). Default: the target's.")
]
DraftVocab = Annotated[
    int | None,
    Option(min=1, help="Size of the draft vocabulary: the most frequent tokens of the data. Default: all tokens."),
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings that all kinds of training share."""

    tokens: Tokens = 2_000_000
    length: Annotated[
        int, Option(min=16, help="Length of a training sequence, in tokens, at most the model's context.")
    ] = 256
    own_share: Annotated[
        float,
        Option(
            min=0,
            max=1,
            help="Fraction of the training sequences that the target writes itself, after their first quarter.",
        ),
    ] = 0.5
    epochs: Epochs = 2
    rate: Rate = 1e-3
    bf16: Annotated[bool, Option(help="Compute in bfloat16 instead of float32; the trained weights are float32.")] = (
        True
    )
    checks: Checks = 4
    patience: Annotated[
        int, Option(min=1, help="Number of evaluations without improvement after which training stops.")
    ] = 4
    seed: Annotated[int, Option(**SEEDS, help="Random seed of the initial weights and of the data order.")] = 0

    def check_room(self, strategy: str, drafted: int, cause: str) -> None:
        """Raises SettingsError unless a row of text has room for drafts of `drafted` tokens. cause: the setting that asks for them."""
        if drafted < 1 or self.length < drafted + 2:
            raise SettingsError(
                f"{strategy}: for {cause}, length must be at least {drafted + 2} tokens, not {self.length}"
            )


@dataclass(frozen=True, kw_only=True)
class HeadsTraining(Recipe):
    """Settings of Medusa heads and of their training."""

    heads: Annotated[int, Option(min=1, max=8, help="Number of heads: tokens drafted beyond the next one.")] = 4
    layers: Annotated[int, Option(min=1, max=8, help="Number of residual blocks per head.")] = 1
    projection: Annotated[
        Literal["tied", "low_rank", "full"],
        Option(
            help="Output projection of a head. tied: the target's output head. low_rank: the same plus a trained low-rank "
            "difference. full: one of its own."
        ),
    ] = "tied"
    rank: Annotated[int, Option(min=0, help="Rank of the difference of --projection low_rank.")] = 0
    tokens: Tokens = 1_000_000
    epochs: Epochs = 4
    rows: RowsPerStep = 2
    decay: Decay = 0.8
    checks: Checks = 2

    def __post_init__(self) -> None:
        self.check_room("medusa", self.heads, amount(self.heads, "head"))


@dataclass(frozen=True, kw_only=True)
class HeadTraining(Recipe):
    """Settings of an EAGLE-3 head and of its training."""

    depth: Annotated[
        int,
        Option(min=1, max=16, help="Number of draft tokens that training simulates (the paper's training-time test)."),
    ] = 5
    layers: ReadLayers = None
    intermediate: Intermediate = None
    draft_vocab: DraftVocab = None
    rows: RowsPerStep = 8
    rate: Rate = 2e-3
    chains: Annotated[
        float,
        Option(
            min=0,
            max=1,
            help="Fraction of the positions at which more than one draft token is simulated, drawn anew in every step; with "
            "a third, training is twice as fast.",
        ),
    ] = 1.0
    decay: Decay = 0.8

    def __post_init__(self) -> None:
        self.check_room("eagle3", self.depth, f"depth={self.depth}")

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
    """Settings of a block draft model and of its training."""

    block: Annotated[int, Option(min=2, max=64, help="Number of tokens drafted in one forward pass.")] = 8
    depth: Annotated[int, Option(min=1, max=16, help="Number of decoder layers of the draft model.")] = 2
    layers: ReadLayers = None
    intermediate: Intermediate = None
    rank: Annotated[
        int,
        Option(
            min=0, help="Rank of the head, which scores each draft token by the tokens before it (DSpark). 0: no head."
        ),
    ] = 64
    head: Annotated[
        Literal["vanilla", "rnn"],
        Option(
            help="Kind of head. vanilla: scores by the previous token. rnn: by all previous tokens and the hidden state at "
            "the position."
        ),
    ] = "vanilla"
    draft_vocab: DraftVocab = None
    rows: RowsPerStep = 8
    rate: Rate = 6e-3
    blocks: Annotated[
        float,
        Option(
            min=0,
            max=1,
            help="Fraction of the positions at which a block begins; the positions are drawn anew in every step.",
        ),
    ] = 1 / 16
    decay: Decay = 0.8

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
            raise SettingsError("dflash: the target has 1 layer, but must have 2 or more, because the last is not read")
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
    """The indices of a low, a middle and a high layer. From 12 layers on, EAGLE-3's choice; else layers nearer to the top."""
    return (1, count // 2 - 1, count - 4) if count >= 12 else (count // 6, count // 2, count - 1)


@dataclass(frozen=True, kw_only=True)
class DraftTraining(Recipe):
    """Settings of a draft model and of its training."""

    origin: Annotated[
        Origin,
        Option(
            "--from",
            help="What to start from. layers: some of the target's own layers, with its embedding and output head. scratch: "
            "a smaller, untrained model of the same class.",
        ),
    ] = "layers"
    count: Annotated[
        int | None,
        Option("--layers", min=1, help="Number of layers of the draft model. Default: a sixth of the target's."),
    ] = None
    keep: Annotated[
        Sequence[int] | None,
        Option(
            parser=indices,
            metavar="TEXT",
            help="Target layers to keep, such as 0,1,29; -1 is the last. Default: evenly spread.",
        ),
    ] = None
    hidden: Annotated[
        int | None, Option(min=1, help="Hidden size, with --from scratch. Default: about a quarter of the target's.")
    ] = None
    rows: RowsPerStep = 8

    def __post_init__(self) -> None:
        if self.origin not in ("layers", "scratch"):
            raise SettingsError(f"the origin of a draft model must be 'layers' or 'scratch', not {self.origin!r}")
        if self.keep is not None and (self.count is not None or self.origin == "scratch"):
            raise SettingsError("keep= lists layers of the target: set origin='layers', and leave out count=")
        if self.hidden is not None and self.origin == "layers":
            raise SettingsError("hidden= needs origin='scratch', because layers of the target keep their size")
        if self.count is not None and self.count < 1:
            raise SettingsError(f"a draft model has 1 or more layers, not {self.count}")

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The indices (from 0) of the layers that are kept of a target with `count` layers: `keep`, or evenly spaced layers.

        Raises:
            SettingsError: the target lacks one of the layers.
        """
        if self.keep is not None:
            if not self.keep or not all(-count <= layer < count for layer in self.keep):
                raise SettingsError(f"keep must list layers from {-count} to {count - 1}, not {list(self.keep)}")
            return tuple(layer % count for layer in self.keep)
        kept = self.count_of(count)
        if kept > count:
            raise SettingsError(f"count must be at most {count}, the number of the target's layers, not {kept}")
        return tuple(round(i * (count - 1) / (kept - 1)) for i in range(kept)) if kept > 1 else (0,)

    def count_of(self, count: int) -> int:
        """The number of layers of a draft model for a target with `count` layers."""
        return self.count or max(1, round(count / 6))
