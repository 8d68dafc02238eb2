"""``on_device`` is a promise: strategies that break it are found out, by what a recording of their hooks would do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoders.engine.decode.grammar.host_guide import HostGuide
from decoders.strategies import Speculative
from decoders.strategy import Draft, Sequences, Step, Strategy
from decoders.testing import check_strategy
from decoders.testing.checks import check_on_device
from decoders.testing.wrapped import Replayed
from decoders.tree import Topology


class Follower(Strategy):
    """Proposes what the target chose last after each of the last tokens; keeps every promise."""

    name = "follower"
    summary = "Repeats the target's last choice."
    on_device = True

    def start(self, context: Any) -> SimpleNamespace:
        return SimpleNamespace(
            best=torch.zeros(context.rows, 3, dtype=torch.int64, device=context.device),
            turn=torch.zeros(1, dtype=torch.int64, device=context.device), steps=0, context=context.vocab_size,
        )  # fmt: skip

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return Draft.chain(state.best.clone())

    def observe(self, state: Any, step: Step) -> None:
        state.best.copy_(step.chosen[:, :1].clamp(min=0).expand_as(state.best))
        state.turn.add_(1)
        state.turn[state.turn > 5] = 0  # one value for all that a mask picks is no host read


class Waits(Follower):
    def propose(self, state, sequences):
        return super().propose(state, sequences) if sequences.finished.any() else Draft.chain(state.best + 0)


class IndexesAList(Follower):
    def propose(self, state, sequences):
        return Draft.chain(state.best + [1, 2, 3][state.turn[0] % 3] * 0)


class CountsItsElements(Follower):
    def observe(self, state, step):
        super().observe(state, step)
        state.best.add_(0 * len(step.emitted.nonzero()))


class ReadsAsList(Follower):
    def observe(self, state, step):
        step.emitted.tolist()
        super().observe(state, step)


class ReadsAsArray(Follower):
    def observe(self, state, step):
        step.emitted.numpy()
        super().observe(state, step)


class PicksByMask(Follower):
    def observe(self, state, step):
        super().observe(state, step)
        state.best[step.emitted > 1] = state.best[0] + 1


class BringsANumber(Follower):
    def propose(self, state, sequences):
        return Draft.chain(state.best + torch.tensor(0))


class BringsData(Follower):
    def propose(self, state, sequences):
        return Draft.chain(state.best + torch.tensor([0, 0, 0]))


class CountsInPython(Follower):
    def propose(self, state, sequences):
        state.steps += 1
        return Draft.chain((state.best + state.steps) % state.context)


class KeepsWhatItWasGiven(Follower):
    def observe(self, state, step):
        state.best = step.chosen[:, :1].clamp(min=0).expand(-1, 3)


class MakesItAnew(Follower):
    def observe(self, state, step):
        state.best = torch.stack([step.chosen[:, 0].clamp(min=0)] * 3, dim=1)


class MakesAnotherSize(Follower):
    def observe(self, state, step):
        super().observe(state, step)
        state.turn = torch.zeros(len(state.turn) + 1)


class Longer(Follower):
    def propose(self, state, sequences):
        state.steps += 1
        return Draft.chain(state.best[:, : 1 + state.steps % 3])


class AnotherTree(Follower):
    def propose(self, state, sequences):
        state.steps += 1
        tree = Topology.chain(3) if state.steps % 2 else Topology.branches(3, 1)
        return Draft(state.best.clone(), tree)


class DropsWhatWasRead(Follower):
    """Its state shows nothing; replayed, it reads memory that it has freed since the recording."""

    def start(self, context):
        return lambda memory=[torch.zeros(context.rows, 3, dtype=torch.int64)]: memory

    def propose(self, state, sequences):
        return Draft.chain(state()[0].clone())

    def observe(self, state, step):
        state()[0] = step.logits[:, 0].topk(3).indices


class HidesItInAClosure(Follower):
    """Its state shows nothing; replayed, it goes on reading what was there when it was recorded."""

    def start(self, context):
        memory = [torch.zeros(context.rows, 3, dtype=torch.int64)]

        def exchange(new=None):
            if new is not None:
                memory.append(new)
            return memory[-1]

        return exchange

    def propose(self, state, sequences):
        return Draft.chain(state().clone())

    def observe(self, state, step):
        state((step.chosen[:, :1].clamp(min=0) + torch.arange(3)) % 100)


LIARS = {
    Waits: "__bool__.* waits for the device", IndexesAList: "__index__.* waits for the device",
    CountsItsElements: "nonzero.* waits for the device", ReadsAsList: "tolist.* waits", ReadsAsArray: "numpy.* waits",
    PicksByMask: "bool mask waits for the device", BringsData: "creates a tensor from data of the host",
    BringsANumber: "creates a tensor from data of the host",
    CountsInPython: "in step 5, and .* when it is replayed", KeepsWhatItWasGiven: "replayed|state.best has moved",
    MakesItAnew: "state.best has moved", MakesAnotherSize: r"state.turn is \[\d\] after \[\d\]",
    Longer: "proposes . nodes after .", AnotherTree: "proposes another tree of 4 nodes",
    HidesItInAClosure: "when it is replayed", DropsWhatWasRead: "memory that was freed after the recording",
}  # fmt: skip


@pytest.mark.parametrize(("liar", "reason"), LIARS.items(), ids=lambda case: getattr(case, "__name__", ""))
def test_a_broken_promise_is_found_and_the_strategy_named(liar: type[Strategy], reason: str) -> None:
    with pytest.raises(AssertionError, match=f"claims on_device = True, but .*({reason})"):
        check_on_device(liar())


def test_the_kit_names_who_broke_it() -> None:
    with pytest.raises(AssertionError, match=r"MakesItAnew\(\) fails check_on_device: .*state.best has moved"):
        check_strategy(MakesItAnew)


def test_those_who_promise_nothing_are_not_asked() -> None:
    for liar in LIARS:
        honest = type(liar.__name__, (liar,), {"on_device": False})
        check_on_device(honest())
    assert Strategy.on_device is False


def test_a_promise_kept_is_believed() -> None:
    check_on_device(Follower())


def test_replays_run_no_python_of_the_hooks() -> None:
    calls = []

    class Counts(Follower):
        def propose(self, state, sequences):
            calls.append("propose")
            return super().propose(state, sequences)

        def observe(self, state, step):
            calls.append("observe")
            super().observe(state, step)

    twin = Replayed(Counts(), record=True)
    check = check_on_device.__globals__
    conditions = check["Conditions"]()
    with conditions.enabled("llama") as model:
        check["run"](model, "llama", twin, check["prompts"](2), conditions, max_new_tokens=24)
    assert len(twin.drafts) > 6 and calls == ["propose", "observe"] * 4


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_built_ins_promise_what_their_settings_allow(schedule: str) -> None:
    assert Speculative(schedule=schedule).on_device is (schedule == "constant")
    assert HostGuide.on_device is False
