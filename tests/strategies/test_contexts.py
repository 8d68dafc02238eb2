"""Contexts without a call, for unit tests of strategies."""

from __future__ import annotations

import pytest
import torch

from decoders.errors import UnsupportedError
from decoders.strategies import BUILT_IN
from decoders.strategy import Context, Sequences
from decoders.testing import context, tiny_model


def text(rows: int) -> Sequences:
    length, zeros = torch.full((rows,), 5), torch.zeros(rows, dtype=torch.int64)
    return Sequences(
        torch.tensor([[1, 2, 3, 1, 2, 0, 0]]).expand(rows, -1).clone(), length, length, zeros.bool(), zeros
    )


def test_without_a_model_there_are_defaults() -> None:
    made = context()
    assert isinstance(made, Context) and made.model is None and made.tokenizer is None
    assert (made.rows, made.slots, made.vocab_size, made.device) == (1, 256, 1000, torch.device("cpu"))
    assert made.compile(text) is text and made.memory("key", list) == [] and made.costs() is None


def test_sizes_are_the_models_unless_said_otherwise() -> None:
    model = tiny_model("llama")
    made = context(2, model=model)
    assert made.model is model and (made.vocab_size, made.device) == (model.config.vocab_size, model.device)
    other = context(model=model, vocab_size=7, device="meta")
    assert (other.vocab_size, other.device) == (7, torch.device("meta"))


def test_every_attribute_may_be_given_and_no_other() -> None:
    made = context(clock=lambda: 3.0, level=1, compile=lambda function: None)
    assert made.clock() == 3.0 and made.level == 1 and made.compile(text) is None
    with pytest.raises(TypeError, match="colour"):
        context(colour="red")


def test_what_exists_in_a_call_only_says_so() -> None:
    made = context()
    for part in (made.draft, made.strategy, made.embed, made.head, made.module, made.first_layers):
        with pytest.raises(UnsupportedError, match="created outside a call"):
            part(None)


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix", "ngram", "lookahead", "autoregressive"])
def test_strategies_that_read_texts_alone_propose_in_it(name: str) -> None:
    (cls,) = (cls for cls in BUILT_IN if cls.name == name)
    draft = cls().propose(cls().start(context(2, sequences=text(2))), text(2))
    assert len(draft.tokens) == 2
