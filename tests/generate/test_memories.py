"""What strategies keep between calls, carried to another process."""

from __future__ import annotations

import pickle

import pytest
import torch

import decoders
from decoders.errors import UnsupportedError
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
