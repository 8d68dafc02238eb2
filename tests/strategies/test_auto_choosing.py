"""What `auto` verifies, with drafters that are right as often as a script says, made-up costs, and a clock that they move."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.costs import StepCosts, row_weights
from decoders.errors import UnsupportedError
from decoders.strategies import Auto
from decoders.strategy import Context, Draft, Sequences, Step, Strategy
from decoders.testing import context
from decoders.tree import TreeTensors

from .conftest import curve

#: Milliseconds of a step by nodes: as of a model whose step is all memory traffic, and of one that pays for every node.
FLAT = {1: 10.0, 9: 10.5, 17: 11.0, 65: 13.0}
STEEP = {1: 10.0, 2: 13.0, 3: 16.0, 5: 22.0, 9: 34.0, 65: 200.0}


class Clock:
    """Tells the time in the place of the call's own clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class World:
    """A text that is written whatever is drafted."""

    clock: Clock
    text: list[int]


class Scripted(Strategy):
    """Drafts chains; at a token of the text's position ``t`` it is right with the probability ``chance(t)``.

    Args:
        rows: it is never right in others than the first so many.
    """

    rests = True

    def __init__(
        self,
        name: str,
        world: World,
        chance: Callable[[int], float],
        seconds: float,
        per_token: bool = False,
        length: int = 16,
        rows: int = 99,
    ) -> None:
        super().__init__()
        self.rows = rows
        self.name, self.world, self.chance, self.seconds = name, world, chance, seconds
        self.length, self.wanted, self.per_token = length, length, per_token
        generator = random.Random(name)
        self.luck = [generator.random() for _ in world.text]  # of a position: the same whenever it is drafted

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        length = min(self.length, self.wanted) if self.per_token else self.length
        self.world.clock.now += self.seconds * (length if self.per_token else 1)
        tokens = [
            [self._token(t) if row < self.rows else 900 + t % 90 for t in range(begin, begin + length)]
            for row, begin in enumerate(sequences.length.tolist())
        ]
        return Draft.chain(torch.tensor(tokens))

    def _token(self, t: int) -> int:
        return self.world.text[t] if self.luck[t] < self.chance(t) else 900 + t % 90


class ScriptedModel(Scripted):
    """The same, where every token costs a pass."""

    def limit(self, state: Any, tokens: int) -> None:
        self.wanted = tokens


def decode(
    world: World, strategy: Strategy, context: Context, costs: StepCosts, tokens: int
) -> tuple[float, list[tuple[int, int]]]:
    """Writes so many tokens of the world's text in every row with `strategy`.

    Returns:
        seconds, and of every step where the first row began and what was drafted.
    """
    rows, steps, start = context.rows, [], world.clock.now
    length, end = [8] * rows, 8 + tokens
    text = torch.tensor([world.text] * rows)
    state = strategy.start(context)
    while min(length) < end:
        finished = torch.tensor([at >= end for at in length])
        prompt, keys = torch.full((rows,), 8), torch.zeros(rows, dtype=torch.int64)
        sequences = Sequences(text, torch.tensor(length), prompt, finished, keys)
        draft = strategy.propose(state, sequences)
        n = draft.tokens.shape[1] + 1
        world.clock.now += costs.step(n)
        steps.append((length[0], n - 1))
        chosen, padded = torch.zeros(rows, n, dtype=torch.int64), torch.zeros(rows, n, dtype=torch.int64)
        accepted, emitted = [0] * rows, [0] * rows
        for row, at in enumerate(length):
            if at >= end:
                continue
            whole = draft.topology.parents
            parents = whole[row].tolist() if isinstance(whole, torch.Tensor) else whole
            path = [0]
            while True:
                wanted = world.text[at + len(path) - 1]
                following = [c for c in range(1, n) if parents[c] == path[-1] and draft.tokens[row, c - 1] == wanted]
                if not following:
                    break
                path.append(following[0])
            for depth, node in enumerate(path):
                chosen[row, node], padded[row, depth] = world.text[at + depth], node
            accepted[row], emitted[row] = len(path) - 1, len(path)
            length[row] += len(path)
        strategy.observe(
            state,
            Step(
                torch.zeros(rows, n), chosen, padded, torch.tensor(accepted), torch.tensor(emitted),
                torch.zeros(rows, n, 1), torch.zeros(rows, n, 1), sequences,
            ),
        )  # fmt: skip
    return world.clock.now - start, steps


@pytest.fixture
def world() -> World:
    clock = Clock()
    generator = random.Random(0)
    return World(clock, [generator.randrange(800) for _ in range(2000)])


