"""A tiny model with a tokenizer, and the texts that calls of their own write."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.testing import reference
from decoders.testing.models import ARCHITECTURES, Architecture

EAGER = {"compile": False}


#: Rows of the logits; the tokenizer has fewer tokens.
SIZE = 288
DESIGN = Architecture("llama", MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": SIZE}))


@pytest.fixture(scope="session")
def letters(byte_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """A token for each byte."""
    return byte_tokenizer(["<pad>", "</s>", "<unk>"], unk_token="<unk>", pad_token="<pad>")


@pytest.fixture(scope="session")
def llama(letters: PreTrainedTokenizerFast) -> PreTrainedModel:
    model = DESIGN(0)
    model.config.max_position_embeddings = 8192
    return decoders.enable(model, tokenizer=letters)


@pytest.fixture(scope="session")
def bf16() -> PreTrainedModel:
    return decoders.enable(DESIGN(0).bfloat16())


@pytest.fixture(scope="session")
def draft() -> PreTrainedModel:
    """The same weights, a little off."""
    model = DESIGN(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * parameter.std()
            )
    return model


def text_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 90, (length,), generator=generator).tolist()


def write_alone(model: PreTrainedModel, ids: list[int], **arguments: Any) -> list[int]:
    """What a call of its own writes."""
    arguments = {"strategy": "autoregressive", "pad_token_id": 0, "decoders_config": EAGER} | arguments
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    return reference(model, inputs, **arguments).sequences[0, len(ids) :].tolist()


def scheduler_of(model: PreTrainedModel, **options: Any) -> decoders.Scheduler:
    """Of three rows; nothing is compiled."""
    return decoders.Scheduler(model, **{"rows": 3, "pad_token_id": 0, "decoders_config": EAGER} | options)


@pytest.fixture
def prepared(llama: PreTrainedModel) -> Callable[..., Any]:
    """A call as a scheduler prepares it; settings: of the loop."""

    def call(ids: list[int], new: int, strategy: Any = "autoregressive", **settings: Any) -> Any:
        return vars(decoders.enable(llama))["generate"].prepared(
            input_ids=torch.tensor([ids]), strategy=strategy, max_new_tokens=new, pad_token_id=0,
            decoders_config={"compile": False, **settings},
        )  # fmt: skip

    return call


@pytest.fixture
def in_pieces(prepared: Any) -> Callable[[int, int], Any]:
    """A call with so many prompt tokens, read in pieces of 8, and new ones."""
    return lambda length, new: prepared(text_of(length, length), new, prefill_chunk=8, reuse=False)


@pytest.fixture(autouse=True)
def pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are cut as they are for users."""
    monkeypatch.delenv("DECODERS_PRUNE")
