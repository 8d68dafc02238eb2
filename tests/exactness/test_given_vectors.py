"""Prompts that are vectors: the tokens are those of transformers' generate with the same `inputs_embeds`, under every kind of draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaModel, PreTrainedModel

import decoders
from decoders import Scheduler
from decoders.errors import DecodersError, InputError, SettingsError, UnsupportedError
from decoders.strategies import PromptLookup, TokenRecycling
from decoders.testing import (
    ARCHITECTURES,
    RECURRENT,
    Replay,
    assert_same_tokens,
    decode,
    prompts,
    tiny_draft,
    tiny_model,
)
from decoders.testing.models import VOCAB

from ..turns import slow_but
from .references import EAGER, NEW, SAMPLING, enabled, plain

QUICK = ("llama", "gemma3", "gpt2", "lfm2")
#: They look tokens up beside their embedding, keep masks of another size, or transformers gives them no vectors itself.
NOT_GIVEN = {"gemma4", "gpt_neo", "bamba", "falcon_h1", "nemotron_h", "zamba2", "zamba"}
NAMES = [name for name in (*ARCHITECTURES, *RECURRENT) if name not in NOT_GIVEN]


def vectors(model: PreTrainedModel, rows: int, noise: float = 0.3) -> dict[str, Tensor]:
    """Embeddings of :func:`prompts` that are off by some noise, and no token's."""
    inputs = prompts(rows)
    exact = model.get_input_embeddings()(inputs["input_ids"]).detach()
    generator = torch.Generator().manual_seed(1)
    off = noise * exact.std() * torch.randn(exact.shape, generator=generator)
    return {"inputs_embeds": exact + off.to(exact), "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("name", slow_but(QUICK, NAMES))
def test_the_tokens_are_those_of_transformers_with_the_same_vectors(name: str) -> None:
    model, options = enabled(name), dict(max_new_tokens=NEW)
    given, named = vectors(model, 3), {"input_ids": prompts(3)["input_ids"]}
    expected = decode(model, given, **options).sequences
    assert expected.shape == (3, NEW)
    whole = torch.cat([named["input_ids"], expected], 1)
    start = [int(row.nonzero()[0]) for row in given["attention_mask"]]
    texts = tuple(tuple(row[s:].tolist()) for row, s in zip(whole, start, strict=True))
    for strategy in ("lookahead", Replay(texts=texts, branches=3)):
        out = decode(model, given, strategy, decoders_config=EAGER, **options)
        assert torch.equal(out.sequences, expected)
        # Tokens that the caller names are no part of what is read: drafts find them, and the result begins with them.
        out = decode(model, given | named, strategy, decoders_config=EAGER, **options)
        assert torch.equal(out.sequences, whole)
    assert out.report.accepted > NEW and out.report.prompt_tokens == [24, 19, 14]


#: Strategies with which prompts are compared with their embeddings, in turns.
TURNS = ("prompt_lookup", "lookahead", "suffix", "ngram", "autoregressive")


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", TURNS)
@pytest.mark.parametrize("name", slow_but(QUICK, NAMES))
def test_a_prompt_is_decoded_as_its_embeddings_are(name: str, strategy: str) -> None:
    model = enabled(name)
    model.generate.forget()
    out = decode(model, vectors(model, 2, noise=0.0), strategy, max_new_tokens=NEW, decoders_config=EAGER)
    assert_same_tokens(model, prompts(2), plain(name, 2), torch.cat([prompts(2)["input_ids"], out.sequences], 1), name)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return decoders.enable(tiny_model("llama"))


@pytest.mark.parametrize("strategy", ["prompt_lookup", "suffix", "ngram", "token_recycling", "auto"])
def test_the_vectors_of_tokens_are_these_tokens(llama: PreTrainedModel, strategy: str) -> None:
    given = vectors(llama, 2, noise=0.0)
    out = decode(llama, given, strategy, max_new_tokens=NEW)
    assert torch.equal(out.sequences, plain("llama", 2)[:, 24:])


def test_samples_are_those_of_plain_decoding_and_a_prompt_may_be_one_vector(llama: PreTrainedModel) -> None:
    given = vectors(llama, 2)
    options = dict(max_new_tokens=NEW, num_return_sequences=2, decoders_config=EAGER) | SAMPLING
    expected = decode(llama, given, "autoregressive", **options).sequences
    assert expected.shape == (4, NEW) and not torch.equal(expected[0], expected[1])
    assert torch.equal(decode(llama, given, PromptLookup(length=5, branches=3), **options).sequences, expected)
    one = {name: value[:, -1:] for name, value in given.items()}
    expected = decode(llama, one, max_new_tokens=NEW).sequences
    assert torch.equal(decode(llama, one, "prompt_lookup", max_new_tokens=NEW).sequences, expected)


def test_the_tokens_that_a_result_begins_with_may_be_fewer_than_the_vectors(llama: PreTrainedModel) -> None:
    given = vectors(llama, 2) | {"input_ids": prompts(2)["input_ids"][:, -3:]}
    expected = decode(llama, given, max_new_tokens=NEW).sequences
    assert torch.equal(decode(llama, given, "prompt_lookup", max_new_tokens=NEW).sequences, expected)


class LooksUpBeside(LlamaModel):
    """Reads more of a token than its embedding, where it is given tokens."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **options: Any) -> Any:
        if input_ids is not None:
            embedding = self.get_input_embeddings()
            inputs_embeds = embedding(input_ids) + 0.5 * embedding((input_ids * 7) % VOCAB)
        return super().forward(inputs_embeds=inputs_embeds, **options)


def test_drafts_behind_the_last_vector_are_read_as_tokens() -> None:
    model: Any = tiny_model("llama")
    model.model.__class__ = LooksUpBeside
    given = vectors(decoders.enable(model), 1)
    expected = decode(model, given, max_new_tokens=NEW).sequences
    text = (*prompts(1)["input_ids"][0].tolist(), *expected[0].tolist())
    named = given | {"input_ids": prompts(1)["input_ids"]}
    out = decode(model, named, Replay(texts=(text,), branches=3), max_new_tokens=NEW, decoders_config=EAGER)
    assert torch.equal(out.sequences[:, 24:], expected) and out.report.accepted > NEW // 2


def test_a_recurrent_design_that_reads_more_of_a_token_than_its_embedding_is_refused() -> None:
    """Drafts behind the last vector are in one pass with it, where all are vectors."""
    model: Any = tiny_model("lfm2")
    embed = type(model.model).forward

    class LooksUpBesideToo(type(model.model)):
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **options: Any) -> Any:
            if input_ids is not None:
                inputs_embeds = self.get_input_embeddings()(input_ids) + 0.5 * self.get_input_embeddings()(
                    (input_ids * 7) % VOCAB
                )
            return embed(self, inputs_embeds=inputs_embeds, **options)

    model.model.__class__ = LooksUpBesideToo
    with pytest.raises(UnsupportedError, match="uses token ids besides embeddings"):
        decode(decoders.enable(model), vectors(model, 1), "prompt_lookup", max_new_tokens=4, decoders_config=EAGER)


def test_a_call_leaves_nothing_on_the_device(llama: PreTrainedModel) -> None:
    decode(llama, vectors(llama, 1), "prompt_lookup", max_new_tokens=2)
    engine = llama.generate.engine()
    assert engine.own_forward(llama, engine.target)._head._seen == []


def test_no_later_call_finds_any_of_it(llama: PreTrainedModel) -> None:
    inputs = prompts(2)
    decode(llama, vectors(llama, 2) | {"input_ids": inputs["input_ids"]}, "prompt_lookup", max_new_tokens=NEW)
    out = decode(llama, inputs, "prompt_lookup", max_new_tokens=NEW)
    assert_same_tokens(llama, inputs, plain("llama", 2), out.sequences, "behind a call with vectors")
    assert out.report.reused == [0, 0]


def test_in_low_precision_no_step_runs_the_last_vector_again() -> None:
    model = decoders.enable(tiny_model("llama").bfloat16())
    given, options = vectors(model, 2), dict(max_new_tokens=NEW, decoders_config=EAGER)
    expected = decode(model, given, "autoregressive", **options).sequences
    start = [0, 5]
    whole = torch.cat([prompts(2)["input_ids"], expected], 1)
    texts = tuple(tuple(row[s:].tolist()) for row, s in zip(whole, start, strict=True))
    out = decode(model, given, Replay(texts=texts, branches=3), **options)
    assert torch.equal(out.sequences, expected) and out.report.accepted > NEW


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"inputs_embeds": torch.zeros(4, 32)}, InputError, r"\[rows, positions, width\].*float32 \[4, 32\]"),
        ({"inputs_embeds": [[1.0]]}, InputError, "not a list"),
        (
            {"attention_mask": torch.ones(1, 3)},
            InputError,
            r"inputs_embeds \[1, 24, 32\]: a mask must be \[1, 24\]",
        ),
        ({"cache": "of three"}, SettingsError, "cache and inputs_embeds"),
        ({"strategy": TokenRecycling(prompt_logits=True)}, UnsupportedError, "inputs_embeds holds no token ids"),
        ({"strategy": "speculative", "assistant_model": "a draft"}, UnsupportedError, "prompt has no token ids: pass"),
    ],
    ids=["flat", "list", "mask", "cache", "reads prompts", "draft model"],
)
def test_what_cannot_be_read_is_refused(
    llama: PreTrainedModel, given: dict[str, Any], error: type[DecodersError], message: str
) -> None:
    call = dict(strategy="prompt_lookup", max_new_tokens=4) | vectors(llama, 1) | given
    if "cache" in given:
        call["cache"] = DynamicCache([(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))] * 2)
    if "assistant_model" in given:
        call["assistant_model"] = tiny_draft("llama")
    with pytest.raises(error, match=message):
        llama.generate(**call)


def test_designs_that_look_tokens_up_elsewhere_and_schedulers_take_none(llama: PreTrainedModel) -> None:
    model = enabled("gemma4")
    with pytest.raises(UnsupportedError, match="does not accept inputs_embeds instead of tokens"):
        decode(model, vectors(model, 1), "prompt_lookup", max_new_tokens=4)
    with (
        Scheduler(llama, strategy="prompt_lookup") as scheduler,
        pytest.raises(UnsupportedError, match="takes vectors"),
    ):
        scheduler.submit([5, 6, 7], inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=4)
