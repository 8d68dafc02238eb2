"""Models to draft for and to draft with, and Medusa heads for the tiny models: random ones, which draft badly, in a tree so wide
that some draft tokens are right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, modeling_layers

import decoders
from decoders.costs import CostCurve, CostPoint, Subject
from decoders.heads.medusa import HeadsConfig, MedusaHeads, save_heads
from decoders.strategy import Draft, Strategy
from decoders.testing import checks_for, tiny_draft, tiny_model
from decoders.testing.drafts import check_draft_tokens_are_accepted
from decoders.testing.kit import Check, label
from decoders.testing.models import VOCAB
from decoders.tree import Topology

#: Wide enough for random draft tokens; no rank is skipped.
WIDE = tuple((i,) for i in range(40)) + tuple((i, j) for i in range(4) for j in range(12)) + ((0, 0, 0), (0, 1, 0))

needs_mtp = pytest.mark.skipif(
    not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"),
    reason="this transformers builds no MTP layers",
)

#: What settings change in every strategy.
OF_SETTINGS = ("check_class", "check_settings")


def cases(*strategies: Strategy) -> list[Any]:
    """Cases ``strategy, check`` for a test that is drawn in turns: every strategy, and every check that it has."""
    return [_case(strategy, check, True) for strategy in strategies for check in checks_for(strategy)]


def of_shapes(quick: dict[Strategy, Sequence[str]]) -> list[Any]:
    """Cases ``strategy, check`` of one strategy whose drafts have several shapes: those that are named, and slow all others.

    Chains of random networks are not asked whether they are ever right.
    """
    return [
        _case(strategy, check, check.__name__ in (names if turn else (*OF_SETTINGS, *names)))
        for turn, (strategy, names) in enumerate(quick.items())
        for check in checks_for(strategy)
        if check is not check_draft_tokens_are_accepted or strategy.settings.tree != "none"
    ]


def _case(strategy: Strategy, check: Check, quick: bool) -> Any:
    name = f"{label(strategy)}-{check.__name__}"
    return pytest.param(strategy, check, id=name, marks=() if quick else pytest.mark.slow)


@cache
def random_heads(hidden: int = 32, vocab: int = VOCAB, tree: tuple | None = WIDE) -> str:
    """A folder of random heads, the same in every run."""
    folder = tempfile.TemporaryDirectory(prefix="medusa-heads-")
    _folders.append(folder)
    heads = MedusaHeads(
        HeadsConfig(heads=3, layers=1, hidden_size=hidden, vocab_size=vocab, projection="tied", tree=tree)
    )
    with torch.no_grad():
        heads.linear.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    save_heads(heads, Path(folder.name))
    return folder.name


_folders: list[tempfile.TemporaryDirectory] = []


def paths_of(draft: Draft, row: int) -> dict[tuple[int, ...], int]:
    """The tokens down to each candidate node, and the node."""
    tree: Any = draft.topology
    if isinstance(tree, Topology):
        tree = tree.tensors(len(draft.tokens), draft.tokens.device)
    tokens, found = draft.tokens[row].tolist(), {}
    for node in range(1, len(tree)):
        path = [k for k in range(1, len(tree)) if tree.ancestors[row, node, k]]
        if path and tokens[node - 1] >= 0:
            found[tuple(tokens[k - 1] for k in path)] = node
    return found


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    """An enabled model, shared: whoever changes it makes one of its own."""
    return decoders.enable(tiny_model("llama"))


@pytest.fixture(scope="session")
def near() -> PreTrainedModel:
    """A draft that often agrees with `target`."""
    return tiny_draft("llama")


@pytest.fixture(scope="session")
def looping() -> PreTrainedModel:
    """An enabled model whose next token depends on the last one alone, so that its greedy text soon repeats itself."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return decoders.enable(model)


def curve(milliseconds: dict[int, float]) -> CostCurve:
    """What steps of so many nodes take, in one row and uncompiled."""
    subject = Subject(
        model="made up", dtype="float32", quantization="", device="none", threads=1, attention="sdpa", torch="2"
    )
    points = [
        CostPoint(rows=1, context=64, nodes=n, compiled=False, seconds=ms / 1e3) for n, ms in milliseconds.items()
    ]
    return CostCurve(subject=subject).with_points(points)
