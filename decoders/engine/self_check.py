"""A target checked against its model before anything is decoded with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..tree import Topology
from .cache import CacheBuffers, LayerSpec
from .layout import embeddings_of
from .quantization import quantize
from .twin import share_weights

if TYPE_CHECKING:
    from .target import Target


@torch.no_grad()
def check_tree_logits(target: Target, model: PreTrainedModel, layout: list[LayerSpec]) -> None:
    """Verifies a small tree and compares with plain forwards: catches whatever no flag of the config tells.

    Args:
        target: made of `model`.
        layout: of a cache in the model's own precision.

    Raises:
        UnsupportedError: the logits differ by more than rounding.
    """
    vocab = embeddings_of(model)
    prompt, branch = [3 % vocab, 5 % vocab, 7 % vocab], [11 % vocab, 13 % vocab]
    device = target.device
    tree = Topology.branches(2, 2)
    nodes = torch.tensor([[prompt[-1], 1, 2 % vocab, *branch]], device=device)
    buffers = CacheBuffers.allocate(layout, 1, 16)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    view = torch.arange(8, device=device)
    target.prefill(torch.tensor([prompt[:-1]], device=device), start, buffers, view, 0)
    ours = target.forward(nodes, start + 2, tree.tensors(1, device), buffers, view).logits[0, -1]
    reference = share_weights(model)  # as in evaluation, whatever mode the user's model is in
    quantize(reference, target.precision.weights, reference.get_output_embeddings())
    plain = reference(input_ids=torch.tensor([prompt + branch], device=device), use_cache=False).logits[0, -1].float()
    gap = (ours - plain).abs().max().item()
    scale = max(plain.abs().max().item(), 1.0)
    tolerance = 1e-4 if target.dtype == torch.float32 and not target.rounds else 0.1
    if not gap <= tolerance * scale:
        raise UnsupportedError(
            f"{type(model).__name__}: logits verified through a token tree differ from a plain forward by {gap:.2g} "
            f"(largest logit {scale:.2g}), so strategies would not be exact. Call generate without strategy=."
        )
