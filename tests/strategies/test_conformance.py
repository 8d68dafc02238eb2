"""The conformance kit over every built-in strategy, and over broken ones that it must catch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from decoders.heads.medusa import DEFAULT_TREE
from decoders.registry import registry
from decoders.settings import Settings
from decoders.strategies import (
    EarlyExit,
    Lookahead,
    Medusa,
    Ngram,
    PromptLookup,
    Speculative,
    Staged,
    Suffix,
    Threshold,
    TokenRecycling,
)
from decoders.strategies.merged import Merged
from decoders.strategy import Draft, Sequences, Step, Strategy
from decoders.testing import CHECKS, Replay, check_strategy, checks_for, parametrize_with_checks, tiny_model
from decoders.testing.conditions import Conditions
from decoders.testing.kit import check_alone
from decoders.tree import Topology

from .conftest import cases, random_heads

#: Strategies that draft as "speculative" does, and differ in where a draft ends and whose layers write it.
ALIKE = ("threshold", "early_exit")
#: Medusa, with heads, is among the variants; MTP, EAGLE-3 and DFlash are tested with networks in files of their own.
BUILT_IN = [
    e.cls
    for e in registry().strategies().values()
    if e.provider == "hf-decoders" and e.name not in ("medusa", "mtp", "eagle3", "dflash", *ALIKE)
]


#: With fewer passes of the draft model than by default.
SHORT: dict[str, Strategy] = {"speculative": Speculative(length=3), "staged": Staged(passes=2, length=8)}
VARIANTS = [
    PromptLookup(length=4, branches=3),
    PromptLookup(max_ngram=1, length=1),
    Lookahead(window=4, ngram=3, candidates=3),
    Ngram(widths=(3, 2, 1)),
    Speculative(tree="static", nodes=16),
    Speculative(tree="dynamic", nodes=8),
    Threshold(),
    Speculative(schedule="heuristic"),
    EarlyExit(),
    Threshold(tree="dynamic"),
    Staged(stage="prompt_lookup"),
    Staged(stage="prompt_lookup", children=1),
    Suffix(alpha=16, nodes=6, occurrences=2, remember=0),
    TokenRecycling(k=2, tree=((0,), (1,), (0, 0)), prompt_logits=True),
    Replay(),
    Merged([PromptLookup(length=3, branches=2), Replay(length=2)]),
    Medusa(heads=random_heads()),
    Medusa(heads=random_heads(), tree=DEFAULT_TREE, nodes=5),
    Merged([PromptLookup(length=3), Medusa(heads=random_heads(), nodes=30)]),
]


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy, check", cases(*(SHORT.get(cls.name) or cls() for cls in BUILT_IN)))
def test_strategy_conforms(strategy, check):
    check_alone(check, Conditions(), strategy)


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy, check", cases(*VARIANTS))
def test_variant_conforms(strategy, check):
    check_alone(check, Conditions(), strategy)


@pytest.mark.slow
@parametrize_with_checks([*(cls for cls in BUILT_IN if cls.name in SHORT)])
def test_strategy_conforms_with_as_many_passes_as_by_default(strategy, check):
    check(strategy)


@pytest.mark.slow
@parametrize_with_checks([*BUILT_IN, *VARIANTS], thorough=True)
def test_strategy_conforms_in_every_combination(strategy, check):
    check(strategy)


class Good(Strategy):
    """Repeats the last token: sound, seldom right. The broken strategies below are this one with one thing wrong."""

    name = "good"
    summary = "Repeats the last token."
    on_device = True

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return Draft.chain(sequences.last.expand(-1, 3))


def plant_a_draft_token(self, state, sequences):
    sequences.tokens.scatter_(1, sequences.length[:, None] - 1, 5)
    return Good.propose(self, state, sequences)


def see_a_sibling(self, state, sequences):
    """A node whose logits depend on more than its own path: accepted tokens would not be the target's."""
    tree = Topology.branches(2, 1).tensors(len(sequences.tokens), sequences.tokens.device)
    visible = tree.visible.clone()
    visible[:, 2, 1] = True
    return Draft(sequences.last.expand(-1, 2), dataclasses.replace(tree, visible=visible))


def turn_parents_round(self, state, sequences):
    tree = Topology.chain(2).tensors(len(sequences.tokens), sequences.tokens.device)
    return Draft(sequences.last.expand(-1, 2), dataclasses.replace(tree, parents=tree.parents.flip(1)))


def fail_to_be_copied(self):
    raise TypeError("cannot be copied")


def read_the_host(self, state, sequences):
    return Draft.chain(torch.full_like(sequences.last, sequences.last[0].item()))


class HonestHostReader(Good):
    on_device = False
    propose = read_the_host


class MutableSettings(Settings):
    model_config = ConfigDict(frozen=False)
    width: int = Field(3, description="How many.")


class SilentSettings(Settings):
    width: int = 3


class DictSettings(Settings):
    width: dict[str, int] = Field({}, description="How many.")


class LaxSettings(Settings):
    model_config = ConfigDict(extra="ignore")


