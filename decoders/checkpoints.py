"""Loading a checkpoint from disk or hub without a progress bar: it happens inside commands and calls whose output is theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    import torch
    from transformers import PreTrainedModel


def load_model(path: str | os.PathLike[str], dtype: torch.dtype | str) -> PreTrainedModel:
    """The causal language model at `path`, in evaluation mode; transformers' progress bars are left as they were.

    Raises:
        OSError, ValueError: as transformers: there is no such model, or it is not a causal language model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    finally:
        if bar:
            logging.enable_progress_bar()
