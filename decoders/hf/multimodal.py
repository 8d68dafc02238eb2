"""Images, videos and sounds in a call of ``generate``: the arguments that hold them, their positions in prompts, and their hashes.

The code is the same for all architectures: the signature of a model's forward pass lists its arguments, and the config lists the
placeholder tokens of images.
"""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from ..common.transformers_compat import position_ids_for
from ..engine.model.layout import placeholder_ids
from ..engine.model.own_forward import PER_TOKEN, WRONGLY_DIVIDED, MultimodalInputs
from ..errors import UnsupportedError

#: Arguments of a forward pass that are not inputs.
_OTHERS = frozenset({"labels", "logits_to_keep", "return_dict", "kwargs"})


def arguments_of(model: PreTrainedModel) -> frozenset[str]:
    """The names of the inputs that the model's forward pass takes; empty for a text-only model."""
    if placeholder_ids(model) is None:
        return frozenset()
    return frozenset(inspect.signature(type(model).forward).parameters) - _OTHERS


def may_change_itself(model: PreTrainedModel) -> bool:
    """Whether a multimodal model's class overrides ``generate``, which may then change the model depending on the prompt.

    Granite Speech, for example, switches adapters on for sounds and off for text.
    """
    kind: Any = type(model)
    return kind.generate is not GenerationMixin.generate and placeholder_ids(model) is not None


def inputs_of(
    model: PreTrainedModel, given: Mapping[str, Any], input_ids: Tensor, mask: Tensor | None, repeats: int,
    divides: bool = True,
) -> MultimodalInputs | None:  # fmt: skip
    """The images, videos and sounds of a call's prompts; None if all prompts are text.

    Args:
        model: a private copy of the model, because some architectures store positions in the module.
        given: the call's arguments that go to the model's forward pass, such as ``pixel_values``.
        input_ids: ``[B, P]`` on the model's device, padded on the left.
        mask: ``[B, P]``, None if nothing is padding.
        repeats: number of rows per prompt.
        divides: whether to assign each image to its prompt where possible, so that the model can read each prompt alone.

    Raises:
        UnsupportedError: a prompt ends with an image, a video or a sound.
    """
    batch, width = input_ids.shape
    kinds = {name: value.to(input_ids.device) for name, value in given.items() if name in PER_TOKEN}
    contents = {name: value for name, value in given.items() if name not in PER_TOKEN}
    lengths = [width] * batch if mask is None else mask.sum(1).tolist()
    special = torch.isin(input_ids, torch.tensor(placeholder_ids(model) or (), device=input_ids.device))
    for kind in kinds.values():
        special = special | (kind != kind[:, -1:])
    if mask is not None:
        special = special & mask.bool()
    rows = [row[width - length :].nonzero() for row, length in zip(special, lengths, strict=True)]
    ends = [int(places[-1]) + 1 if len(places) else 0 for places in rows]
    if not contents and not any(ends):
        return None
    if not any(ends):  # no placeholder marks the places of the images
        ends = [length - 1 for length in lengths]
    if any(end == length for end, length in zip(ends, lengths, strict=True)):
        raise UnsupportedError(
            "a prompt ends with an image, a video or a sound, and the loop continues from a text token: put the question, or the "
            "chat template's start of the answer, after it"
        )
    digest, hashes = _digest(contents), []
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        types = [kind[row, width - length :][:end] for kind in kinds.values()]
        # The placeholders of the earlier prompts decide which images belong to this prompt.
        taken = [input_ids[each][special[each]] for each in range(row)]
        hashes.append(_digest((digest, taken, types)) if end else "")
    arguments = _prepared(model, given, input_ids, mask)
    shifts = _shifts(arguments, lengths)
    prompt = [place for place in range(batch) for _ in range(repeats)]
    whole = MultimodalInputs(
        arguments, repeats, tuple(lengths[i] for i in prompt), tuple(hashes[i] for i in prompt), tuple(ends[i] for i in prompt),
        tuple(shifts[i] for i in prompt),
    )  # fmt: skip
    divided = _divided(contents, special) if divides and batch > 1 and special.any() else None
    if divided is None:
        return whole
    alone: list[MultimodalInputs | None] = []
    for row, length in enumerate(lengths):
        own = slice(row, row + 1), slice(width - length, None)
        of_row = {name: kind[own] for name, kind in kinds.items()} | divided[row]
        try:
            alone.append(inputs_of(model, of_row, input_ids[own], mask[own] if mask is not None else None, repeats))
        except WRONGLY_DIVIDED:  # the architecture divides images among rows in another way
            return whole
    return replace(whole, alone=tuple(alone))


