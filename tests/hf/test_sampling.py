"""Sampling: the distribution is transformers', the draw depends on the seed alone, whatever is proposed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from decoders.testing import Replay, decode, prompts, reference

EAGER = dict(decoders_config={"compile": False, "prefill_chunk": 8})
NEW = 14
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=0.6, top_k=0),
    "hot": dict(temperature=1.7, top_k=0),
    "top_k": dict(top_k=7),
    "top_k beyond the vocabulary": dict(top_k=1000),
    "top_p": dict(top_p=0.8, top_k=0),
    "min_p": dict(min_p=0.1, top_k=0),
    "typical_p": dict(typical_p=0.7, top_k=0),
    "epsilon_cutoff": dict(epsilon_cutoff=0.02, top_k=0),
    "eta_cutoff": dict(eta_cutoff=0.02, top_k=0),
    "top_h": dict(top_h=0.5, top_k=0),
    "all of them": dict(temperature=0.8, top_k=30, top_p=0.95, min_p=0.02, typical_p=0.95),
    "with a penalty": dict(temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.3, no_repeat_ngram_size=3),
    "with a minimum": dict(temperature=1.3, top_k=0, min_new_tokens=6, eos_token_id=list(range(3, 60))),
}


DRAW: dict[str, Any] = dict(do_sample=True, max_new_tokens=NEW, seed=5) | EAGER


def draw(model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Any = "prompt_lookup", **options: Any) -> Any:
    return decode(model, inputs, strategy, **(DRAW | options))


def transformers_processors(model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """The processors that transformers' loop would run for these options."""
    config = copy.deepcopy(model.generation_config)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    config.update(do_sample=True, **options)
    model._prepare_special_tokens(config, True, device="cpu")
    prompt = inputs["input_ids"].shape[1]
    config.min_length = prompt + (config.min_new_tokens or 0)
    masked = {"attention_mask": inputs["attention_mask"]}
    return model._get_logits_processor(config, prompt, inputs["input_ids"], None, [], device="cpu", model_kwargs=masked)


