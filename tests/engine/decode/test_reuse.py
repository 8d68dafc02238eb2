"""Calls that take over keys and values of earlier ones write the tokens that they would write without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import decoders
from decoders.engine.decode import call as call_module
from decoders.engine.decode.session import Session
from decoders.testing import decode, prompts, reference, tiny_draft, tiny_model

from ...streamers import Calls

STRATEGIES = [
    "autoregressive",
    "prompt_lookup",
    "ngram",
    "lookahead",
    "suffix",
    "token_recycling",
    "ngram+prompt_lookup",
]
DRAFTED = ["speculative", "threshold", "staged"]
TEXT = [(7 * i * i + 3 * i) % 97 + 5 for i in range(60)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return decoders.enable(tiny_model(request.param))


#: Where a window makes no difference.
WITHOUT_WINDOW = pytest.mark.parametrize(
    "model", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


def inputs(*rows: list[int]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    return dict(
        input_ids=torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        attention_mask=torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    )


def call(model: PreTrainedModel, rows: list[list[int]], strategy: str = "prompt_lookup", **options: object):
    runtime = {"compile": False} | options.pop("runtime", {})
    options = dict(do_sample=False, max_new_tokens=10) | options
    return model.generate(
        **inputs(*rows), strategy=strategy, decoders_config=runtime, return_dict_in_generate=True, **options
    )


def new(out, rows: list[list[int]]) -> list[list[int]]:
    return out.sequences[:, max(map(len, rows)) :].tolist()


def pending(model: PreTrainedModel, rows: list[list[int]], strategy: str = "prompt_lookup", **options: object) -> list:
    """The tokens of a call that takes nothing over; it leaves nothing, either."""
    decoders.forget(model)
    out = call(model, rows, strategy, runtime={"reuse": False}, **options)
    assert not any(out.report.reused) or len(rows) > 1
    decoders.forget(model)
    return new(out, rows)


def plain(model: PreTrainedModel, rows: list[list[int]], tokens: int = 10) -> list[list[int]]:
    return new(reference(model, inputs(*rows), max_new_tokens=tokens), rows)


# --- chats ------------------------------------------------------------------------------------------------------------


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_second_turn_reads_only_what_is_new(model: PreTrainedModel, strategy: str) -> None:
    decoders.forget(model)
    first = call(model, [TEXT], strategy)
    history = first.sequences[0].tolist()
    turn = [[*history, 9, 8, 7]]
    second = call(model, turn, strategy)
    assert second.report.reused == [len(history) - 1], "all but the last token, which no step has read"
    assert new(second, turn) == plain(model, turn)
    assert call(model, turn, strategy).report.reused == [len(turn[0]) - 1]


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", DRAFTED)
@pytest.mark.parametrize("own", [False, True], ids=["draft", "self-draft"])
def test_draft_models_take_their_texts_over(
    model: PreTrainedModel, draft: PreTrainedModel, strategy: str, own: bool
) -> None:
    decoders.forget(model)
    options = dict(assistant_model=model if own else draft)
    first = call(model, [TEXT], strategy, **options)
    for turn in ([[*first.sequences[0].tolist(), 9, 8, 7]], [TEXT], [TEXT[:20]], [[*TEXT[:20], 4, 4]]):
        out = call(model, turn, strategy, **options)
        assert new(out, turn) == plain(model, turn)
        assert out.report.reused[0] >= min(20, len(turn[0])) - 1


def test_logits_are_those_of_a_call_without(model: PreTrainedModel) -> None:
    decoders.forget(model)
    call(model, [TEXT])
    turn = [[*TEXT, 5, 6]]
    ours = call(model, turn, output_logits=True)
    assert ours.report.reused[0] >= len(TEXT) - 1
    decoders.forget(model)
    alone = call(model, turn, output_logits=True, runtime={"reuse": False})
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(alone.logits), rtol=1e-4, atol=1e-4)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "ngram+prompt_lookup"])
def test_rows_that_cross_and_rows_of_other_batches(model: PreTrainedModel, strategy: str) -> None:
    decoders.forget(model)
    a, b, c = TEXT, TEXT[::-1], TEXT[20:]
    for rows in ([a, b], [[*b, 9], [*a, 9, 9]], [[*a, 1], [*a, 2, 2], [*a, 3, 3, 3]], [c, a, b], [b], [[*c, 3], [5]]):
        out = call(model, rows, strategy)
        assert new(out, rows) == plain(model, rows)
    assert call(model, [[*c, 3]], strategy).report.reused == [len(c)]


@pytest.mark.in_turns
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("reuse", [False, True])
def test_rows_of_very_different_lengths_in_small_chunks(model: PreTrainedModel, chunk: int, reuse: bool) -> None:
    decoders.forget(model)
    runtime = {"prefill_chunk": chunk, "reuse": reuse}
    for rows in ([TEXT, [5], TEXT[:2]], [[9], TEXT[:31]], [TEXT[:4], [*TEXT, 8, 8], [7, 7, 7]]):
        out = call(model, rows, runtime=runtime)
        assert new(out, rows) == plain(model, rows)


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", [*STRATEGIES, *DRAFTED])
def test_every_strategy_reads_the_end_of_ragged_prompts_in_its_first_step(
    model: PreTrainedModel, draft: PreTrainedModel, strategy: str
) -> None:
    decoders.forget(model)
    options = dict(assistant_model=draft) if strategy in DRAFTED else {}
    for chunk in (2, 7):
        rows = [TEXT[:50], TEXT[:1], [*TEXT[:9], 6]]
        out = call(model, rows, strategy, runtime={"prefill_chunk": chunk}, **options)
        assert new(out, rows) == plain(model, rows)


# --- what else a call may bring ---------------------------------------------------------------------------------------


def test_sampled_tokens_are_those_of_the_seed(model: PreTrainedModel) -> None:
    options = dict(do_sample=True, temperature=0.9, top_k=20, top_p=0.9, seed=7)
    turn = [[*TEXT, 9, 8], TEXT[:30]]
    expected = pending(model, turn, **options)
    call(model, [TEXT, TEXT[:30]], **options)
    out = call(model, turn, **options)
    assert min(out.report.reused) > 20
    assert new(out, turn) == expected


@pytest.mark.in_turns
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_other_verifiers_sample_the_same_tokens(model: PreTrainedModel, draft: PreTrainedModel, verifier: str) -> None:
    options = dict(do_sample=True, seed=3, verifier=verifier, assistant_model=draft)
    turn = [[*TEXT, 9, 8]]
    expected = pending(model, turn, "speculative", **options)
    call(model, [TEXT], "speculative", **options)
    out = call(model, turn, "speculative", **options)
    assert out.report.reused[0] > 50
    assert new(out, turn) == expected


@WITHOUT_WINDOW
def test_a_penalty_on_repetition_counts_tokens_that_were_not_read(model: PreTrainedModel) -> None:
    options = dict(repetition_penalty=1.4)
    turn = [[*TEXT, 9, 8]]
    expected = pending(model, turn, **options)
    call(model, [TEXT], **options)
    assert new(call(model, turn, **options), turn) == expected


def test_a_grammar_follows_rows_that_were_not_read() -> None:
    model, tokenizer = decoders.demo.load()
    decoders.enable(model, tokenizer=tokenizer)
    texts = [tokenizer(text)["input_ids"] for text in ("def add(a, b):\n    return a + b\n", "import os\nimport sys\n")]
    options = dict(grammar=decoders.regex("x = [0-9]{3,9}(, [a-f]{2})?"), max_new_tokens=8)
    turn = [[*texts[0], *texts[1]], [*texts[1], *texts[0][:3]]]
    for strategy in ("grammar", "prompt_lookup"):
        expected = pending(model, turn, strategy, **options)
        call(model, texts, strategy, **options)
        out = call(model, turn, strategy, **options)
        assert min(out.report.reused) > 0
        assert new(out, turn) == expected


# --- calls that fail, calls within calls ------------------------------------------------------------------------------


@WITHOUT_WINDOW
def test_a_call_that_fails_in_a_hook_leaves_nothing(model: PreTrainedModel) -> None:
    passes: list[int] = []

    def breaks(*_: object) -> None:
        passes.append(1)
        if breaking and len(passes) > 2:
            raise ZeroDivisionError

    layers = (getattr(model.model, "language_model", None) or model.model).layers
    handle, breaking = layers[1].register_forward_pre_hook(breaks), False
    call(model, [TEXT], "autoregressive")  # with the hook the model is made ready anew
    decoders.forget(model)
    passes, breaking = [], True
    with pytest.raises(ZeroDivisionError):
        call(model, [TEXT], "autoregressive")
    handle.remove()
    out = call(model, [TEXT])
    assert out.report.reused == [0] and new(out, [TEXT]) == plain(model, [TEXT])


def test_a_call_within_a_call_leaves_the_outer_one_alone(model: PreTrainedModel) -> None:
    decoders.forget(model)
    inner: list = []
    turn = [[*TEXT, 4]]
    call(model, [TEXT])
    out = call(model, turn, streamer=Calls(lambda: inner.append(call(model, turn))))
    assert new(out, turn) == new(inner[0], turn) == plain(model, turn)
    again = call(model, turn)
    assert again.report.reused == [len(TEXT)] and new(again, turn) == plain(model, turn)


# --- what makes kept texts useless ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.data.neg_(),
        lambda model: model.model.norm.weight.data.mul_(-1),
        lambda model: model.get_input_embeddings().weight.detach().numpy().__imul__(0.5),
        lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: output + 0.7),
        lambda model: setattr(model.model.layers[0].mlp, "scale", 2.0),
    ],
    ids=["head", "norm", "embeddings", "hook", "switch"],
)
def test_a_changed_model_reads_everything_again(fresh: PreTrainedModel, change: Callable) -> None:
    call(fresh, [TEXT])
    change(fresh)
    out = call(fresh, [TEXT])
    assert out.report.reused == [0]
    assert new(out, [TEXT]) == plain(fresh, [TEXT])


def test_memory_grows_with_the_text_and_not_with_what_it_may_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=10**7))
    taken: list[int] = []
    plain = Session.__init__

    def noted(self: Session, target: Any, batch: int, slots: int, recorder: Any = None) -> None:
        taken.append(slots)
        plain(self, target, batch, slots, recorder)

    monkeypatch.setattr(Session, "__init__", noted)
    monkeypatch.setattr(call_module, "SLOTS_AHEAD", 8)
    inputs, expected = prompts(2), None
    for strategy, most in (
        ("autoregressive", 160),
        ("speculative", 160),
        ("prompt_lookup", 10**6),
    ):
        decoders.forget(model)
        enabled = decoders.enable(model)
        options: dict[str, Any] = (
            {"assistant_model": tiny_draft("llama", num_hidden_layers=1)} if strategy == "speculative" else {}
        )
        criteria = [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 184)]
        out = decode(enabled, inputs, strategy, max_new_tokens=most, stopping_criteria=criteria, **options)
        expected = out.sequences if expected is None else expected
        assert torch.equal(out.sequences, expected)
    assert max(taken) < 1000


# --- any calls --------------------------------------------------------------------------------------------------------

ROW = st.lists(st.integers(5, 7), min_size=1, max_size=16)
CALL = st.tuples(
    st.lists(ROW, min_size=1, max_size=3),
    st.sampled_from(STRATEGIES),
    st.sampled_from([1, 2, 3, 7, 512]),
    st.integers(1, 8),
    st.booleans(),
)


@pytest.mark.parametrize("examples", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_any_calls_write_the_tokens_of_calls_without_reuse(model: PreTrainedModel, examples: int) -> None:
    quick = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    calls = st.lists(CALL, min_size=2, max_size=5)
    quick(given(calls)(lambda calls: assert_reuse_changes_nothing(model, calls)))()


def assert_reuse_changes_nothing(model: PreTrainedModel, calls: list) -> None:
    decoders.forget(model)
    for rows, strategy, chunk, tokens, sampled in calls:
        options: dict = dict(max_new_tokens=tokens)
        if sampled:
            options |= dict(do_sample=True, seed=1)
        ours = call(model, rows, strategy, runtime={"prefill_chunk": chunk}, **options)
        if sampled:
            expected = new(call(model, rows, "autoregressive", runtime={"reuse": False}, **options), rows)
        else:
            expected = plain(model, rows, tokens)
        assert new(ours, rows) == expected