def choosing(
    world: World, drafters: list[Scripted], milliseconds: dict[int, float], **more: Any
) -> tuple[Auto, Context, StepCosts]:
    """`auto` among `drafters`, where a step costs as said; more: of the context."""
    costs = StepCosts(curve(milliseconds), 1, 64)
    by_name = {drafter.name: drafter for drafter in drafters}
    made = context(
        slots=4096,
        strategy=lambda name, settings: by_name[name],
        costs=lambda measure: costs,
        clock=world.clock.perf_counter,
        **more,
    )
    return Auto(candidates=tuple(by_name)), made, costs


def best_fixed(world: World, drafter: Scripted, milliseconds: dict[int, float], tokens: int) -> float:
    """Seconds that `drafter` takes by itself with the best of several fixed lengths."""
    costs = StepCosts(curve(milliseconds), 1, 64)
    alone = context(slots=4096, clock=world.clock.perf_counter)
    seconds = []
    for length in (1, 2, 3, 4, 6, 8, 12, 16):
        drafter.length, drafter.wanted = length, length
        seconds.append(decode(world, drafter, alone, costs, tokens)[0])
    drafter.length = drafter.wanted = 16
    return min(seconds)


@pytest.mark.parametrize("milliseconds", [FLAT, STEEP], ids=["flat", "steep"])
def test_drafters_that_are_never_right_cost_three_percent_at_most(world: World, milliseconds: dict[int, float]) -> None:
    drafters = [
        Scripted("cheap", world, lambda t: 0.0, 0.0001), Scripted("dear", world, lambda t: 0.02, 0.0008),
        ScriptedModel("model", world, lambda t: 0.05, 0.003, per_token=True),
    ]  # fmt: skip
    auto, context, costs = choosing(world, drafters, milliseconds)
    seconds, steps = decode(world, auto, context, costs, 500)
    assert seconds <= 500 * milliseconds[1] / 1e3 / 0.97
    if milliseconds is STEEP:  # else nodes are free, and wrong draft tokens cost nothing
        assert sum(drafted for _, drafted in steps[20:]) <= 0.05 * len(steps)


@pytest.mark.in_turns
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("milliseconds", [FLAT, STEEP], ids=["flat", "steep"])
def test_it_finds_the_drafter_that_is_right_and_its_length(
    world: World, milliseconds: dict[int, float], chance: float
) -> None:
    drafters = [
        Scripted("wrong", world, lambda t: 0.1, 0.0001), Scripted("right", world, lambda t: chance, 0.0001),
        ScriptedModel("model", world, lambda t: 0.6, 0.004, per_token=True),
    ]  # fmt: skip
    plain = 800 * milliseconds[1] / 1e3
    best = min(plain, *(best_fixed(world, drafter, milliseconds, 800) for drafter in drafters))
    auto, context, costs = choosing(world, drafters, milliseconds)
    seconds, _ = decode(world, auto, context, costs, 800)
    assert best / seconds >= 0.95


def test_a_draft_model_is_used_where_it_pays(world: World) -> None:
    model = ScriptedModel("model", world, lambda t: 0.85, 0.001, per_token=True)
    auto, context, costs = choosing(world, [Scripted("wrong", world, lambda t: 0.05, 0.0001), model], FLAT)
    best = best_fixed(world, model, FLAT, 1200)
    seconds, _ = decode(world, auto, context, costs, 1200)
    assert best / seconds >= 0.95


def test_a_change_of_the_text_is_noticed_within_twenty_tokens(world: World) -> None:
    begin, end = 408, 808
    lookup = Scripted("lookup", world, lambda t: 0.95 if begin <= t < end else 0.02, 0.0002)
    auto, context, costs = choosing(world, [lookup], STEEP)
    _, steps = decode(world, auto, context, costs, 1000)
    # Right is what is drafted from `begin` to `end`, so that is where it should be verified.
    before = [drafted for at, drafted in steps if 100 <= at < begin]
    assert sum(before) <= 0.1 * len(before)
    assert max(drafted for at, drafted in steps if begin <= at < begin + 24) >= 4, "it did not come back"
    after = [drafted for at, drafted in steps if at >= end + 24]
    assert sum(after) <= 0.2 * len(after), "it did not stop"


