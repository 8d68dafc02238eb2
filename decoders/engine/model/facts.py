"""Facts about a target, found when it is made: vocabulary, attention, products, lengths, and results of checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import LayerKind
from .layout import CountedTokens, embeddings_of, placeholder_ids, vocabulary_of
from .rope import Sides
from .weights.fused import Group
from .weights.quantization import Quantized


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a model reads and writes.

    Attributes:
        size: number of logits ``V``.
        embeddings: number of tokens that can be read.
        placeholders: ``[P]`` int64 on the model's device, the tokens that stand for parts of images and the like; None: it reads text
            only.
        placeholders_on_host: the same on the host.
    """

    size: int
    embeddings: int
    placeholders: Tensor | None
    placeholders_on_host: Tensor | None

    @staticmethod
    def of(model: PreTrainedModel) -> Vocabulary:
        ids = placeholder_ids(model)
        on_host = torch.tensor(ids, device="cpu") if ids is not None else None
        own = on_host.to(model.device) if on_host is not None else None
        return Vocabulary(vocabulary_of(model), embeddings_of(model), own, on_host)


@dataclass(frozen=True)
class Attending:
    """How layers attend.

    Attributes:
        by: "triton", the kernel for CUDA; "cpu", the kernel for CPUs; or "sdpa".
        kinds: how far each kind of layer looks back.
        kind_of_layer: the kind of each decoder layer, as an index.
        group: query heads per key head where that is one number, else 1.
        in_levels: whether a quantized cache is read as it is stored.
    """

    by: Literal["sdpa", "triton", "cpu"]
    kinds: tuple[LayerKind, ...]
    kind_of_layer: tuple[int, ...]
    group: int = 1
    in_levels: bool = False


@dataclass(frozen=True)
class Products:
    """How matrices are multiplied.

    Attributes:
        groups: paths of layers that read the same input; they are multiplied as one if they are stored or quantized alike.
        quantized: the quantized matrices.
        few_rows: number of layers that multiply by our kernels, for which one row costs less than three.
    """

    groups: list[Group]
    quantized: Quantized
    few_rows: int


@dataclass(frozen=True)
class Lengths:
    """How results depend on the length of a text.

    Attributes:
        most: positions that the model has.
        sides: the lengths at which its rotary tables change, None if they do not.
        counted: how its layers use the number of tokens in its cache, None if they do not.
    """

    most: int
    sides: Sides | None
    counted: CountedTokens | None


@dataclass(frozen=True)
class Invariance:
    """Whether a node has the same bits in every block (:mod:`.invariance`).

    Attributes:
        holds: whether drafts that are chains give the bits of plain decoding.
        differs: the comparisons in which bits differed; the comparison of branches does not count for `holds`.
        single: whether a block may have one node in one row; False if that was not compared.
    """

    holds: bool
    differs: tuple[str, ...] = ()
    single: bool = False

    def __str__(self) -> str:
        if not self.differs:
            return "a token has the same bits in every block"
        return f"bits depend on {', '.join(self.differs)}"


@dataclass(frozen=True)
class Checks:
    """What checking a target has shown (:func:`~decoders.engine.model.self_check.target_of`).

    Attributes:
        rejected: why a kernel of ours was tried and not used, else None.
        longest: the longest texts for which its logits are the model's; None: any.
        invariance: in low precision, whether a node has the same bits in every block.
        day: on which its design was compared with the model's, in ISO format (:mod:`.kept_checks`).
        kernel_seconds: time of compiling kernels before the check.
        seconds: time of the check against the model.
    """

    rejected: str | None = None
    longest: int | None = None
    invariance: Invariance | None = None
    day: str = ""
    kernel_seconds: float = 0.0
    seconds: float = 0.0
