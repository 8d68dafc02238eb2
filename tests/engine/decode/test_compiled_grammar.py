"""Grammars in the compiled loop: the tokens of the eager one, and what has been compiled serves every grammar."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.strategies import Autoregressive, Speculative, Staged
from decoders.strategy import Strategy
from decoders.testing import decode, prompts, tiny_draft, tiny_model
from decoders.testing.models import VOCAB
from decoders.testing.toy_grammar import Matched, TokenAutomaton

STOPS = [5, 9]
SAMPLED = dict(do_sample=True, seed=1, temperature=0.3, top_k=0)


COMPILED = dict(decoders_config={"compile": True})


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft."""
    return decoders.enable(tiny_model("llama")), tiny_draft("llama")


def grammars(seed: int, rows: int, states: int) -> list[Any]:
    automata = [TokenAutomaton.random(seed + row, VOCAB, STOPS, states) for row in range(rows)]
    return [None if row == 2 else Matched(one) if row == 1 else one for row, one in enumerate(automata)]


def assert_as_eager(pair, strategy: Strategy, rows: int, draw: dict[str, Any]) -> None:
    """Two calls with other grammars, of another size; the second compiles nothing."""
    model, draft = pair
    options = dict(eos_token_id=STOPS, max_new_tokens=24, **draw)
    if strategy.needs_assistant:
        options["assistant_model"] = draft
    for call, (seed, states) in enumerate(((10, 12), (50, 19))):
        one = grammars(seed, rows, states)
        eager = decode(
            model, prompts(rows), "autoregressive", grammar=one, decoders_config={"compile": False},
            **{name: value for name, value in options.items() if name != "assistant_model"},
        )  # fmt: skip
        out = decode(model, prompts(rows), strategy, grammar=one, **COMPILED, **options)
        assert torch.equal(eager.sequences, out.sequences), f"{strategy!r}, batch {rows}, {draw or 'greedy'}"
        assert out.report.compiled and (not call or out.report.compilations == 0)


# The compiler itself warns about deprecated parts of torch. CI runs this one; graphs with masks are traced in test_compiled.py.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_sampled_draft_in_a_batch(pair):
    """Masks beside noise, where inductor's code must not be compiled as it would be: it crashed the process."""
    assert_as_eager(pair, Speculative(length=3), 4, SAMPLED)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("draw", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "strategy",
    [Autoregressive(), Speculative(length=3), Speculative(tree="dynamic"), Speculative(tree="static"), Staged()],
    ids=["plain", "chain", "dynamic tree", "static tree", "staged"],
)
def test_compiled_steps_with_a_grammar_write_what_eager_ones_write(pair, strategy, rows, draw):
    assert_as_eager(pair, strategy, rows, draw)