@pytest.mark.in_turns
@pytest.mark.parametrize("rows", [1, 3], ids=["alone", "ragged"])
@pytest.mark.parametrize("name", WARPERS)
def test_scores_are_transformers_processors_applied_to_plain_logits(
    llama: PreTrainedModel, name: str, rows: int
) -> None:
    inputs, options = prompts(rows), WARPERS[name]
    out = draw(llama, inputs, output_scores=True, output_logits=True, **options)
    processors = transformers_processors(llama, inputs, options)
    stops = set(options.get("eos_token_id", ()))
    for row in range(rows):
        kept = inputs["attention_mask"][row].bool()
        text = torch.cat([inputs["input_ids"][row][kept], out.sequences[row, 24:]])[None]
        with torch.no_grad():
            forced = llama(text).logits[0, int(kept.sum()) - 1 : -1]
        for t, token in enumerate(out.sequences[row, 24:].tolist()):
            torch.testing.assert_close(out.logits[t][row], forced[t], atol=2e-4, rtol=1e-4)
            processed = processors(out.sequences[:, : 24 + t], out.logits[t].clone())
            torch.testing.assert_close(out.scores[t][row], processed[row])
            assert out.scores[t][row, token].isfinite(), "the token drawn is one that the processors left"
            if token in stops:
                break


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", ["prompt_lookup", "replay"])
@pytest.mark.parametrize("name", WARPERS)
def test_every_strategy_draws_the_same_tokens(llama: PreTrainedModel, name: str, strategy: Any) -> None:
    inputs = prompts(3)
    expected = reference(llama, inputs, "autoregressive", **DRAW | WARPERS[name]).sequences
    rows = [r[m.bool()].tolist() for r, m in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    texts = tuple(tuple(p + new) for p, new in zip(rows, expected[:, 24:].tolist(), strict=True))
    # A chain and a tree that are often right; which strategy proposes them makes no difference.
    out = draw(llama, inputs, Replay(texts=texts, branches=3) if strategy == "replay" else strategy, **WARPERS[name])
    assert torch.equal(out.sequences, expected)
    assert strategy != "replay" or out.report.mean_accepted_length > 1.5, "proposals were accepted"


def test_a_prefix_reading_processor_keeps_the_draw_independent_of_the_strategy(llama: PreTrainedModel) -> None:
    class Favour(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + (input_ids.sum(-1, keepdim=True) % 5) * torch.linspace(0, 1, scores.shape[-1])

    a, b = (
        draw(llama, prompts(2), s, logits_processor=[Favour()], temperature=1.2)
        for s in ("autoregressive", "prompt_lookup")
    )
    assert torch.equal(a.sequences, b.sequences)


def test_a_processor_without_effect_does_not_change_the_draw(llama: PreTrainedModel) -> None:
    """Choosing inside the step and choosing on the host are the same choice."""

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    inside, host = draw(llama, prompts(3)), draw(llama, prompts(3), logits_processor=[Nothing()])
    assert torch.equal(inside.sequences, host.sequences)


def test_the_seed_decides(llama: PreTrainedModel) -> None:
    tokens = functools.partial(draw, llama, prompts(2))
    assert torch.equal(tokens(seed=1).sequences, tokens(seed=1).sequences)
    assert not torch.equal(tokens(seed=1).sequences, tokens(seed=2).sequences)
    assert torch.equal(tokens(seed=-3).sequences, tokens(seed=-3).sequences)
    assert torch.equal(tokens(seed=2**63 - 1).sequences, tokens(seed=2**63 - 1).sequences)


def test_a_seed_beyond_64_bits_is_refused_or_folded_clearly(llama: PreTrainedModel) -> None:
    try:
        draw(llama, prompts(), seed=2**64 + 1)
    except ValueError as error:
        assert "seed" in str(error)


def test_a_given_seed_leaves_the_global_generator_alone_and_none_draws_from_it(llama: PreTrainedModel) -> None:
    def state_moves(**options: Any) -> bool:
        before = torch.get_rng_state()
        draw(llama, prompts(), **options)
        return not torch.equal(before, torch.get_rng_state())

    assert not state_moves(seed=1)
    assert not state_moves(seed=None, generator=torch.Generator().manual_seed(1))
    assert not state_moves(seed=None, do_sample=False)
    assert state_moves(seed=None)


def test_torch_manual_seed_is_enough(llama: PreTrainedModel) -> None:
    def after(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [draw(llama, prompts(), seed=None).sequences for _ in range(2)]

    first, again, other = after(1), after(1), after(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1]), "the next call draws anew"
    assert not torch.equal(first[0], other[0])


def test_a_generator_is_advanced_and_reproducible(llama: PreTrainedModel) -> None:
    def from_generator(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [draw(llama, prompts(), seed=None, generator=generator).sequences for _ in range(2)]

    first, again = from_generator(1), from_generator(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_greedy_is_unaffected_by_the_seed(llama: PreTrainedModel) -> None:
    plain = decode(llama, prompts(), max_new_tokens=NEW).sequences
    for seed in (1, 2):
        assert torch.equal(draw(llama, prompts(), do_sample=False, seed=seed).sequences, plain)


def test_several_sequences_of_one_prompt_differ_and_keep_the_order_of_prompts(llama: PreTrainedModel) -> None:
    out = draw(llama, prompts(2), num_return_sequences=3, temperature=1.5, top_k=0).sequences
    assert out.shape == (6, 24 + NEW)
    assert torch.equal(out[:, :24], prompts(2)["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in out.tolist()}) == 6
    again = draw(llama, prompts(2), "autoregressive", num_return_sequences=3, temperature=1.5, top_k=0).sequences
    assert torch.equal(out, again)


def test_the_first_row_draws_the_same_alone_as_in_a_batch(llama: PreTrainedModel) -> None:
    batch = prompts(3)
    alone = draw(llama, {"input_ids": batch["input_ids"][:1]}).sequences
    assert torch.equal(draw(llama, batch).sequences[:1], alone)


def test_sampling_with_nothing_left_to_choose_is_greedy(llama: PreTrainedModel) -> None:
    greedy = decode(llama, prompts(), max_new_tokens=NEW).sequences
    assert torch.equal(draw(llama, prompts(), temperature=1e-4, top_k=0).sequences, greedy)
    assert torch.equal(draw(llama, prompts(), top_k=1).sequences, greedy)
    assert torch.equal(draw(llama, prompts(), top_p=1e-6, top_k=0).sequences, greedy)
    assert torch.equal(draw(llama, prompts(), min_p=1.0, top_k=0).sequences, greedy)