def _divided(contents: Mapping[str, Any], special: Tensor) -> list[dict[str, Any]] | None:
    """Divides `contents` among the prompts: returns the arguments of each prompt, or None if the division is unclear. The model may
    still refuse the arguments of a prompt.

    Args:
        contents: arguments that hold images, videos or sounds.
        special: ``[B, P]`` bool, True at placeholder tokens.
    """
    begins = special & ~torch.nn.functional.pad(special, (1, 0))[:, :-1]
    images, places = begins.sum(1).tolist(), special.sum(1).tolist()
    rows: list[dict[str, Any]] = [{} for _ in places]
    by_row = [1] * len(rows)
    unclear = sum(images) == len(rows) and images != by_row
    for name, value in contents.items():
        several = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0
        size = len(value) if several or isinstance(value, (list, tuple)) else None
        if size is None:
            shares = None
        elif unclear and size == len(rows) and (not several or value.shape[1:2] == (max(images),)):
            return None  # an entry may be one image, or one row of images padded to the greatest number per row
        elif size == sum(images):
            shares = images
        elif size == len(rows):
            shares = by_row
        elif all(size * count % sum(places) == 0 for count in places):  # the entries are parts of images
            shares = [size * count // sum(places) for count in places]
        else:
            return None
        begin = 0
        for row, share in zip(rows, shares or images, strict=True):
            row[name] = value if shares is None else value[begin : begin + share]
            begin += share
    return [row if count else {} for row, count in zip(rows, places, strict=True)]


def _prepared(
    model: PreTrainedModel, given: Mapping[str, Any], input_ids: Tensor, mask: Tensor | None
) -> dict[str, Any]:
    """The arguments with which transformers' ``generate`` would call the model for the first forward pass."""
    padding = torch.ones_like(input_ids) if mask is None else mask.long()
    device = input_ids.device
    arguments = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    arguments |= {"attention_mask": padding, "use_cache": True}
    if (positions := position_ids_for(model, input_ids, arguments)) is not None:
        arguments["position_ids"] = positions
    if mask is None:
        arguments["attention_mask"] = None
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        arguments["logits_to_keep"] = 1
    prepare: Any = model.prepare_inputs_for_generation
    prepared: dict[str, Any] = prepare(input_ids, is_first_iteration=True, **arguments)
    return prepared


def _shifts(arguments: Mapping[str, Any], lengths: Sequence[int]) -> list[int]:
    """By how much each prompt's next position exceeds its number of tokens: an image may have more or fewer positions than tokens."""
    positions = arguments.get("position_ids")
    if positions is None:
        return [0] * len(lengths)
    # With M-RoPE, a token has several positions. They are equal for a text token, except that the first may be the token's index. So
    # the last position is read.
    last = positions[..., -1]
    last = (last[-1] if last.dim() == 2 else last).expand(len(lengths)).tolist()
    return [position + 1 - length for position, length in zip(last, lengths, strict=True)]


def _digest(value: Any) -> str:
    """A hash of the data in `value`. If `value` contains an object of an unknown type, every call returns a different hash."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype} {list(value.shape)} ".encode())
        digest.update(content.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        _feed(digest, torch.from_numpy(value))
    elif isinstance(value, Mapping):
        for name in sorted(value):
            digest.update(f"{name}: ".encode())
            _feed(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} ".encode())
        for entry in value:
            _feed(digest, entry)
    else:
        plain = isinstance(value, (bool, int, float, str, bytes, type(None)))
        digest.update((repr(value) if plain else f"{type(value)} {uuid.uuid4()}").encode())
