"""Compiled functions of strategies: whose errors are whose, and how many are kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoders.engine.decode.engine import KEPT_FUNCTIONS, Engine
from decoders.engine.model.compiled.functions import CompiledFunction
from decoders.report import Report
from decoders.testing import tiny_model


@pytest.mark.filterwarnings("error")
def test_a_functions_own_assertion_is_its_own() -> None:
    def refuses(x: Tensor) -> Tensor:
        assert x.shape[0] < 3, "three rows at most"
        return x

    with pytest.raises(AssertionError, match="three rows at most"):
        CompiledFunction(refuses)(torch.zeros(4))


def test_functions_made_in_every_call_are_not_kept_for_ever() -> None:
    engine, report = Engine(tiny_model("llama")), Report("none")

    def double(x: Tensor) -> Tensor:
        return x * 2

    kept = engine.function(double, True, report)
    for number in range(KEPT_FUNCTIONS + 20):
        engine.function(lambda x, number=number: x + number, "auto", report)
        assert engine.function(double, True, report) is kept, "what is used again stays"
    assert len(engine._functions) == KEPT_FUNCTIONS


def test_what_cannot_be_compiled_is_tried_once() -> None:
    unseen = torch.compiler.disable(lambda x: x)  # which no whole graph has
    function, tries = CompiledFunction(lambda x: unseen(x)[2:]), []
    compiled = function.compiled

    def counted(*args: Tensor) -> Tensor:
        tries.append(args)
        return compiled(*args)

    function.compiled = counted
    with pytest.warns(UserWarning, match="could not be compiled"):
        assert torch.equal(function(torch.arange(4.0)), torch.tensor([2.0, 3.0]))
    for length in (4, 4, 5, 6):
        assert torch.equal(function(torch.arange(float(length))), torch.arange(2.0, length))
    assert len(tries) == 1
