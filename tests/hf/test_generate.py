"""What comes back: sequences, scores and logits in transformers' form, and a report that adds up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.strategies import Autoregressive, PromptLookup
from decoders.testing import assert_same_tokens, decode, prompts, tiny_model

EAGER = dict(decoders_config={"compile": False})


@pytest.mark.parametrize("strategy", ["autoregressive", PromptLookup(branches=3)])
@pytest.mark.parametrize("rows", [1, 4], ids=["alone", "ragged"])
def test_scores_and_logits_are_transformers(llama: PreTrainedModel, rows: int, strategy: Any) -> None:
    kept = dict(output_scores=True, output_logits=True, max_new_tokens=20)
    plain, ours = decode(llama, prompts(rows), **kept), decode(llama, prompts(rows), strategy, **kept, **EAGER)
    assert_same_tokens(llama, prompts(rows), plain.sequences, ours.sequences, str(strategy))
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == 20
        for mine, right in zip(getattr(ours, name), getattr(plain, name), strict=True):
            assert mine.dtype == right.dtype
            torch.testing.assert_close(mine, right, atol=2e-4, rtol=1e-4)
    transitions = llama.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    torch.testing.assert_close(
        transitions,
        llama.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=True),
        atol=1e-3,
        rtol=1e-3,
    )


def test_scores_and_logits_are_given_only_when_asked_for(llama: PreTrainedModel) -> None:
    out = decode(llama, prompts(), "prompt_lookup", max_new_tokens=5, **EAGER)
    assert out.scores is None and out.logits is None and "scores" not in out
    out = decode(llama, prompts(), "prompt_lookup", max_new_tokens=5, output_scores=True, **EAGER)
    assert len(out.scores) == 5 and out.logits is None
    tensor = decode(llama, prompts(), "prompt_lookup", max_new_tokens=5, return_dict_in_generate=False, **EAGER)
    assert torch.equal(tensor, out.sequences)


def test_rows_that_ended_have_scores_of_the_right_shape(llama: PreTrainedModel) -> None:
    stop = int(decode(llama, prompts(2), max_new_tokens=3).sequences[0, -1])
    out = decode(llama, prompts(2), "prompt_lookup", max_new_tokens=12, eos_token_id=stop, output_scores=True, **EAGER)
    assert len(out.scores) == out.sequences.shape[1] - 24
    assert all(s.shape == (2, 128) for s in out.scores)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
@pytest.mark.parametrize("rows", [1, 3], ids=["alone", "ragged"])
def test_the_report_adds_up(llama: PreTrainedModel, rows: int, strategy: str) -> None:
    stop = int(decode(llama, prompts(rows), max_new_tokens=18).sequences[0, -1])
    out = decode(llama, prompts(rows), strategy, max_new_tokens=40, eos_token_id=stop, **EAGER)
    report = out.report
    texts = out.sequences[:, 24:].tolist()
    lengths = [text.index(stop) + 1 if stop in text else len(text) for text in texts]
    assert report.strategy == strategy and report.exact and report.verifier == "coupled" and not report.compiled
    assert report.rows == rows and report.prompt_tokens == prompts(rows)["attention_mask"].sum(1).tolist()
    assert report.new_tokens == lengths
    histogram = report.accepted_lengths
    assert sum((n + 1) * count for n, count in enumerate(histogram)) == sum(lengths)
    assert report.steps <= sum(histogram) <= report.steps * rows
    assert report.mean_accepted_length == pytest.approx(sum(lengths) / sum(histogram))
    assert 0 <= report.acceptance_rate <= 1 and report.accepted <= report.drafted
    assert report.compilations == 0 and report.timings.compile == 0
    assert report.tokens_per_second > 0 and report.time_to_first_token > 0 and report.peak_memory > 0
    if strategy == "autoregressive":
        assert histogram == [sum(lengths)] and report.drafted == 0 and report.mean_accepted_length == 1
        assert report.steps == max(lengths)
    else:
        assert report.steps <= max(lengths) and report.mean_accepted_length > 1
        assert report.settings["max_ngram"] == 3
    assert json.loads(json.dumps(report.as_dict()))["mean_accepted_length"] == report.mean_accepted_length


def test_a_lossy_strategy_is_marked(llama: PreTrainedModel) -> None:
    class Lossy(Autoregressive):
        name = "lossy"
        exact = False

    assert not decode(llama, prompts(), Lossy(), max_new_tokens=2, **EAGER).report.exact


@pytest.mark.parametrize("size", [1, 7, 24, 512])
def test_the_prefill_may_run_in_pieces_of_any_size(llama: PreTrainedModel, size: int) -> None:
    plain = decode(llama, prompts(3), max_new_tokens=12).sequences
    own = dict(decoders_config={"compile": False, "prefill_chunk": size})
    assert torch.equal(decode(llama, prompts(3), "prompt_lookup", max_new_tokens=12, **own).sequences, plain)


@pytest.mark.parametrize("length", [1, 2, 64, 130])
def test_prompts_of_any_length(llama: PreTrainedModel, length: int) -> None:
    inputs = prompts(2, max(length, 6)) if length > 2 else {"input_ids": torch.full((2, length), 7)}
    plain = decode(llama, inputs, max_new_tokens=12).sequences
    assert torch.equal(decode(llama, inputs, "prompt_lookup", max_new_tokens=12, **EAGER).sequences, plain)


def test_texts_longer_than_several_views(llama: PreTrainedModel) -> None:
    plain = decode(llama, prompts(3), max_new_tokens=280).sequences
    ours = decode(llama, prompts(3), "prompt_lookup", max_new_tokens=280, **EAGER)
    assert_same_tokens(llama, prompts(3), plain, ours.sequences, "304 tokens")
    assert ours.report.mean_accepted_length > 1.1


def test_a_mask_is_inferred_from_padding_as_in_transformers(llama: PreTrainedModel) -> None:
    ids = prompts(3)["input_ids"]
    plain = decode(llama, {"input_ids": ids}, max_new_tokens=12).sequences
    assert torch.equal(plain, decode(llama, prompts(3), max_new_tokens=12).sequences)
    assert torch.equal(decode(llama, {"input_ids": ids}, "prompt_lookup", max_new_tokens=12, **EAGER).sequences, plain)


def test_masks_of_other_types(llama: PreTrainedModel) -> None:
    plain = decode(llama, prompts(3), max_new_tokens=8).sequences
    for dtype in (torch.bool, torch.int32, torch.float32):
        inputs = prompts(3) | {"attention_mask": prompts(3)["attention_mask"].to(dtype)}
        assert torch.equal(decode(llama, inputs, "prompt_lookup", max_new_tokens=8, **EAGER).sequences, plain)


def test_without_a_prompt_the_text_starts_at_bos() -> None:
    model = decoders.enable(tiny_model("llama"))
    model.generation_config.bos_token_id = 3
    plain = model.generate(do_sample=False, max_new_tokens=8)
    assert torch.equal(model.generate(do_sample=False, max_new_tokens=8, strategy="prompt_lookup", **EAGER), plain)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_bfloat16_differs_from_plain_at_near_ties_only(seed: int) -> None:
    model = decoders.enable(tiny_model("llama", seed).to(torch.bfloat16))
    exact = tiny_model("llama", seed).to(torch.bfloat16).double()
    inputs = prompts(3, seed=seed)
    plain = decode(model, inputs, max_new_tokens=40).sequences
    ours = decode(model, inputs, "prompt_lookup", max_new_tokens=40, **EAGER).sequences
    for row in range(3):
        different = (plain[row] != ours[row]).nonzero().flatten()
        if not len(different):
            continue
        at = int(different[0])  # up to here both read the same text
        prefix = plain[row, :at][int(inputs["attention_mask"][row].argmax()) :][None]
        with torch.no_grad():
            logits = exact(prefix).logits[0, -1]
        gap = (logits[plain[row, at]] - logits[ours[row, at]]).abs()
        assert gap < 0.05 * logits.abs().max(), f"row {row}, token {at}: logits {gap:.3g} apart are no tie"


def test_a_padded_row_in_float64_is_what_it_is_alone() -> None:
    """Eager attention of transformers 5.23 casts float64's most negative number to float32, where it is -inf: a padded row of
    gemma2 is not a number there. Here rows are not padded, so the comparison is with the row by itself."""
    model = decoders.enable(tiny_model("gemma2").double())
    inputs = prompts(2)
    options = dict(max_new_tokens=12, do_sample=False)
    ours = model.generate(**inputs, strategy="prompt_lookup", decoders_config={"compile": False}, **options)
    for row, (ids, mask) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"], strict=True)):
        alone = model.generate(input_ids=ids[mask.bool()][None], **options)
        assert ours[row, -12:].tolist() == alone[0, -12:].tolist()
