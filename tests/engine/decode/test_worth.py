"""How much of a draft is verified where many rows pay for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import decoders
from decoders.common import host_reads
from decoders.costs import StepCosts, StepLine
from decoders.costs.worth import DraftWorth
from decoders.strategies import Lookahead, PromptLookup, Speculative
from decoders.strategy import Draft, Strategy
from decoders.testing import Replay, decode, prompts, tiny_model
from decoders.testing.models import VOCAB
from decoders.tree import Topology, TreeTensors

from ...costs.test_curve import curve, point

ROWS, DEPTH = 8, 4


class Play:
    """Steps of rows that write 1, 2, 3, …; a draft is right in its first `right` tokens, in the first `drafting` rows."""

    def __init__(
        self,
        right: int,
        node_cost: float,
        drafting: int = 2,
        ends: Sequence[int] | None = None,
        size: Callable[[int], int] = int,
        seconds: float = 0.0,
        tree: bool = False,
    ) -> None:
        self.costs = StepCosts(None, ROWS, 1, size, line=StepLine())
        self.worth = DraftWorth(lambda: self.costs, ends)
        self.worth.rebatch([-1] * ROWS)
        self.right, self.node_cost, self.drafting, self.size, self.tree = right, node_cost, drafting, size, tree
        self.seconds, self.lengths, self.looks = seconds, [1] * ROWS, 0

    def draft(self) -> Draft:
        tokens = torch.full((ROWS, DEPTH), -1)
        for row in range(self.drafting):
            right = torch.arange(DEPTH) < self.right
            tokens[row] = torch.where(right, self.lengths[row] + torch.arange(DEPTH), 999)
        if not self.tree:
            return Draft.chain(tokens)
        parents = torch.tensor([Topology.chain(DEPTH).parents] * ROWS)
        return Draft(tokens, TreeTensors.from_parents(parents))

    def step(self) -> int:
        """One step; how many draft tokens were verified."""
        due, count = self.worth.due(), 0
        if due:
            self.looks += 1
            count = self.worth.nodes(self.draft(), self.lengths, [False] * ROWS)
        accepted = [min(count, self.right) if row < self.drafting else 0 for row in range(ROWS)]
        written = [list(range(at, at + more + 1)) for at, more in zip(self.lengths, accepted, strict=True)]
        self.lengths = [at + len(tokens) for at, tokens in zip(self.lengths, written, strict=True)]
        nodes = self.size(count + 1)
        seconds = 1.0 + self.node_cost * ROWS * nodes
        self.worth.observe(seconds, [len(tokens) for tokens in written], self.seconds if due else None)
        self.costs.observe(nodes, seconds, max(self.lengths), False)
        self.worth.follow(written)
        return count

    def steps(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]


def test_drafts_that_are_never_right_are_not_verified() -> None:
    assert sum(Play(0, 0.05, drafting=ROWS).steps(60)) <= 4


@pytest.mark.parametrize("tree", [False, True])
def test_drafts_that_are_right_are_verified_as_deep_as_they_are(tree: bool) -> None:
    assert set(Play(4, 0.001, tree=tree).steps(60)[20:]) == {4}
    assert set(Play(2, 0.001, tree=tree).steps(60)[20:]) == {2}


def test_where_nodes_are_dear_one_rows_draft_is_left_alone() -> None:
    assert sum(Play(4, 1.0, drafting=1).steps(60)[10:]) <= 8
    assert sum(Play(4, 0.0, drafting=1).steps(60)[10:]) >= 190


def test_what_is_not_verified_is_judged_all_the_same() -> None:
    """Drafts become right while nothing is verified: no step was needed to see it."""
    play = Play(0, 0.02, drafting=ROWS)
    assert play.steps(40)[-1] == 0
    play.right = 4
    assert max(play.steps(8)) == 4


def test_what_a_block_is_filled_up_to_counts() -> None:
    """A draft of one token is not worth a block of eight nodes; of as many as are in the block anyway it is."""

    def size(nodes: int) -> int:
        return 1 if nodes == 1 else max(nodes, 8)

    assert max(Play(2, 0.02, drafting=4).steps(40)[20:]) == 2
    assert sum(Play(2, 0.02, drafting=4, size=size).steps(40)[20:]) == 0
    assert min(Play(2, 0.02, drafting=ROWS, size=lambda nodes: max(nodes, 8)).steps(40)[30:]) >= 2


def test_rows_that_wait_for_others_are_worth_little() -> None:
    """Four rows gain four tokens a step. Where all end together that helps nobody; where others come in their place it does."""
    assert sum(Play(4, 0.02, drafting=4).steps(40)[20:]) >= 60
    assert sum(Play(4, 0.02, drafting=4, ends=[200] * ROWS).steps(40)[20:]) <= 8
    assert sum(Play(4, 0.02, drafting=ROWS, ends=[200] * ROWS).steps(30)[20:]) >= 30


def test_drafts_that_take_long_and_bring_nothing_are_asked_for_rarely() -> None:
    dear, cheap = Play(0, 0.02, drafting=ROWS, seconds=0.5), Play(0, 0.02, drafting=ROWS, seconds=0.001)
    for play in (dear, cheap):
        play.costs.observe(1, 1.0 + 0.02 * 8, 1, False)  # sizes differ: what a step costs is known
        play.costs.observe(5, 1.0 + 0.02 * 40, 1, False)
        play.steps(200)
    assert dear.looks <= 20 < 90 <= cheap.looks


def test_rows_that_stay_keep_what_is_known_of_them() -> None:
    play = Play(4, 0.02, drafting=1)
    play.steps(30)
    before = play.worth._rows[0]
    play.worth.rebatch([3, 0, -1])
    assert play.worth._rows[1] is before and len(play.worth._rows) == 3


def test_blocks_of_one_size_are_left_out_now_and_then_until_it_is_known_what_they_cost() -> None:
    counts = Play(4, 0.2, drafting=3).steps(20)
    assert 0 in counts[:6] and set(counts[12:]) == {0}


def test_what_steps_cost_outlives_a_call(tmp_path: Path) -> None:
    models = [decoders.enable(tiny_model("llama")) for _ in range(2)]
    settings = {"compile": False, "prune": True, "cost_cache": str(tmp_path)}
    decode(models[0], prompts(4), "prompt_lookup", max_new_tokens=30, decoders_config=settings)
    seen, other = (vars(model)["generate"].engine().calibration.line for model in models)
    assert seen.step(4) is not None and other.step(4) is None


def test_a_batch_goes_by_the_curve_where_there_is_one() -> None:
    """Nodes are dear by the curve, and no step has to be tried to see it."""
    play = Play(4, 1.0, drafting=1)
    play.costs = StepCosts(curve(point(1, 9.0, rows=ROWS), point(5, 41.0, rows=ROWS)), ROWS, 1)
    assert sum(play.steps(30)) == 0
    play = Play(4, 0.0, drafting=1)
    play.costs = StepCosts(curve(point(1, 1.0, rows=ROWS), point(5, 1.0, rows=ROWS)), ROWS, 1)
    assert set(play.steps(30)[5:]) == {4}


@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_never_right_is_left_out(rows: int) -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(rows)
    plain = decode(model, inputs, "autoregressive", max_new_tokens=30)
    wrong = tuple((token + 1) % VOCAB for token in range(200))
    drafted = {}
    for prune in (False, True):
        out = decode(
            model,
            inputs,
            Replay(texts=(wrong,) * rows),
            max_new_tokens=30,
            decoders_config={"compile": False, "prune": prune},
        )
        assert torch.equal(out.sequences, plain.sequences)
        drafted[prune] = out.report.drafted
    assert drafted[True] < drafted[False] / 3


@pytest.mark.parametrize(
    "strategy, sample, static, weighed",
    [
        (PromptLookup(), False, False, True),
        (PromptLookup(), False, True, False),  # steps of one size are recorded
        (Lookahead(), False, False, False),  # learns from every step
        (Speculative(), True, False, False),  # the verifier judges whole drafts
    ],
    ids=["prompt_lookup", "static sizes", "lookahead", "rejection"],
)
def test_only_drafts_that_may_be_cut_are_weighed(
    strategy: Strategy, sample: bool, static: bool, weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[DraftWorth] = []
    observe = DraftWorth.observe
    monkeypatch.setattr(DraftWorth, "observe", lambda worth, *given: seen.append(worth) or observe(worth, *given))
    monkeypatch.setattr(host_reads, "static_shapes", lambda device: static)
    options: dict[str, Any] = {"assistant_model": tiny_model("llama", 1)} if strategy.needs_assistant else {}
    loop = {"compile": False, "prune": True}
    model = decoders.enable(tiny_model("llama"))
    if sample:
        options |= {"do_sample": True, "verifier": "rejection"}
    decode(model, prompts(1), strategy, max_new_tokens=8, decoders_config=loop, **options)
    assert bool(seen) is weighed
