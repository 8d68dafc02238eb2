"""What strategies keep between calls, carried to another process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.testing import tiny_model

OPTIONS = dict(max_new_tokens=12, decoders_config={"compile": False}, return_dict_in_generate=True)
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("strategy", ["suffix", "token_recycling", "auto", "suffix+token_recycling"])
def test_a_second_process_begins_where_the_first_ended(strategy: str) -> None:
    first, second, cold = (decoders.enable(tiny_model("llama")) for _ in range(3))
    assert decoders.memories(first) == {}
    once = first.generate(IDS, strategy=strategy, **OPTIONS)
    kept = pickle.dumps(decoders.memories(first))
    again = first.generate(IDS, strategy=strategy, **OPTIONS)
    assert decoders.remember(second, pickle.loads(kept)) is second
    resumed = second.generate(IDS, strategy=strategy, **OPTIONS)
    assert torch.equal(once.sequences, again.sequences) and torch.equal(once.sequences, resumed.sequences)
    if strategy != "auto":  # which measures time
        assert resumed.report.steps == again.report.steps
        assert cold.generate(IDS, strategy=strategy, **OPTIONS).report.steps == once.report.steps >= again.report.steps


def test_what_was_read_is_a_copy_and_forget_drops_what_was_given() -> None:
    model = decoders.enable(tiny_model("llama"))
    model.generate(IDS, strategy="suffix", **OPTIONS)
    kept = decoders.memories(model)
    assert kept and all(isinstance(part, str) for key in kept for part in key)
    decoders.forget(model)
    assert decoders.memories(model) == {}
    waiting = decoders.enable(tiny_model("llama"))
    decoders.remember(waiting, kept)
    assert decoders.memories(waiting).keys() == kept.keys()
    assert decoders.memories(decoders.forget(waiting)) == {}


def test_a_model_that_is_not_enabled_has_none() -> None:
    model = tiny_model("llama")
    assert decoders.memories(model) == {}
    with pytest.raises(UnsupportedError, match="enable"):
        decoders.remember(model, {})


def test_reports_show_the_settings_of_every_part() -> None:
    model = decoders.enable(tiny_model("llama"))
    config = {"suffix": {"nodes": 5}}
    report = model.generate(IDS, strategy="suffix+prompt_lookup", strategy_config=config, **OPTIONS).report
    assert report.settings.keys() == {"suffix", "prompt_lookup", "merged"} and report.settings["suffix"]["nodes"] == 5


def options(strategy: str, **more: Any) -> dict[str, Any]:
    return {**OPTIONS, "strategy": strategy, **more}


@pytest.mark.parametrize(
    ("strategy", "engine"), [("suffix", True), ("suffix", False), ("suffix+prompt_lookup", True), ("auto", False)]
)
def test_texts_that_were_given_are_drafted_from_in_every_call(strategy: str, engine: bool) -> None:
    model = decoders.enable(tiny_model("llama"))
    plain = decoders.enable(tiny_model("llama")).generate(IDS, **options("autoregressive")).sequences
    if engine:
        model.generate(IDS, **options("autoregressive"))
    assert decoders.remember(model, texts=[[1, 2, 3], plain[0].tolist()]) is model
    config = {"compile": False, "memory": False}
    out = model.generate(IDS, **options(strategy, decoders_config=config))
    assert torch.equal(out.sequences, plain)
    if strategy == "suffix":
        assert out.report.steps < 8 and (out.report.details["given"], out.report.details["given_used"]) == (2, 1)
    again = decoders.remember(decoders.enable(tiny_model("llama")), decoders.memories(model))
    assert again.generate(IDS, **options("suffix")).report.details["given"] == 2, "another process gets them too"
    decoders.forget(model)
    assert model.generate(IDS, **options("suffix")).report.details["given"] == 0


def test_texts_that_were_given_outlive_other_settings_and_changed_modules_and_copies_have_them() -> None:
    model = decoders.enable(tiny_model("llama"))
    decoders.remember(model, texts=[[5, 6, 7]])

    def given(model: Any, **config: Any) -> int:
        out = model.generate(IDS, **options("suffix", decoders_config={"compile": False, **config}))
        return out.report.details["given"]

    assert given(model) == given(model, attention="sdpa") == given(pickle.loads(pickle.dumps(model))) == 1
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output)
    assert given(model) == given(copy.deepcopy(model)) == 1


def test_clients_that_are_kept_apart_share_what_was_given() -> None:
    model = decoders.enable(tiny_model("llama"))
    plain = model.generate(IDS, **options("autoregressive")).sequences[0].tolist()
    decoders.remember(model, texts=[plain])
    with decoders.Scheduler(
        model, strategy="suffix", rows=1, slots=64, decoders_config={"compile": False}
    ) as scheduler:
        calls = [scheduler.submit(plain[:5], max_new_tokens=12, cache_salt=salt) for salt in ("a", "b")]
        assert [call.result().tolist() for call in calls] == [[plain]] * 2
        assert [call.report.steps < 8 for call in calls] == [True, True]


def test_texts_are_bounded_and_what_was_cut_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoders.hf.wrapper.GIVEN_TOKENS", 10)
    model = decoders.enable(tiny_model("llama"))
    with pytest.warns(UserWarning, match="dropped 12 tokens of the least recently used texts"):
        decoders.remember(model, texts=[[3] * 5, [4] * 5, list(range(12))])
    decoders.remember(model, texts=[list(range(2, 12))])  # the same, as it is kept
    (kept,) = decoders.memories(model).values()
    assert (kept.texts, kept.tokens) == (1, 10)


def test_texts_that_are_none_are_told() -> None:
    model = decoders.enable(tiny_model("llama"))
    size = model.config.vocab_size
    for texts, said in [
        ("one text", r"texts=\[text\]"),
        (["a text"], "tokenizer=…"),
        ([5], r"texts\[0\] is neither a text nor a list of token ids"),
        ([[1], ["a"]], r"texts\[1\] is neither"),
        ([[1 << 40]], r"texts\[0\] is neither"),
        ([[1, 2], [3, size]], rf"texts\[1\] has token ids outside of the model's ids, 0 to {size - 1}"),
    ]:
        with pytest.raises(SettingsError, match=said):
            decoders.remember(model, texts=texts)
    assert decoders.memories(model) == {}
