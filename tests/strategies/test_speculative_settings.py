"""Settings of speculative decoding that contradict each other are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from decoders.errors import SettingsError, UnsupportedError
from decoders.settings import Settings
from decoders.strategies import DFlash, Eagle3, EarlyExit, Mtp, Speculative
from decoders.testing import decode, prompts


def test_a_tree_has_no_schedule():
    with pytest.raises(SettingsError, match="schedule 'heuristic' is for chains, not for a dynamic tree"):
        Speculative(schedule="heuristic", tree="dynamic")


@pytest.mark.parametrize("tree", ["none", "dynamic"])
def test_a_template_belongs_to_a_static_tree(tree):
    with pytest.raises(SettingsError, match=f"a template needs tree='static', not tree='{tree}'"):
        Speculative(tree=tree, template=((0,), (1,)))


@pytest.mark.parametrize(
    "settings, values, said",
    [
        (Speculative.settings_class, dict(nodes=9, beam=3), "nodes=9, beam=3 have no effect with tree='none'"),
        (EarlyExit.settings_class, dict(children=2), "children=2 has no effect with tree='none'"),
        (Speculative.settings_class, dict(tree="static", beam=3), "beam=3 has no effect with tree='static'"),
        (
            Speculative.settings_class,
            dict(tree="static", template=[[0]], nodes=3),
            "nodes=3 has no effect with a template",
        ),
        (Eagle3.settings_class, dict(tree="none", nodes=9), "nodes=9 has no effect with tree='none'"),
        (DFlash.settings_class, dict(nodes=9), "nodes=9 has no effect with tree='none'"),
        (Mtp.settings_class, dict(tree="none", beam=2), "beam=2 has no effect with tree='none'"),
    ],
)
def test_settings_of_a_tree_without_a_tree_get_a_warning(
    settings: type[Settings], values: dict[str, Any], said: str
) -> None:
    with pytest.warns(UserWarning, match=said):
        settings(**values)


def test_a_template_cannot_take_more_continuations_than_there_are_tokens(target: PreTrainedModel, near):
    strategy = Speculative(tree="static", template=tuple((rank,) for rank in range(129)))
    with pytest.raises(SettingsError, match="needs the 129 best continuations of a node, but the vocabulary has 128"):
        decode(target, prompts(1), strategy, assistant_model=near, max_new_tokens=4, decoders_config={"compile": False})


def test_a_missing_draft_model_is_said_with_both_ways_to_give_one(target: PreTrainedModel):
    with pytest.raises(UnsupportedError, match="needs assistant_model=, or draft_model in its settings"):
        decode(target, prompts(1), "speculative", max_new_tokens=4)
