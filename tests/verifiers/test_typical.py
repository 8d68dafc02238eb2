"""Typical acceptance on hand-made numbers, and its contract."""

from __future__ import annotations

import math

import pytest
import torch

import decoders
from decoders.errors import SettingsError
from decoders.testing import tiny_model
from decoders.testing.verifiers import check_verifier
from decoders.tree import Topology
from decoders.verifiers import Block, Outcomes, TypicalAcceptance

CPU = torch.device("cpu")
UNIFORM = [0.25] * 4
SURE = [0.97, 0.01, 0.01, 0.01]


def judge(parents: list[int], drafted: list[int], p: list[list[float]]) -> Outcomes:
    one_hot = torch.nn.functional.one_hot(torch.tensor(drafted).clamp(min=0), 4).float()[None]
    tree = Topology.from_parents(parents).tensors(1, CPU)
    return TypicalAcceptance().outcomes(Block(torch.tensor([[0, *drafted]]), tree, torch.tensor([p]), one_hot))


@pytest.mark.slow  # the quick run has it in test_distribution.py
def test_contract_holds():
    check_verifier(TypicalAcceptance)


def test_it_calls_itself_lossy():
    assert not TypicalAcceptance.exact and "LOSSY" in TypicalAcceptance.summary


def test_plausible_draft_token_is_always_kept_though_the_target_seldom_draws_it():
    assert judge([-1, 0], [2], [UNIFORM, UNIFORM]).end.tolist() == [[0, 1]]


def test_implausible_draft_token_is_never_kept():
    outcomes = judge([-1, 0], [2], [SURE, UNIFORM])
    assert outcomes.end.tolist() == [[1, 0]]
    assert outcomes.next[0, 0].tolist() == pytest.approx(SURE)  # drawn from p itself, not from what is left of it


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.15, 0.05], [0.6, 0.2, 0.1, 0.1], [0.85, 0.05, 0.05, 0.05]])
def test_threshold_is_the_papers(p):
    entropy = -sum(x * math.log(x) for x in p)
    threshold = min(0.09, 0.3 * math.exp(-entropy))
    for token, probability in enumerate(p):
        assert judge([-1, 0], [token], [p, UNIFORM]).end[0, 1].item() == float(probability > threshold)


def test_longest_plausible_path_wins_over_a_likelier_short_one():
    # 0 -> 1 (likely), 0 -> 2 (less so) -> 3
    outcomes = judge([-1, 0, 0, 2], [0, 1, 1], [[0.6, 0.4, 0, 0], UNIFORM, UNIFORM, UNIFORM])
    assert outcomes.end.tolist() == [[0, 0, 0, 1]]


def test_of_equally_long_paths_the_likelier_wins_and_of_equal_ones_the_first():
    assert judge([-1, 0, 0], [0, 1], [[0.3, 0.7, 0, 0], UNIFORM, UNIFORM]).end.tolist() == [[0, 0, 1]]
    assert judge([-1, 0, 0], [3, 1], [UNIFORM, UNIFORM, UNIFORM]).end.tolist() == [[0, 1, 0]]


def test_nothing_is_kept_behind_a_rejected_or_missing_draft_token():
    assert judge([-1, 0, 1], [2, 0], [SURE, UNIFORM, UNIFORM]).end.tolist() == [[1, 0, 0]]
    assert judge([-1, 0, 1], [-1, 0], [UNIFORM, UNIFORM, UNIFORM]).end.tolist() == [[1, 0, 0]]


def test_in_greedy_decoding_only_the_targets_own_token_is_kept():
    certain = [0.0, 1.0, 0.0, 0.0]
    assert judge([-1, 0, 0], [2, 1], [certain, certain, certain]).end.tolist() == [[0, 0, 1]]
    assert judge([-1, 0], [2], [certain, certain]).end.tolist() == [[1, 0]]


def test_settings_say_what_is_plausible():
    strict = TypicalAcceptance(epsilon=0.5, delta=5.0)
    one_hot = torch.nn.functional.one_hot(torch.tensor([2]), 4).float()[None]
    tree = Topology.from_parents([-1, 0]).tensors(1, CPU)
    block = Block(torch.tensor([[0, 2]]), tree, torch.tensor([[UNIFORM, UNIFORM]]), one_hot)
    assert TypicalAcceptance().outcomes(block).end.tolist() == [[0, 1]]
    assert strict.outcomes(block).end.tolist() == [[1, 0]]
    check_verifier(strict)


def test_settings_of_a_call_are_checked_and_reported():
    model = decoders.enable(tiny_model("llama"))
    options = dict(strategy="prompt_lookup", max_new_tokens=4, decoders_config={"compile": False})
    ids = torch.tensor([[5, 6, 5, 6]])
    out = model.generate(
        ids,
        verifier="typical",
        verifier_config={"epsilon": 0.2},
        do_sample=True,
        return_dict_in_generate=True,
        **options,
    )
    assert (out.report.verifier, out.report.verifier_settings) == ("typical", {"epsilon": 0.2, "delta": 0.3})
    with pytest.raises(SettingsError, match="'epsilom'. Did you mean 'epsilon'"):
        model.generate(ids, verifier="typical", verifier_config={"epsilom": 0.2}, **options)
    with pytest.raises(SettingsError, match="verifier 'rejection' has no settings"):
        model.generate(ids, verifier="rejection", verifier_config={"epsilon": 0.2}, **options)
    with pytest.raises(SettingsError, match="with a verifier object"):
        model.generate(ids, verifier=TypicalAcceptance(), verifier_config={"epsilon": 0.2}, **options)


def test_a_rule_with_a_constructor_of_its_own_has_no_settings_to_show():
    class Own(TypicalAcceptance):
        def __init__(self) -> None:
            self.calls = 0

        def outcomes(self, block: Block) -> Outcomes:
            return TypicalAcceptance().outcomes(block)

    assert repr(Own()) == "Own()" and Own().settings_in_force() == {}
    model = decoders.enable(tiny_model("llama"))
    out = model.generate(
        torch.tensor([[5, 6, 5, 6]]), strategy="prompt_lookup", verifier=Own(), max_new_tokens=4, do_sample=True,
        decoders_config={"compile": False}, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.report.verifier_settings == {}