def proposing(draft: Callable[[Tensor], Draft]) -> dict[str, Any]:
    """What takes the place of a hook: a draft made of the last tokens."""
    return {"propose": lambda self, state, sequences: draft(sequences.last)}


@pytest.mark.parametrize(
    ("wrong", "check", "reason"),
    [
        (proposing(lambda last: Draft(last[:, 0], Topology.chain(0))), "check_drafts", r"must be int64 \[1, N-1\]"),
        (
            proposing(lambda last: Draft(last.expand(-1, 3), Topology.chain(2))),
            "check_drafts",
            "must have 4 nodes",
        ),
        (proposing(lambda last: Draft.chain(last.float())), "check_drafts", "not torch.float32"),
        (proposing(lambda last: Draft.chain(last + 10**6)), "check_drafts", "must lie in -1"),
        ({"propose": plant_a_draft_token}, "check_drafts", "propose changed `tokens`"),
        ({"observe": lambda self, _, step: step.sequences.length.sub_(1)}, "check_drafts", "observe changed `length`"),
        ({"propose": see_a_sibling}, "check_drafts", "must see its ancestors, itself, nothing else"),
        ({"propose": turn_parents_round}, "check_drafts", "ancestors of node 2 are not the ancestors of its parent 0"),
        ({"propose": read_the_host}, "check_on_device", r"claims on_device = True, but item\(\) waits"),
        ({"settings_class": MutableSettings}, "check_settings", "must be frozen"),
        ({"settings_class": SilentSettings}, "check_settings", "width has no description"),
        ({"settings_class": DictSettings}, "check_settings", "unhashable type: 'dict'.* decoders.settings.Table"),
        ({"settings_class": LaxSettings}, "check_settings", "accepts unknown settings"),
        ({"name": "Bad-Name"}, "check_class", "snake_case"),
        ({"summary": ""}, "check_class", "summary"),
        ({"observe": lambda self, step: None}, "check_class", "is called with"),
        ({"auto_place": 5, "observe": lambda self, state, step: None}, "check_class", "declare `rests = True`"),
        (
            proposing(lambda last: dataclasses.replace(Draft.chain(last), grades=last - last - 1)),
            "check_drafts",
            "0 or more, not -1",
        ),
        (
            proposing(lambda last: Draft.listed([[3, 3]] * len(last), [[-1, 0, 1]] * len(last), depth=1)),
            "check_drafts",
            "Draft.depth is 1, and a path has 2 draft tokens",
        ),
        (
            proposing(lambda last: Draft.listed([[3, 3]] * len(last), [[-1, 2, 0]] * len(last))),
            "check_drafts",
            "parents must come before their children",
        ),
        ({"__reduce__": fail_to_be_copied}, "check_copies", "cannot be copied"),
    ],
)
def test_kit_catches(wrong, check, reason):
    broken = type("Broken", (Good,), wrong)
    with pytest.raises(AssertionError, match=rf"Broken\(.*\) fails {check}\w*: .*({reason})"):
        check_strategy(broken)


@pytest.mark.slow  # what they are tested with one by one passes in test_broken_strategies.py
def test_what_the_broken_ones_are_made_of_passes():
    check_strategy(Good)
    for name in ("check_drafts", "check_on_device"):
        check_alone(next(c for c in CHECKS if c.__name__ == name), Conditions(), HonestHostReader())


class Tampers(Good):
    """Claims to be exact and overrules the target, in a way that the loop does not see."""

    def observe(self, state, step: Step) -> None:
        rows = torch.arange(step.sequences.tokens.shape[0])
        step.sequences.tokens.data[rows, step.sequences.length - 1] = 5


class AdmitsIt(Tampers):
    exact = False


def test_tampering_shows_in_the_tokens_of_every_check_of_exactness():
    exactness = [c for c in CHECKS if c not in checks_for(AdmitsIt)]
    assert len(exactness) >= 5
    for check in exactness:
        with pytest.raises(AssertionError, match="new token"):
            check(Tampers())


def test_lossy_strategy_is_not_asked_for_equality():
    names = {c.__name__ for c in checks_for(AdmitsIt)}
    assert "check_greedy_equals_transformers" not in names
    assert {"check_drafts", "check_report", "check_one_new_token"} <= names


def test_models_of_ones_own_are_left_as_they_were():
    model, by_name = tiny_model("qwen3"), {c.__name__: c for c in CHECKS}
    for name in ("check_drafts", "check_rows_come_and_go"):
        by_name[name](Good(), Conditions(models=(model,)))
    assert "generate" not in vars(model)


def test_state_that_outlives_a_call_is_caught():
    by_name = {c.__name__: c for c in CHECKS}
    with pytest.raises(AssertionError, match="state leaks"):
        by_name["check_calls_share_no_state"](Leaks(), Conditions(models=("gpt2",)))


class Leaks(Good):
    """Draft tokens well in its first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def start(self, context):
        self.calls += 1

    def propose(self, state, sequences):
        return super().propose(state, sequences) if self.calls == 1 else Draft.nothing(*_shape(sequences))


def _shape(sequences: Sequences):
    return sequences.tokens.shape[0], sequences.tokens.device
