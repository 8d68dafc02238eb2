"""Where the machine or its load makes us lose, it is said once; and speeds are not compared then."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import decoders
from decoders.engine.decode import losses
from decoders.engine.decode.step import TimedSteps
from decoders.engine.model.kernels import cpu
from decoders.engine.model.threads import Threads
from decoders.report import Report
from decoders.report.surroundings import waiting_share
from decoders.testing import decode, prompts, tiny_model


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_said", set())


def call(model: Any) -> Report:
    return decode(model, prompts(1), "autoregressive", max_new_tokens=8, decoders_config={"compile": False}).report


@pytest.mark.parametrize("computing, busy", [(0.3, True), (0.9, False)])
def test_steps_that_wait_are_said_once_and_in_the_report(computing: float, busy: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(TimedSteps, "_seconds", lambda self: (1.0, computing))
    model = decoders.enable(tiny_model("llama"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reports = [call(model), call(model)]
    messages = [str(each.message) for each in said if "steps waited" in str(each.message)]
    assert len(messages) == busy
    for report in reports:
        assert report.waiting == pytest.approx(1 - computing)
        assert report.busy == report.as_dict()["busy"] == busy
        assert ("steps waited 70% of their time" in str(report)) == busy


def test_every_step_is_judged_for_the_number_of_threads(monkeypatch: Any) -> None:
    judged: list[tuple[float, float]] = []
    monkeypatch.setattr(TimedSteps, "_seconds", lambda self: (1.0, 0.9))
    monkeypatch.setattr(Threads, "judge", lambda self, wall, computing: judged.append((wall, computing)))
    model = decoders.enable(tiny_model("llama"), compile=False)
    options = dict(strategy="autoregressive", max_new_tokens=8, min_new_tokens=8, return_dict_in_generate=True)
    report = model.generate(torch.arange(5, 21)[None], **options).report
    assert judged == [(1.0, 0.9)] * report.steps


def test_requests_that_share_steps_report_their_threads() -> None:
    model = decoders.enable(tiny_model("llama"))
    with decoders.Scheduler(model, strategy="autoregressive", decoders_config={"compile": False}) as scheduler:
        generation = scheduler.submit(prompts(1)["input_ids"], max_new_tokens=8)
        generation.result(30)
    assert generation.report.threads > 0 and call(model).threads > 0


def test_waiting_for_a_compiler_is_no_load() -> None:
    assert waiting_share(0.0, 0.001) == 0


def test_weights_of_16_bits_without_kernels_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for lacking in (True, False):
        if lacking:
            monkeypatch.setattr(cpu, "chosen", lambda: cpu.ChosenKernels(None, {"avx2": "no compiler"}))
        else:
            monkeypatch.undo()
        monkeypatch.setattr(losses, "_said", set())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                call(decoders.enable(tiny_model("llama").to(torch.bfloat16)))
                call(decoders.enable(tiny_model("llama")))
        messages = [str(each.message) for each in said if "there are no kernels for this CPU" in str(each.message)]
        assert len(messages) == (lacking or cpu.chosen().kernels is None)
        assert all("bfloat16" in message for message in messages)
