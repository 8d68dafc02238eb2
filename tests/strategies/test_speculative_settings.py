"""Settings of speculative decoding that contradict each other are refused before anything runs."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from decoders.errors import SettingsError, UnsupportedError
from decoders.strategies import Speculative
from decoders.testing import decode, prompts


def test_a_tree_has_no_schedule():
    with pytest.raises(SettingsError, match="schedule 'heuristic' is for chains, not for a dynamic tree"):
        Speculative(schedule="heuristic", tree="dynamic")


@pytest.mark.parametrize("tree", ["none", "dynamic"])
def test_a_template_belongs_to_a_static_tree(tree):
    with pytest.raises(SettingsError, match=f"a template is the shape of a static tree; tree is '{tree}'"):
        Speculative(tree=tree, template=((0,), (1,)))


def test_a_template_cannot_take_more_continuations_than_there_are_tokens(target: PreTrainedModel, near):
    strategy = Speculative(tree="static", template=tuple((rank,) for rank in range(129)))
    with pytest.raises(SettingsError, match="needs the 129 best continuations of a node, and the vocabulary has 128"):
        decode(target, prompts(1), strategy, assistant_model=near, max_new_tokens=4, decoders_config={"compile": False})


def test_a_missing_draft_model_is_said_with_both_ways_to_give_one(target: PreTrainedModel):
    with pytest.raises(UnsupportedError, match="needs assistant_model=, or draft_model in its settings"):
        decode(target, prompts(1), "speculative", max_new_tokens=4)