@pytest.mark.parametrize("period", [2, 3, 4])
@pytest.mark.parametrize("phase", [0, 1])
def test_what_repeats_every_few_tokens_is_found_wherever_looking_began(world: World, period: int, phase: int) -> None:
    """Looks that are as far apart as what they look for would always come at the wrong moment."""
    begin = 60 + phase
    lookup = Scripted("lookup", world, lambda t: float(t >= begin and t % period == 0), 0.00014, length=1)
    auto, context, costs = choosing(world, [lookup], FLAT)
    _, steps = decode(world, auto, context, costs, 400)
    written = [after - before for (before, _), (after, _) in itertools.pairwise(steps) if before >= begin + 40]
    most = period / (period - 1)
    assert sum(written) / len(written) >= 0.9 * most


def test_several_drafters_share_a_step_where_they_differ(world: World) -> None:
    """Each knows half of the text: together they are right all of the time."""
    even = Scripted("even", world, lambda t: 1.0 if t // 4 % 2 == 0 else 0.0, 0.0001, length=4)
    odd = Scripted("odd", world, lambda t: 1.0 if t // 4 % 2 else 0.0, 0.0001, length=4)
    auto, context, costs = choosing(world, [even, odd], FLAT)
    together, _ = decode(world, auto, context, costs, 400)
    alone = min(best_fixed(world, drafter, FLAT, 400) for drafter in (even, odd))
    assert together < 0.8 * alone


def test_the_likeliest_path_stands_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slots of their own depth tokens have the bits of plain decoding, and need not be run again."""
    poor = Scripted("poor", world, lambda t: 0.4, 0.0001, length=6)
    good = Scripted("good", world, lambda t: 0.9, 0.0001, length=6)
    auto, context, costs = choosing(world, [poor, good], FLAT)
    first: list[bool] = []
    propose = Auto.propose

    def noted(self: Auto, state: Any, sequences: Sequences) -> Draft:
        draft = propose(self, state, sequences)
        if isinstance(draft.topology, TreeTensors):
            parents, path = [-1, *draft.topology.parents[0, 1:].tolist()], [0]
            while path[-1] in parents:
                path.append(parents.index(path[-1]))
            assert path == list(range(len(path)))
            begin = int(sequences.length)
            first.append(draft.tokens[0, : len(path) - 1].tolist() == world.text[begin : begin + len(path) - 1])
        return draft

    monkeypatch.setattr(Auto, "propose", noted)
    decode(world, auto, context, costs, 600)
    assert len(first) > 40
    assert sum(first[20:]) > 0.3 * len(first[20:]), "0.9 ** 6 is 0.53, 0.4 ** 6 is 0.004"


def test_another_verifier_is_refused_with_what_auto_can_do() -> None:
    with pytest.raises(
        UnsupportedError,
        match="^auto chooses which draft tokens to verify by tokens that were drawn before.*take verifier='coupled'",
    ):
        Auto().start(context(coupled=False))


def test_costs_decide_how_much_is_verified(world: World) -> None:
    def sizes(milliseconds: dict[int, float]) -> float:
        drafter = Scripted("drafter", replace(world), lambda t: 0.7, 0.0001)
        auto, context, costs = choosing(world, [drafter], milliseconds)
        steps = decode(world, auto, context, costs, 300)[1]
        return sum(drafted for _, drafted in steps) / len(steps)

    assert sizes(FLAT) > 6 > 3 > sizes(STEEP)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_rows_that_wait_for_the_others_are_not_hurried(world: World, rows: int) -> None:
    """A call lasts as long as its slowest row: where that gains nothing, the others' tokens are worth no time."""
    copier = Scripted("copier", world, lambda t: 0.9, 0.0001, rows=rows)
    auto, context, costs = choosing(world, [copier], STEEP, rows=8, new_tokens=200)
    seconds, _ = decode(world, auto, context, costs, 200)
    plain = 200 * STEEP[1] / 1e3
    assert seconds <= (plain / 0.97 if rows < 8 else 0.9 * plain)


def test_where_others_take_their_place_rows_are_hurried(world: World) -> None:
    copier = Scripted("copier", world, lambda t: 0.9, 0.0001, rows=4)
    auto, context, costs = choosing(world, [copier], FLAT | {5: 13.0, 9: 20.0, 17: 40.0, 65: 200.0}, rows=8)
    _, steps = decode(world, auto, context, costs, 200)
    assert sum(drafted for _, drafted in steps[20:40]) > 20


#: Milliseconds of a step of a model as small as the demo target, by nodes.
SMALL = {1: 2.5, 9: 2.9, 17: 3.4, 33: 4.6, 65: 7.0}


class ScriptedHeads(Scripted):
    """A drafter whose first runs take longer than those that follow, as compiling, reading the prompt and cold memory make it.

    Args:
        first: seconds that its first run takes beside.
    """

    def __init__(self, *args: Any, first: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self.first = first

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        self.world.clock.now += self.first
        self.first = 0.0
        return super().propose(state, sequences)


class ScriptedDraftModel(ScriptedHeads, ScriptedModel):
    """A draft model that reads the prompt first."""


def small_drafters(world: World, lookup: float, rows: int = 99) -> list[Scripted]:
    """Candidates that cost as much, beside a step of a small model, as those of the demo target do."""
    return [
        Scripted("lookup", world, lambda t: lookup, 0.00015, rows=rows), Scripted("table", world, lambda t: 0.1, 0.0001),
        ScriptedHeads("heads", world, lambda t: 0.15, 0.0012, length=3, first=0.002),
        ScriptedDraftModel("model", world, lambda t: 0.3, 0.0009, per_token=True, first=0.007),
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("lookup", [0.02, 0.3])
def test_a_short_call_of_a_small_model_is_as_fast_as_plain_decoding(world: World, lookup: float, rows: int) -> None:
    """Looks at drafters, the first ones included, must not cost more than a call as short as this one can bear."""
    auto, context, costs = choosing(world, small_drafters(world, lookup), SMALL, rows=rows, new_tokens=96)
    seconds, _ = decode(world, auto, context, costs, 96)
    assert seconds <= 96 * SMALL[1] / 1e3 / 0.97


def test_a_short_call_of_a_small_model_finds_what_is_right(world: World) -> None:
    drafters = small_drafters(world, 0.9)
    best = best_fixed(world, drafters[0], SMALL, 96)
    auto, context, costs = choosing(world, drafters, SMALL, new_tokens=96)
    seconds, _ = decode(world, auto, context, costs, 96)
    assert best / seconds >= 0.8  # all of it takes 36 ms, of which one look at the heads takes 3


def test_what_a_short_call_cannot_bear_is_tried_over_several(world: World) -> None:
    """What looks may cost adds up over calls."""
    auto, context, costs = choosing(world, small_drafters(world, 0.02), SMALL, new_tokens=96)
    kept: dict[str, Any] = {}
    context = replace(context, memory=lambda key, factory, of=None: kept.setdefault(key, factory()))
    model = [call for call in range(12) if _runs(world, auto, context, costs, "model")]
    assert model
    assert model[0] > 0


def _runs(world: World, auto: Auto, context: Context, costs: StepCosts, name: str) -> int:
    states: list[Any] = []
    start = auto.start
    auto.start = lambda context: states.append(start(context)) or states[-1]  # type: ignore[method-assign,func-returns-value]
    decode(world, auto, context, costs, 96)
    auto.start = start  # type: ignore[method-assign]
    return auto.details(states[0])["candidates"][name]["runs"]


def test_a_call_that_is_behind_asks_nobody(world: World) -> None:
    copier = Scripted("copier", world, lambda t: 0.9, 0.0003)
    auto, context, _ = choosing(world, [copier], SMALL, new_tokens=96)
    state, one = auto.start(context), torch.ones(1, dtype=torch.int64)
    sequences = Sequences(torch.tensor([world.text]), 8 * one, 8 * one, one == 0, 0 * one)
    for behind, asked in ((-1.0, True), (1.0, False)):
        state.ledger.behind, begun = behind, world.clock.now
        auto.propose(state, sequences)
        assert (world.clock.now > begun) == asked
        assert state.candidates[0].requested_depth == int(asked)


def test_rows_that_gain_no_time_for_the_slowest_are_left_alone(world: World) -> None:
    """Each row gains in its turn, none of them enough: what the last one to end takes is what counts."""
    copier = Scripted("copier", world, lambda t: 0.35, 0.0003)
    auto, context, costs = choosing(world, [copier], {1: 2.5, 2: 3.4, 3: 3.6, 9: 4.2, 65: 8.0}, rows=4, new_tokens=96)
    seconds, _ = decode(world, auto, context, costs, 96)
    assert seconds <= 96 * 2.5 / 1e3 / 0.97


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 8)), max_size=16))
def test_weights_are_one_on_average_and_grow_with_the_steps_that_are_left(rows: list[tuple[int, float]]) -> None:
    weights = row_weights([tokens for tokens, _ in rows], [outlook for _, outlook in rows])
    assert sum(weights) == pytest.approx(len(rows))
    order = sorted(range(len(rows)), key=lambda row: rows[row][0] / (1 + rows[row][1]))
    assert all(weights[a] <= weights[b] for a, b in itertools.pairwise(order))
