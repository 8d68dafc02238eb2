"""A context without a call, for unit tests of strategies: ``start`` and ``propose`` by themselves, on texts made by hand."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..strategy import Context


def context(
    rows: int = 1,
    *,
    model: PreTrainedModel | None = None,
    slots: int = 256,
    vocab_size: int | None = None,
    device: torch.device | str | None = None,
    **more: Any,
) -> Context:
    """A :class:`~decoders.Context` as ``Strategy.start`` takes it, without a call and, unless one is given, without a model.

    What exists in a call only (draft models, strategies by name, the target's own embedding and head) raises UnsupportedError where
    it is asked for, and nothing is compiled. Whether the tokens are right is what :func:`check_strategy` says; this is for what a
    strategy proposes.

    Args:
        rows: number of rows ``B``.
        model: what ``context.model`` is. Without one it is None, for strategies that never look at it.
        slots: capacity of each row in tokens, prompt included.
        vocab_size: ``V``; that of `model`, or 1000 without one.
        device: where the strategy's tensors are to live; that of `model`, or the CPU.
        more: other attributes of the context: ``clock=``, ``costs=``, ``memory=``, ``assistant_model=`` …

    Raises:
        TypeError: a context has no such attribute.
    """
    if vocab_size is None:
        vocab_size = 1000 if model is None else model.config.get_text_config().vocab_size
    if device is None:
        device = "cpu" if model is None else model.device
    fields: dict[str, Any] = dict(tokenizer=None, assistant_model=None, compile=lambda function: function)
    return Context(
        model=cast(PreTrainedModel, model),
        rows=rows, slots=slots, device=torch.device(device), vocab_size=vocab_size, **fields | more,
    )  # fmt: skip
