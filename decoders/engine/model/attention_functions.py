"""The attention functions of the loop, made known to transformers by their names."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from . import attention
from .kernels import attention as kernel


def register() -> None:
    """Makes the attention functions known to transformers; safe to call again."""
    for name, function in ((attention.NAME, attention.tree_attention), (kernel.NAME, kernel.kernel_attention)):
        AttentionInterface.register(name, function)
        # The loop passes ready 4-D masks, which transformers returns as they are; a name without a mask function would
        # make it drop them.
        AttentionMaskInterface.register(name, sdpa_mask)
