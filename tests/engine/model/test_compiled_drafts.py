"""Draft models in the compiled loop: the same tokens, and what has been compiled once serves every later call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.strategies import Speculative, Staged, Threshold
from decoders.strategy import Strategy
from decoders.testing import assert_same_tokens, decode, prompts, reference, tiny_draft, tiny_model

#: For each strategy a first call, and later ones that differ in what may vary without a new graph.
CASES: dict[str, tuple[Strategy, list[Strategy]]] = {
    "chain": (
        Speculative(length=3),
        [
            Speculative(length=5),
            Speculative(length=1),
            Threshold(threshold=0.3),
            Threshold(threshold=0.8, max_length=7),
        ],
    ),
    "dynamic tree": (
        Speculative(tree="dynamic", length=4, nodes=12),
        [Speculative(tree="dynamic", length=5, nodes=20), Speculative(tree="dynamic", length=6, nodes=9)],
    ),
    "staged": (
        Staged(stage="prompt_lookup"),
        [
            Staged(stage="prompt_lookup", passes=2, length=11),
            Staged(stage="prompt_lookup", stage_config={"length": 5}, nodes=20),
        ],
    ),
}

# One of them is traced in test_compiled.py, with the model whose graphs are there; to compile them takes as long as to compile all
# other tests' models. With a grammar's masks, a chain in a batch is compiled in test_compiled_grammar.py, where a second call compiles
# nothing; the functions that make dynamic trees are traced in tests/strategies/test_compiled_trees.py.
COMPILED = dict(decoders_config={"compile": True})


def two_models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return decoders.enable(tiny_model("llama")), tiny_draft("llama")


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return two_models()


# The compiler itself warns about deprecated parts of torch.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "rows"),
    [pytest.param(kind, rows, id=f"{kind}-{rows}") for kind in CASES for rows in (1, 4)],
)
def test_later_calls_compile_nothing(pair, kind, rows):
    assert_later_calls_compile_nothing(pair, kind, rows)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("kind", "rows"), [("staged", 4), ("dynamic tree", 4)], ids=str)
def test_later_calls_trace_nothing(kind, rows):
    assert_later_calls_compile_nothing(two_models(), kind, rows)


def assert_later_calls_compile_nothing(pair, kind, rows):
    (model, draft), (first, later) = pair, CASES[kind]

    def call(strategy: Strategy, length: int = 24, new: int = 20, **options: Any) -> Any:
        inputs = prompts(rows, length)
        out = decode(model, inputs, strategy, assistant_model=draft, max_new_tokens=new, **COMPILED, **options)
        expected = reference(model, inputs, max_new_tokens=new)
        assert_same_tokens(model, inputs, expected.sequences, out.sequences, f"{strategy!r}, compiled, batch {rows}")
        assert out.report.compiled and out.report.accepted > 0
        return out.report

    assert call(first).timings.compile > 0
    for length, new in ((24, 20), (40, 20), (9, 60)):
        report = call(first, length, new)
        assert (report.compilations, report.timings.compile) == (0, 0), f"prompt of {length}"
    for strategy in later:
        assert call(strategy, length=30).compilations == 0, repr(strategy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("verifier, strategy", [
    ("coupled", Speculative(length=3)), ("coupled", Speculative(tree="dynamic")), ("coupled", Staged(stage="prompt_lookup")),
    ("rejection", Speculative(length=3)), ("tree_rejection", Speculative(tree="static")),
])  # fmt: skip
def test_sampling_compiled_gives_the_tokens_of_the_eager_loop(pair, verifier, strategy):
    model, draft = pair
    options = dict(do_sample=True, seed=4, temperature=0.8, top_k=40, max_new_tokens=20, verifier=verifier)
    eager, first, second = (
        decode(model, prompts(3), strategy, assistant_model=draft, decoders_config={"compile": compile}, **options)
        for compile in (False, True, True)
    )
    assert torch.equal(first.sequences, eager.sequences) and torch.equal(second.sequences, eager.sequences)
    assert second.report.compilations == 0
