"""Tiny random models that read images or sounds, and prompts for them. The prompts are made without a processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnknownNameError
from .seeing import BEGIN, BLIND, END, HEARING, IMAGE, SEEING, SeeingArchitecture

#: Number of text tokens after a row's last image or sound, by row. Longer batches start again with the first number.
QUESTIONS = (9, 6, 11, 7)


def tiny_seeing_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The tiny random model `name` of :data:`SEEING`, :data:`HEARING` or :data:`BLIND`.

    Raises:
        UnknownNameError: there is no model `name`.
    """
    return _architecture(name)(seed)


def image_prompts(name: str, images: Sequence[int] = (1,), seed: int = 0, question: int = 0) -> dict[str, Tensor]:
    """Arguments of ``generate`` for random prompts: text, images or sounds, then more text.

    Args:
        name: name of a tiny model, as in :func:`tiny_seeing_model`.
        images: number of images or sounds in each row.
        seed: seed of the images or sounds, and of the text before each of them.
        question: seed of the text after the last image or sound.
    """
    made, texts = _architecture(name), []
    for row, count in enumerate(images):
        text = _words(5 + row, seed * 100 + row)
        for image in range(count):
            text += [BEGIN, *[IMAGE] * made.tokens, END, *_words(2, seed * 100 + 50 + image)]
        texts.append(text + _words(QUESTIONS[row % len(QUESTIONS)], 7000 + question * 100 + row))
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if made.types:
        inputs[made.types] = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(seed)
    if made.by_row and any(images):
        every = torch.zeros(len(images), max(images), 3, 28, 28)
        for row, count in enumerate(images):
            every[row, :count] = made.pixels(count, generator)["pixel_values"]
        return inputs | {"pixel_values": every}
    return inputs | (made.pixels(sum(images), generator) if any(images) else {})


def _words(count: int, seed: int) -> list[int]:
    """`count` random text tokens. The second half repeats the first half."""
    half = torch.randint(5, 100, ((count + 1) // 2,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (half * 2)[:count]


def _architecture(name: str) -> SeeingArchitecture:
    every = {**SEEING, **HEARING, **BLIND}
    if name not in every:
        raise UnknownNameError("tiny model that sees or hears", name, every)
    return every[name]
