"""Measures the cost of choosing tokens from a block's logits (processors and drawing), without the forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from decoders.bench.tables import plain_table, shown
from decoders.sampling.choice import candidates
from decoders.sampling.processors import SamplingInputs, SamplingPlan, choose, process, row_keys

#: The sampling plans to measure, by name: operations with their values.
PLANS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "temperature + top_k + top_p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "top_p": {"top_p": 0.9},
    "temperature + top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
}


@dataclass(frozen=True)
class SamplingTime:
    """Milliseconds to choose the token after every node of one row.

    Attributes:
        plan: name of the plan.
        nodes: ``N``, number of nodes of the block.
        vocabulary: ``V``, number of tokens.
        median: median time of the engine's sampling, which processes only candidates (a part of the vocabulary).
        least: time of the fastest run.
        definition: median time of the reference implementation over the whole vocabulary; None if not timed.
    """

    plan: str
    nodes: int
    vocabulary: int
    median: float
    least: float
    definition: float | None


def time_sampling(
    plans: dict[str, dict[str, float]], nodes: Sequence[int], vocabulary: int, repeats: int = 20,
    logits: Callable[[int, int], Tensor] | None = None, definitions: int = 3,
) -> list[SamplingTime]:  # fmt: skip
    """Times every plan with every number of nodes. Plans take turns, so that a slow moment of the machine affects all plans.

    Args:
        plans: by name, operations with their values; greedy without operations.
        repeats: number of measurements of each plan.
        definitions: number of measurements of each reference definition, which may be slow; 0 for none.
        logits: function from (N, V) to ``[1, N, V]``; by default :func:`text_like`.

    Each repeat uses other positions, and so other noise.
    """
    rows = []
    for n in nodes:
        scores = (logits or text_like)(n, vocabulary)
        times: dict[str, list[float]] = {name: [] for name in plans}
        slow: dict[str, list[float]] = {name: [] for name in plans}
        for repeat in range(repeats + 1):
            for name, operations in plans.items():
                elapsed = _timed(_candidates, scores, operations, repeat)
                if repeat:  # the first repeat, with cold caches, is left out
                    times[name].append(elapsed)
                if repeat < definitions:
                    slow[name].append(_timed(_definitions, scores, operations, repeat))
        for name in plans:
            definition = _median(slow[name]) if slow[name] else None
            rows.append(SamplingTime(name, n, vocabulary, _median(times[name]), min(times[name]), definition))
    return rows


def text_like(nodes: int, vocabulary: int) -> Tensor:
    """Logits ``[1, N, V]`` float32 that fall with the logarithm of a token's rank, as a language model's do. The ranks are random."""
    generator = torch.Generator().manual_seed(0)
    rank = torch.arange(1, vocabulary + 1).log()
    shuffled = torch.rand(nodes, vocabulary, generator=generator).argsort(-1)
    slopes = torch.linspace(1.3, 3.0, nodes)[:, None]  # from a wide choice to a narrow one
    noise = 0.5 * torch.randn(nodes, vocabulary, generator=generator)
    return (14 - slopes * rank + noise).gather(-1, shuffled)[None]


def flat(nodes: int, vocabulary: int) -> Tensor:
    """Normally distributed logits ``[1, N, V]`` float32. Thousands of tokens share the probability: the slowest case for top_p."""
    return 3 * torch.randn(1, nodes, vocabulary, generator=torch.Generator().manual_seed(0))


def _candidates(scores: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor) -> Tensor:
    return candidates(scores, plan, inputs, positions).choose(plan, inputs, positions)


def _definitions(scores: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor) -> Tensor:
    return choose(process(scores, plan, inputs, positions), plan, inputs, positions)


def _timed(choice: Callable[..., Tensor], scores: Tensor, operations: dict[str, float], repeat: int) -> float:
    plan = SamplingPlan(tuple(operations), sample=bool(operations))
    values = [1 - value if name == "top_p" else value for name, value in operations.items()] or [0.0]
    keys = row_keys(0, 1, scores.device)
    inputs = SamplingInputs(torch.tensor(values), keys, torch.tensor([0]))
    positions = torch.arange(scores.shape[1])[None] + repeat
    started = time.perf_counter()
    choice(scores, plan, inputs, positions)
    return 1000 * (time.perf_counter() - started)


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def sampling_table(times: Sequence[SamplingTime], title: str = "") -> Table:
    """The table of one vocabulary, with a row for each plan and number of nodes."""
    table = plain_table(title, "nodes", "median", "least", "by definition")
    previous = None
    for each in sorted(times, key=lambda each: list(dict.fromkeys(t.plan for t in times)).index(each.plan)):
        table.add_row(
            Text(each.plan if each.plan != previous else "", style="bold"), str(each.nodes), shown(each.median, ".2f"),
            shown(each.least, ".2f"), shown(each.definition, ".1f"),
        )  # fmt: skip
        previous = each.plan
    return table
