"""A strategy as a part of a merged one: the block then holds nodes that are not its own, and some of those are accepted."""

from __future__ import annotations

from dataclasses import replace

from ..plugins import registry
from ..strategies.merged import Merged, MergedSettings
from ..strategy import Strategy
from ..tree import MAX_NODES
from .conditions import Conditions, run
from .exactness import assert_same_tokens, prompts, reference
from .memory import parts_of
from .spy import spied

#: Strategies that need nothing and often are right; the first one that the strategy has not in it is its partner.
PARTNERS = ("prompt_lookup", "ngram", "lookahead")


def check_merged(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """As a part of a merged strategy, before another part and behind it, its hooks keep the contract, and the tokens are the
    same.
    """
    parts = parts_of(strategy) or (strategy,)
    free = [name for name in PARTNERS if name not in {part.name for part in parts}]
    if not free:
        return
    partner = registry().strategy(free[0])()
    name, inputs = conditions.models[0], prompts(3)
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model:
        expected = reference(model, inputs, max_new_tokens=16)
        for order in ((partner, *parts), (*parts, partner)):
            merged = Merged(order, MergedSettings(nodes=MAX_NODES))
            out = run(model, name, spied(merged), inputs, eager, max_new_tokens=16)
            if strategy.exact:
                assert_same_tokens(model, inputs, expected.sequences, out.sequences, f"as {merged.name}")
