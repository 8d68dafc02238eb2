"""Strategies of plugins that say of themselves that `auto` may choose among them."""

from __future__ import annotations

from typing import Any

import pytest

import decoders
from decoders import Draft, Sequences, Settings, Strategy
from decoders.errors import PluginError
from decoders.registry import registry, resolve_strategy
from decoders.testing import prompts, tiny_model


class RepeatSettings(Settings):
    length: int = 2


class Repeat(Strategy):
    """Drafts the last token again and again."""

    name = "repeat"
    settings_class = RepeatSettings
    auto_place = 15
    auto_settings = {"length": 6}

    def propose(self, state: None, sequences: Sequences) -> Draft:
        return Draft.chain(sequences.last.expand(-1, self.settings.length))


class Lossy(Repeat):
    name = "lossy"
    auto_place = 15
    exact = False


class Attentive(Repeat):
    name = "attentive"
    auto_place = 15

    def observe(self, state: None, step: Any) -> None:
        """Has to see every step."""


class Plugin:
    def __init__(self, *classes: type[Strategy]) -> None:
        self.classes = classes

    @decoders.hookimpl
    def decoders_strategies(self) -> tuple[type[Strategy], ...]:
        return self.classes


def names() -> list[str]:
    return [candidate.name for candidate in resolve_strategy("auto").candidates]


def test_built_in_candidates_say_so_themselves_the_cheapest_first() -> None:
    assert names() == ["grammar", "suffix", "ngram", "medusa", "speculative"]


def test_a_plugins_strategy_is_a_candidate_by_its_own_word_with_its_settings_for_auto() -> None:
    registry().register(Plugin(Repeat), "mine")
    assert names() == ["grammar", "repeat", "suffix", "ngram", "medusa", "speculative"]
    assert resolve_strategy("auto").candidates[1].settings.length == 6
    own = resolve_strategy("auto", {"candidates": ["repeat"], "config": {"repeat": {"length": 3}}})
    assert [(each.name, each.settings.length) for each in own.candidates] == [("repeat", 3)]


def test_a_strategy_that_derives_from_a_candidate_is_none_itself() -> None:
    class Derived(Repeat):
        name = "derived"

    registry().register(Plugin(Derived), "mine")
    assert "derived" not in names()


def test_settings_for_auto_are_settings_of_the_strategy() -> None:
    class Misspelt(Repeat):
        name = "misspelt"
        auto_settings = {"lenght": 6}

    with pytest.raises(PluginError, match=r"auto_settings: 'lenght'.*Did you mean 'length'\?"):
        registry().register(Plugin(Misspelt), "mine")


def test_auto_chooses_it_and_the_tokens_stay_the_same() -> None:
    model, options = decoders.enable(tiny_model("llama")), dict(max_new_tokens=20, do_sample=False)
    plain = model.generate(**prompts(2), strategy="autoregressive", **options)
    before = model.generate(**prompts(2), strategy="auto", return_dict_in_generate=True, **options)
    registry().register(Plugin(Repeat), "mine")  # what was learnt of other candidates is not taken for this one's
    out = model.generate(**prompts(2), strategy="auto", return_dict_in_generate=True, **options)
    assert "repeat" not in before.report.details["candidates"]
    assert out.report.details["candidates"]["repeat"]["runs"] > 0
    assert out.sequences.tolist() == plain.tolist() == before.sequences.tolist()


@pytest.mark.parametrize(("cls", "reason"), [(Lossy, "must be exact"), (Attentive, "declare `rests = True`")])
def test_what_auto_cannot_use_is_refused_where_it_is_registered(cls: type[Strategy], reason: str) -> None:
    with pytest.raises(PluginError, match=f"{cls.__name__}.auto_place.*{reason}"):
        registry().register(Plugin(cls), "mine")
    cls.auto_place = None
    assert registry().register(Plugin(cls), "mine").status == "loaded"
