"""Calls know nothing of each other: what a strategy remembers beyond a call shows in the drafts of the next one."""

from __future__ import annotations

import itertools
from typing import Any

from transformers import PreTrainedModel

from ..strategy import Strategy
from . import memory
from .conditions import Conditions, run
from .exactness import assert_same_tokens, prompts
from .models import VOCAB
from .spy import SpyLog, spied

#: Seeds of texts that nothing in this process has decoded yet: a strategy that keeps them in its module knows none.
_seeds = itertools.count(10_000)


def check_calls_share_no_state(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """The same call drafts the same tokens in the same steps, whatever was decoded in between, and changes nothing in the
    strategy's classes and modules once it has been made before. Its text is one that no earlier check has used. Of a
    strategy that says it is `timed` the drafts may differ.
    """
    name = conditions.models[0]
    inputs, others = prompts(2, seed=next(_seeds)), prompts(3, length=31, vocab=VOCAB, seed=next(_seeds))
    options: dict[str, Any] = dict(decoders_config={"compile": conditions.compile, "reuse": False})
    spy = spied(strategy)

    def call(model: PreTrainedModel, text: Any) -> tuple[Any, list[SpyLog]]:
        out = run(model, name, spy, text, conditions, **options)
        return out, spy.seen

    with conditions.enabled(name) as model:
        first, drafted = call(model, inputs)
        call(model, others)
        before = memory.of_code(strategy)
        again, drafted_again = call(model, inputs)
        changed = memory.difference(before, memory.of_code(strategy))
        assert_same_tokens(model, inputs, first.sequences, again.sequences, "the second of two equal calls")
    for number, (old, new) in enumerate(zip(drafted, drafted_again, strict=False) if not strategy.timed else ()):
        assert _drafts(old) == _drafts(new), (
            f"the first of two equal calls drafts {_drafts(old)} in step {number + 1}, the second {_drafts(new)}: state leaks "
            f"from call to call{f' ({changed})' if changed else ''}"
        )
    same = again.report.steps == first.report.steps and again.report.accepted == first.report.accepted
    assert same or strategy.timed, (
        f"the first of two equal calls took {first.report.steps} steps, the second {again.report.steps}: state leaks"
    )
    assert changed is None, (
        f"a call that had been made before changed what outlives it: {changed}; state leaks from call to call: keep it in "
        "what start returns"
    )


def _drafts(seen: SpyLog) -> list[list[int]]:
    """The draft tokens of the rows that were still going."""
    return [tokens for tokens, ended in zip(seen.draft.tokens.tolist(), seen.finished, strict=True) if not ended]
