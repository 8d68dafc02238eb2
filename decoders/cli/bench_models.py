"""What ``decoders bench`` measures: models, shapes, and models padded to the size of larger ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bench import Method
    from ..bench.beside import Request

Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase | None", "PreTrainedModel | None"]


def load(model: str, draft: str | None, dtype: str, device: str | None, scale: str | None = None) -> Loaded:
    """Target, tokenizer and draft (the demo's own beside the demo model, else only if named) in `dtype` on `device`.

    Shapes are models too, without a tokenizer. With `scale` both are padded, see :mod:`decoders.bench.scaling`.
    """
    import torch

    from ..bench.shapes import SHAPES
    from . import models

    tokenizer: PreTrainedTokenizerBase | None = None
    stored, dtype = dtype, dtype if scale is None else "float32"
    if model in SHAPES:
        target = models.load_shape(model, dtype)
    else:
        target, tokenizer = models.load(model, dtype)
    if draft in SHAPES:
        assistant: PreTrainedModel | None = models.load_shape(draft, dtype)
    else:
        assistant = models.load_assistant(draft, model, dtype, needed=True)
    if scale is not None:
        target, assistant = in_scale(target, assistant, scale, stored)
    if device is not None:
        try:
            target = target.to(device)  # type: ignore[arg-type]  # transformers wraps `to` and loses its `self`
            if assistant is not None:
                assistant = assistant.to(device)  # type: ignore[arg-type]  # as above
        except (RuntimeError, AssertionError) as error:
            raise SettingsError(f"--device {device}: {str(error).splitlines()[0]}") from error
    torch.manual_seed(0)
    return target, tokenizer, assistant


def tokenizers_of(tokenizer: PreTrainedTokenizerBase | None, name: str | None) -> dict[str, PreTrainedTokenizerBase]:
    """The arguments of ``generate`` for a draft with the tokenizer called `name`; none without a name.

    Raises:
        ModelLoadError: no such tokenizer. SettingsError: the target has none.
    """
    from . import models

    if name is None:
        return {}
    if tokenizer is None:
        raise SettingsError("--assistant-tokenizer goes with a model that has a tokenizer, not with --shape")
    return {"tokenizer": tokenizer, "assistant_tokenizer": models.load_other_tokenizer(name)}


def in_scale(
    target: PreTrainedModel, draft: PreTrainedModel | None, scale: str, dtype: str
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Both, given in float32, padded to the size called `scale` and stored as `dtype`.

    Raises:
        UnknownNameError: no such size or dtype.
        ScalingError: one of them does not fit.
    """
    import torch

    from ..bench.scaled_shapes import draft_shape, shape_named
    from ..bench.scaling import scaled
    from ..errors import UnknownNameError
    from .models import DTYPES

    if dtype not in DTYPES[1:]:
        raise UnknownNameError("dtype", dtype, DTYPES[1:])
    shape, stored = shape_named(scale), getattr(torch, dtype)
    small = None if draft is None else scaled(draft, draft_shape(shape, target, draft), stored)
    return scaled(target, shape, stored), small


def other_engines(
    wanted: Sequence[Request], measured: PreTrainedModel, folder: Path, exact: Loaded, dtypes: Sequence[str],
    progress: Callable[[str], None],
) -> list[Method]:  # fmt: skip
    """Methods of other engines; `measured`, whose tokens are compared, lends its stop tokens and sizes, `exact` the weights."""
    from dataclasses import replace

    from ..bench.beside import beside_methods

    target, tokenizer, draft = exact
    methods = beside_methods(wanted, target, folder, draft, tokenizer, dtypes, progress)
    return [replace(method, model=measured) for method in methods]
