"""Observers: told of every call and request, however it ends; what they raise hurts nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import decoders
from decoders.errors import PluginError
from decoders.registry import registry, reset_registry
from decoders.report import ObservedCall, Observer, Report
from decoders.testing import tiny_model

EAGER = {"compile": False}


class Noted(Observer):
    """Notes what it is told."""

    name = "noted"
    summary = "notes what it is told"

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def start(self, call: ObservedCall) -> None:
        self.told.append(("start", call, call.strategy, list(call.prompt_tokens), call.max_new_tokens, call.sampled))

    def step(self, call: ObservedCall, tokens: list[list[int]]) -> None:
        self.told.append(("step", call, tokens))

    def end(self, call: ObservedCall, report: Report, error: BaseException | None) -> None:
        self.told.append(("end", call, report, error))


class Rude(Observer):
    """Raises whatever it is told."""

    name = "rude"

    def step(self, call: ObservedCall, tokens: list[list[int]]) -> None:
        raise ValueError("no")


class Plugin:
    def __init__(self, *classes: type[Observer]) -> None:
        self.classes = classes

    @decoders.hookimpl
    def decoders_observers(self) -> tuple[type[Observer], ...]:
        return self.classes


@pytest.fixture
def noted() -> Iterator[Noted]:
    reset_registry()
    assert registry().listening() == ()
    info = registry().register(Plugin(Noted), "noted")
    assert info.observers == ("noted",) and list(registry().observers()) == ["noted"]
    yield registry().listening()[0]
    reset_registry()


def prompts() -> torch.Tensor:
    return torch.tensor([[5, 6, 7, 5, 6], [9, 8, 7, 9, 8]])


def test_a_call_is_observed_from_start_to_end(noted: Noted) -> None:
    model = decoders.enable(tiny_model("llama"))
    out = model.generate(
        prompts(), strategy="prompt_lookup", max_new_tokens=6, do_sample=True, seed=1, decoders_config=EAGER,
        return_dict_in_generate=True,
    )  # fmt: skip
    (start, *steps, end) = noted.told
    assert start[0] == "start" and start[2:] == ("prompt_lookup", [5, 5], 6, True) and start[1].model is model
    assert {step[0] for step in steps} == {"step"} and len(steps) == out.report.steps
    assert all(told[1] is start[1] for told in noted.told)
    for row in range(2):
        assert [token for step in steps for token in step[2][row]] == out.sequences[row, 5:].tolist()
    assert end[0] == "end" and end[2] is out.report and end[2].new_tokens == [6, 6] and end[3] is None


def test_the_end_of_a_failed_call_says_what_ended_it(noted: Noted) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("broken")

    model = decoders.enable(tiny_model("llama"))
    with pytest.raises(KeyError, match="broken"):
        model.generate(
            prompts(), strategy="autoregressive", max_new_tokens=4, logits_processor=[fail], decoders_config=EAGER
        )
    assert [told[0] for told in noted.told] == ["start", "end"] and isinstance(noted.told[-1][3], KeyError)


def test_requests_of_a_scheduler_are_calls_of_their_own(noted: Noted) -> None:
    model = decoders.enable(tiny_model("llama"))
    with decoders.Scheduler(model, strategy="prompt_lookup", rows=2, decoders_config=EAGER) as scheduler:
        generations = [
            scheduler.submit(row, max_new_tokens=count) for row, count in zip(prompts(), (3, 7), strict=True)
        ]
        written = [generation.result(60) for generation in generations]
    ends = [told for told in noted.told if told[0] == "end"]
    assert sorted(end[2].new_tokens[0] for end in ends) == [3, 7]
    for end in ends:
        tokens = [token for told in noted.told if told[0] == "step" and told[1] is end[1] for token in told[2][0]]
        assert tokens in [result[0, 5:].tolist() for result in written]


def test_what_an_observer_raises_is_a_warning() -> None:
    reset_registry()
    registry().register(Plugin(Rude), "rude")
    model = decoders.enable(tiny_model("llama"))
    options = dict(max_new_tokens=4, decoders_config=EAGER)
    with pytest.warns(RuntimeWarning, match="of observer 'rude' raised ValueError.*the call goes on"):
        observed = model.generate(prompts(), strategy="autoregressive", **options)
    reset_registry()
    assert torch.equal(observed, model.generate(prompts(), strategy="autoregressive", **options))


def test_one_that_cannot_be_made_is_refused() -> None:
    class Broken(Observer):
        name = "broken"

        def __init__(self) -> None:
            raise OSError("no file")

    reset_registry()
    with pytest.raises(PluginError, match="OSError: no file"):
        registry().register(Plugin(Broken), "broken")
    assert registry().listening() == ()
    reset_registry()
