"""Old names keep working for one version, with a warning that names the new one."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import decoders
from decoders import Context, Draft, Sequences, Step, Strategy, Topology
from decoders.constraints import base
from decoders.deprecated import MODULES
from decoders.drafting import Drafter
from decoders.report import GrammarUse
from decoders.strategies import Lookahead
from decoders.testing import prompts, tiny_draft, tiny_model
from decoders.verifiers import Block


@pytest.mark.parametrize("old", MODULES)
def test_old_modules_are_importable(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(MODULES[old])
    with pytest.warns(FutureWarning, match=MODULES[old]):
        module = importlib.import_module(old)
    names = {name for name in vars(new) if not name.startswith("__")}
    assert names and all(getattr(module, name) is getattr(new, name) for name in names)


def test_old_names_of_classes_and_attributes() -> None:
    with pytest.warns(FutureWarning, match="CompiledGrammar"):
        assert base.Grammar is base.CompiledGrammar
    use = GrammarUse("digits", "table", "full", "memory", 0.0, 0, ("of few words",))
    with pytest.warns(FutureWarning, match="GrammarUse.warnings"):
        assert use.remarks == use.warnings
    with pytest.warns(FutureWarning, match="Language.warnings"):
        assert base.Language("digits", warnings=("few",)).remarks == ("few",)
    tree = decoders.Topology.chain(1).tensors(1, torch.device("cpu"))
    even = torch.full((1, 2, 3), 1 / 3)
    block = Block(torch.tensor([[1, 2]]), tree, even, even[:, :1])
    with pytest.warns(FutureWarning, match="Block.drafted"):
        assert torch.equal(block.guesses, block.drafted)


def test_an_old_keyword_of_a_topology() -> None:
    with pytest.warns(FutureWarning, match="extra_visible"):
        shape = decoders.Topology((-1, -1), (0, 1), extra_sight=((), (0,)))  # type: ignore[call-arg]
    assert shape == decoders.Topology((-1, -1), (0, 1), ((), (0,)))
    with pytest.warns(FutureWarning, match="Topology.extra_visible"):
        assert shape.extra_sight == ((), (0,))


def test_old_settings_by_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(FutureWarning, match="'candidates'"):
        assert Lookahead(guesses=3).settings == Lookahead(candidates=3).settings
    monkeypatch.setenv("DECODERS_LOOKAHEAD_GUESSES", "4")
    with pytest.warns(FutureWarning, match="'guesses' of LookaheadSettings"):
        assert decoders.plugins.resolve_strategy("lookahead").settings.candidates == 4


def test_functions_that_read_settings_have_moved() -> None:
    from decoders import setting_sources, settings

    for name in ("load_settings", "unknown_variables"):
        with pytest.warns(FutureWarning, match=f"setting_sources.{name}"):
            assert getattr(settings, name) is getattr(setting_sources, name)


class Pairs(Strategy):
    """Drafts the best token, and the best after it, with `method` of the drafter."""

    name = "pairs"
    summary = "Drafts two tokens."
    needs_assistant = True

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def start(self, context: Context) -> Drafter:
        return context.draft(context.assistant_model, ahead=2)

    def propose(self, state: Drafter, sequences: Sequences) -> Draft:
        state.begin(sequences)
        first = state.root().tokens[:, 0, :1]
        chain = Topology.chain(1).tensors(len(first), first.device)
        return Draft.chain(torch.cat([first, getattr(state, self.method)(first, chain).tokens[:, 0, :1]], dim=1))

    def observe(self, state: Drafter, step: Step) -> None:
        state.observe(step, own_nodes=3)


def test_an_old_method_of_drafters() -> None:
    target, draft = decoders.enable(tiny_model("llama")), tiny_draft("llama")
    options = dict(
        max_new_tokens=8,
        do_sample=False,
        assistant_model=draft,
        decoders_config={"compile": False},
        return_dict_in_generate=True,
    )
    new = target.generate(**prompts(2), strategy=Pairs("expand"), **options)
    with pytest.warns(FutureWarning, match=r"Drafter\.grow goes in the next version: use Drafter\.expand"):
        old = target.generate(**prompts(2), strategy=Pairs("grow"), **options)
    assert torch.equal(old.sequences, new.sequences)
    assert old.report.accepted == new.report.accepted


def test_attributes_that_never_were_are_still_unknown() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Grammer'"):
        base.Grammer  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("decoders.grammer")
