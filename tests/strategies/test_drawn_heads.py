"""Heads of the model under verifiers with a rejection rule: what comes out follows the target's distribution, not the heads'.

All tokens are possible, and the temperature is such that random heads are sometimes right. Chi-square on the tokens at both depths of a
draft.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

import decoders
from decoders.strategies import DFlash, Eagle3, Medusa, Mtp, PromptLookup
from decoders.strategies.merged import Merged
from decoders.strategy import Strategy
from decoders.testing import tiny_model
from decoders.testing.models import VOCAB

from ..turns import slow_but
from . import test_block_heads, test_dflash, test_eagle3
from .conftest import needs_mtp, random_heads

PROMPT = torch.tensor([[3, 5, 7, 3, 5]])
ROWS, TEMPERATURE = 2000, 1.6
SMALL_TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
CHAIN: dict[str, Any] = dict(tree="none", length=2)
TREE: dict[str, Any] = dict(tree="static", length=2, nodes=8, children=3)


def with_mtp_layers() -> PreTrainedModel:
    from . import test_mtp  # skips all of its own tests where transformers builds no layers

    return test_mtp.with_layers("llama")


Case = tuple[Callable[[], PreTrainedModel], Callable[[], Strategy]]


def cases() -> dict[str, Case]:
    def llama() -> PreTrainedModel:
        return decoders.enable(tiny_model("llama"))

    found: dict[str, Case] = {
        "medusa chain": (llama, lambda: Medusa(heads=random_heads(), tree=((0,), (0, 0)))),
        "medusa tree": (llama, lambda: Medusa(heads=random_heads(), tree=SMALL_TREE)),
        "merged tree": (llama, lambda: Merged([PromptLookup(length=2), Medusa(heads=random_heads(), tree=SMALL_TREE)])),
    }

    def add(name: str, model: Callable[[], PreTrainedModel], strategy: Callable[..., Strategy]) -> None:
        for shape, settings in (("chain", CHAIN), ("tree", TREE)):
            found[f"{name} {shape}"] = model, lambda own=settings: strategy(**own)

    def eagle3(written: Callable[[str], str], kind: str) -> None:
        add(f"eagle3 {kind}", test_eagle3.target, lambda **own: Eagle3(head=written(kind), **own))

    def dflash(name: str, written: Callable[[str], str], kind: str) -> None:
        add(name, test_dflash.target, lambda **own: DFlash(draft_model=written(kind), **own))

    add("mtp", with_mtp_layers, Mtp)
    for kind in ("authors", "speculators"):
        eagle3(test_eagle3.written, kind)
    for kind in test_eagle3.NEWER:
        eagle3(test_eagle3.newer, kind)
    for kind in test_dflash.LAYERS:
        dflash(f"dflash {kind}", test_dflash.written, kind)
    for kind in test_block_heads.VARIANTS:
        dflash(kind, test_block_heads.written, kind)
    return found


CASES = cases()
VERIFIERS = ("tree_rejection", "rejection", "block")
EVERY = [(verifier, name) for name in CASES for verifier in VERIFIERS[: 1 if name.endswith("tree") else 3]]
QUICK = [
    ("tree_rejection", "medusa tree"), ("tree_rejection", "merged tree"), ("tree_rejection", "eagle3 speculators tree"),
    ("rejection", "mtp chain"), ("tree_rejection", "dspark rnn, small vocabulary tree"), ("block", "dflash authors chain"),
]  # fmt: skip


@cache
def joint(model: PreTrainedModel) -> Tensor:
    """``[V, V]``: the target's distribution of two tokens after the prompt."""
    prefixes = torch.cat([PROMPT.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
    with torch.no_grad():
        first, second = ((model(ids).logits[:, -1].double() / TEMPERATURE).softmax(-1) for ids in (PROMPT, prefixes))
    return first.T * second


def assert_follows(events: Tensor, expected: Tensor, what: str) -> None:
    """Chi-square of `events` (indices) against `expected` (probabilities); rare events are put together."""
    counts, wanted = torch.bincount(events, minlength=expected.numel()).double(), expected.flatten() * len(events)
    often = wanted >= 8
    counts, wanted = (torch.cat([x[often], x[~often].sum()[None]]) for x in (counts, wanted))
    if wanted[-1] < 1:
        counts, wanted = counts[:-1], wanted[:-1]
    pvalue = stats.chisquare(counts.numpy(), (wanted * counts.sum() / wanted.sum()).numpy()).pvalue
    assert pvalue > 1e-4, f"{what}: p = {pvalue:.2g}"


@pytest.mark.parametrize("verifier, name", slow_but(QUICK, EVERY))
def test_tokens_follow_the_target(verifier: str, name: str) -> None:
    if name.startswith("mtp") and needs_mtp.args[0]:
        pytest.skip(needs_mtp.kwargs["reason"])
    make_model, make_strategy = CASES[name]
    model = make_model()
    out = model.generate(
        input_ids=PROMPT, strategy=make_strategy(), verifier=verifier, do_sample=True, temperature=TEMPERATURE, top_k=0,
        max_new_tokens=3, num_return_sequences=ROWS, seed=1, decoders_config={"compile": False},
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.report.exact and out.report.accepted > ROWS / 100
    first, second = out.sequences[:, PROMPT.shape[1] :][:, :2].T
    expected = joint(model)
    assert_follows(first, expected.sum(1), "first token")
    assert_follows(second, expected.sum(0), "second token")
    # Pairs of single tokens would be too rare: eight neighbours are one event.
    pairs = expected.view(VOCAB // 8, 8, VOCAB // 8, 8).sum((1, 3))
    assert_follows(first // 8 * (VOCAB // 8) + second // 8, pairs, "first and second token")
