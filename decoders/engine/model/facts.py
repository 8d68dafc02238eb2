"""Facts about a target (our copy of a model), found at its creation: vocabulary, attention, matrix products, lengths, check results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import LayerKind
from .layout import CountedTokens, embeddings_of, number_of_logits, placeholder_ids
from .rope import RopeTables
from .weights.fused import Group
from .weights.quantization import Quantized


@dataclass(frozen=True)
class ModelTokens:
    """The tokens that a model accepts and predicts.

    Attributes:
        size: number of logits ``V``.
        embeddings: number of token ids that the model accepts as input.
        placeholders: ``[P]`` int64 on the model's device, the tokens that stand for images, videos and sounds; None for text only.
        placeholders_on_host: `placeholders` on the host.
    """

    size: int
    embeddings: int
    placeholders: Tensor | None
    placeholders_on_host: Tensor | None

    @staticmethod
    def of(model: PreTrainedModel) -> ModelTokens:
        ids = placeholder_ids(model)
        on_host = torch.tensor(ids, device="cpu") if ids is not None else None
        own = on_host.to(model.device) if on_host is not None else None
        return ModelTokens(number_of_logits(model), embeddings_of(model), own, on_host)


@dataclass(frozen=True)
class Attending:
    """How a target computes attention.

    Attributes:
        by: "triton" (our kernel for CUDA), "cpu" (our kernel for CPUs) or "sdpa" (PyTorch's attention).
        kinds: the distinct kinds of attention layers.
        kind_of_layer: per decoder layer, the index of its kind in `kinds`.
        group: number of query heads per key head, if it is the same in all layers; else 1.
        in_levels: whether the kernel reads the int8 values of a quantized cache. Otherwise the cache dequantizes them for attention.
        own: whether layers compute attention in code of the model, which does not pad its queries.
    """

    by: Literal["sdpa", "triton", "cpu"]
    kinds: tuple[LayerKind, ...]
    kind_of_layer: tuple[int, ...]
    group: int = 1
    in_levels: bool = False
    own: bool = False


@dataclass(frozen=True)
class Products:
    """How a target multiplies by the matrices of linear layers.

    Attributes:
        groups: groups of linear layers (their paths) with the same input. The matrices of a group are multiplied as one matrix if they
            are stored or quantized alike.
        quantized: the quantized matrices.
        few_rows: number of layers that multiply with our kernels for few rows. For these kernels, one row costs less than three.
    """

    groups: list[Group]
    quantized: Quantized
    few_rows: int


@dataclass(frozen=True)
class Lengths:
    """How results depend on the length of a text.

    Attributes:
        most: greatest number of positions of a text that the model supports.
        rope_tables: which rotary table the model uses for which length; None if it has a single table.
        counted: how the model's layers use the number of tokens in the cache; None if no layer uses the number.
    """

    most: int
    rope_tables: RopeTables | None
    counted: CountedTokens | None


@dataclass(frozen=True)
class Invariance:
    """Whether a node's logits have the same bits in every block (:mod:`.invariance`).

    Attributes:
        holds: whether decoding with chains as drafts gives the same bits as plain decoding.
        differs: names of the comparisons in which bits differed. If bits differ only on branches of trees, `holds` is still True.
        single: whether a block of one node in one row has the same bits as larger blocks; False if these sizes were not compared.
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
    """The results of checking a target (:func:`~decoders.engine.model.self_check.target_of`).

    Attributes:
        rejected: why a kernel of ours was tried and then not used; None if no kernel was rejected.
        longest: the length up to which the target's logits agree with the model's; None for any length.
        invariance: in low precision, whether a node's logits have the same bits in every block; None in float32, and if not checked.
        day: ISO date on which the target was compared with the model (:mod:`.kept_checks`).
        kernel_seconds: seconds spent compiling kernels before the check.
        seconds: seconds spent comparing the target with the model.
    """

    rejected: str | None = None
    longest: int | None = None
    invariance: Invariance | None = None
    day: str = ""
    kernel_seconds: float = 0.0
    seconds: float = 0.0
