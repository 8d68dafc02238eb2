"""Long waits are announced while they last."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import decoders
from decoders.common import announce
from decoders.common.announce import announced
from decoders.testing.models import tiny_model


def test_a_long_wait_is_announced_while_it_lasts_and_its_time_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announce, "LONG", 0.01)
    said = threading.Event()
    monkeypatch.setattr(announce._log, "warning", lambda line: (said.set(), announce._log.log(logging.WARNING, line)))
    with caplog.at_level("INFO", "decoders"), pytest.raises(ZeroDivisionError), announced("reading stars"):  # noqa: PT012
        assert said.wait(60)
        raise ZeroDivisionError
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "reading stars ..." and second.startswith("reading stars: ")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_short_wait_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    with caplog.at_level("INFO", "decoders"), announced("reading stars"):
        pass
    assert not caplog.records and threading.active_count() <= before + 1  # the timer's thread ends, but not at once


@pytest.mark.slow
def test_a_first_call_announces_copies_of_weights_the_check_and_compiling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announce, "LONG", 0.0)
    model = decoders.enable(tiny_model("llama"), weights="int8", compile=True)
    with caplog.at_level("INFO", "decoders"):
        model.generate(torch.tensor([[5, 6, 7]]), strategy="prompt_lookup", max_new_tokens=3)
    for work in (
        "copying matrices for weights='int8'",
        "comparing the loop with LlamaForCausalLM",
        "compiling the forward pass",
    ):
        assert work in caplog.text
