"""Processors of transformers that read the text run inside the step: with every strategy, recorded, and with values by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, PreTrainedModel

import decoders
from decoders.engine.decode import rules
from decoders.errors import InputError
from decoders.strategies import Lookahead, PromptLookup, Speculative, Staged
from decoders.testing import Replay, decode, prompts, reference, tiny_draft, tiny_model
from decoders.testing.models import VOCAB

from ...tape_recorder import TapeRecorder
from ...turns import slow_but
from ..pretended_cuda import OnDevice, moved, pretended_cuda

#: What each option does to the texts of :func:`prompts` is in tests/hf/test_processors.py.
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": dict(repetition_penalty=1.7),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "several": dict(
        repetition_penalty=1.3, no_repeat_ngram_size=3, bad_words_ids=[[5], [7, 9]], sequence_bias=[[[8], 2.0]],
        suppress_tokens=[4, 6], begin_suppress_tokens=[11], forced_eos_token_id=3, min_new_tokens=4,
        encoder_repetition_penalty=1.2, eos_token_id=3,
    ),
}  # fmt: skip
DRAWN: dict[str, Any] = dict(do_sample=True, seed=5, temperature=0.8, top_k=20, top_p=0.9)
TREE = Replay(texts=((3, 4, 5, 9, 9, 4),) * 3, branches=3)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return decoders.enable(tiny_model("llama"))


@pytest.fixture
def never_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Any:
        raise AssertionError("the host was asked about a token")

    monkeypatch.setattr(rules, "choose_along_path", refused)


@pytest.mark.in_turns
@pytest.mark.usefixtures("never_on_host")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", ["autoregressive", PromptLookup(branches=3), TREE, Lookahead(window=4)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_step_writes_what_transformers_writes(llama: PreTrainedModel, name: str, strategy: Any, rows: int) -> None:
    options = dict(max_new_tokens=14, decoders_config={"compile": False}) | OPTIONS[name]
    expected = reference(llama, prompts(rows), max_new_tokens=14, **OPTIONS[name]).sequences
    assert torch.equal(decode(llama, prompts(rows), strategy, **options).sequences, expected)
    plain, drawn = (decode(llama, prompts(rows), own, **options, **DRAWN) for own in ("autoregressive", strategy))
    assert torch.equal(drawn.sequences, plain.sequences)


@pytest.mark.parametrize("strategy", [Speculative(length=4), Staged(stage="prompt_lookup", children=1)], ids=str)
@pytest.mark.parametrize("draw", [{}, DRAWN], ids=["greedy", "drawn"])
def test_a_draft_model_drafts_with_the_penalties(llama: PreTrainedModel, strategy: Any, draw: dict[str, Any]) -> None:
    """A draft model equal to the target is accepted whole."""
    options = dict(max_new_tokens=20, decoders_config={"compile": False}, **OPTIONS["several"], **draw)
    plain = decode(llama, prompts(3), "autoregressive", **options).sequences
    out = decode(llama, prompts(3), strategy, assistant_model=tiny_model("llama"), **options)
    assert torch.equal(out.sequences, plain)
    assert out.report.acceptance_rate > 0.9


@pytest.mark.usefixtures("never_on_host")
def test_a_verifier_judges_processed_scores(llama: PreTrainedModel) -> None:
    options = dict(max_new_tokens=14, decoders_config={"compile": False}, no_repeat_ngram_size=1)
    for verifier in ("rejection", "coupled"):
        out = decode(llama, prompts(), "prompt_lookup", verifier=verifier, **DRAWN, **options)
        assert len(set(out.sequences[0].tolist()[24:])) == 14


def test_another_processor_keeps_them_on_the_host(llama: PreTrainedModel) -> None:
    class Twice(NoRepeatNGramLogitsProcessor):
        pass

    asked = dict(max_new_tokens=10, repetition_penalty=1.7)
    expected = reference(llama, prompts(2), **asked, logits_processor=[Twice(2)]).sequences
    out = decode(llama, prompts(2), "prompt_lookup", **asked, logits_processor=[Twice(2)])
    assert torch.equal(out.sequences, expected)


@pytest.mark.usefixtures("never_on_host")
@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead"])
def test_whole_steps_are_recorded_once_for_all_values(device: TapeRecorder, strategy: str) -> None:
    target = decoders.enable(tiny_model("llama"))
    for penalty, draw in ((1.3, {}), (1.9, {}), (1.3, DRAWN), (1.7, DRAWN)):
        asked = dict(max_new_tokens=12, repetition_penalty=penalty, no_repeat_ngram_size=3, **draw)
        before = device.recorded
        out = decode(target, prompts(3), strategy, **asked)
        if not draw:
            assert torch.equal(out.sequences, reference(target, prompts(3), **asked).sequences)
        assert out.report.replayed_steps > 0
        if penalty in (1.9, 1.7):
            assert out.report.replayed_steps == out.report.steps and device.recorded == before


@pytest.mark.parametrize(
    "strategy",
    slow_but(["autoregressive"], ["autoregressive", PromptLookup(branches=3), "lookahead", "suffix", "speculative"]),
    ids=str,
)
def test_on_a_device_nothing_is_the_hosts(monkeypatch: pytest.MonkeyPatch, strategy: Any) -> None:
    recorder, config = TapeRecorder(), {"compile": False, "attention": "sdpa", "memory": False}
    monkeypatch.setattr(decoders.engine.decode.engine, "recorder_of", lambda device: recorder)
    for draw in ({"do_sample": False}, DRAWN):
        asked: dict[str, Any] = dict(
            max_new_tokens=12, pad_token_id=0, decoders_config=config, **OPTIONS["several"], **draw
        )
        plain = decoders.enable(tiny_model("llama"))
        expected = plain.generate(**prompts(2), strategy="autoregressive", **asked).tolist()
        with pretended_cuda():
            model = decoders.enable(moved(tiny_model("llama")))
            inputs: dict[str, Any] = {name: OnDevice(value) for name, value in prompts(2).items()}
            if strategy == "speculative":
                inputs["assistant_model"] = moved(tiny_draft("llama"))
            for _ in range(2):
                assert model.generate(**inputs, strategy=strategy, **asked).tolist() == expected
    assert recorder.replayed


VALUES: dict[str, Callable[[int], dict[str, Any]]] = {
    "repetition_penalty": lambda row: dict(repetition_penalty=1.2 + 0.3 * row),
    "no_repeat_ngram_size": lambda row: dict(no_repeat_ngram_size=1 + row),
    "bad_words_ids": lambda row: dict(bad_words_ids=[[row + 4, 9]] * (row + 1) + [[20 + row]]),
    "forced_eos_token_id": lambda row: dict(forced_eos_token_id=row + 3),
}  # fmt: skip


@pytest.mark.usefixtures("never_on_host")
@pytest.mark.parametrize("name", VALUES)
def test_rows_of_a_scheduler_have_values_of_their_own(llama: PreTrainedModel, name: str) -> None:
    texts = [prompts(4)["input_ids"][row, 5 * row :] for row in range(4)]
    asked = [dict(max_new_tokens=9 + row) | VALUES[name](row) for row in range(4)]
    asked = [own | (DRAWN if row % 2 else {"do_sample": False}) for row, own in enumerate(asked)]
    with decoders.Scheduler(llama, strategy="prompt_lookup", rows=4, decoders_config={"compile": False}) as scheduler:
        generations = [scheduler.submit(text, **own) for text, own in zip(texts, asked, strict=True)]
        got = [generation.result(60)[0].tolist() for generation in generations]
    for text, own, tokens in zip(texts, asked, got, strict=True):
        alone = decode(llama, {"input_ids": text[None]}, "autoregressive", decoders_config={"compile": False}, **own)
        assert tokens == alone.sequences[0].tolist()


@pytest.mark.parametrize("records", [False, True])
def test_where_nothing_is_left_to_draw_is_an_error(request: pytest.FixtureRequest, records: bool) -> None:
    device = request.getfixturevalue("device") if records else None
    model = decoders.enable(tiny_model("llama"))
    options = dict(max_new_tokens=40, bad_words_ids=[[t] for t in range(VOCAB - 12)], no_repeat_ngram_size=1)
    for _ in range(2):
        with pytest.raises(InputError, match=r"nothing can be drawn after \d+ tokens: .*no_repeat_ngram"):
            decode(model, prompts(2), "autoregressive", **options, do_sample=True, seed=1)
    assert device is None or device.replayed
    assert decode(model, prompts(2), "autoregressive", max_new_tokens=8).report.new_tokens == [8, 8]


@pytest.mark.parametrize("strategy", ["token_recycling", "suffix"])
def test_a_request_without_a_token_to_draw_ends_alone(llama: PreTrainedModel, strategy: str) -> None:
    text = prompts(1)["input_ids"][0]
    nothing = dict(max_new_tokens=40, bad_words_ids=[[t] for t in range(VOCAB - 12)], no_repeat_ngram_size=1)
    other = dict(max_new_tokens=40, bad_words_ids=[[t] for t in range(4)], no_repeat_ngram_size=3)
    settings = {"compile": False}
    with decoders.Scheduler(llama, strategy=strategy, rows=2, decoders_config=settings) as scheduler:
        ends, goes_on = (scheduler.submit(text, **own, do_sample=True, seed=1) for own in (nothing, other))
        with pytest.raises(InputError, match="nothing can be drawn"):
            ends.result(60)
        tokens = goes_on.result(60)[0].tolist()
    alone = decode(
        llama, {"input_ids": text[None]}, "autoregressive", decoders_config=settings, **other, do_sample=True, seed=1
    )
    assert tokens == alone.sequences[0].tolist()


@pytest.mark.slow
def test_compiled_steps_are_compiled_once_for_all_values(llama: PreTrainedModel) -> None:
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1))
    for penalty in (1.3, 1.9):
        asked = dict(max_new_tokens=12, repetition_penalty=penalty)
        expected = reference(model, prompts(2), **asked).sequences
        out = decode(model, prompts(2), "prompt_lookup", **asked, decoders_config={"compile": True})
        assert torch.equal(out.sequences, expected) and out.report.compiled
    assert out.report.compilations == 0
