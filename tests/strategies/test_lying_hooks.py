"""Hooks that break their contract are stopped by name: nothing that they do changes what is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoders.errors import DecodersError, DraftError, VerifierError
from decoders.strategy import Context, Draft, Sequences, Step, Strategy
from decoders.testing import prompts
from decoders.tree import MAX_NODES, Topology, TreeTensors
from decoders.verifiers import Block, Outcomes, Verifier

EAGER = {"compile": False}
PARENTS = [-1, 0, 1, 0]


def tree(rows: int) -> TreeTensors:
    return TreeTensors.from_parents(torch.tensor(PARENTS).expand(rows, -1))


def backwards(rows: int) -> TreeTensors:
    """The same tree with a child in front of its parent, sound in all else."""
    made, order = tree(rows), torch.tensor([0, 2, 1, 3])
    place = order.argsort()
    return TreeTensors(
        place[made.parents[:, order]], made.offsets[:, order], made.visible[:, order][..., order], made.ancestors[:, order][..., order]
    )  # fmt: skip


class Proposes(Strategy):
    """Proposes three tokens, in the tree that a test wants."""

    name = "proposes"

    def __init__(self, make: Callable[[Sequences, Tensor], Any], observe: Callable[[Step], Any] | None = None) -> None:
        super().__init__()
        self.make, self.look = make, observe

    def start(self, context: Context) -> int:
        return context.rows

    def propose(self, state: int, sequences: Sequences) -> Draft:
        return self.make(sequences, sequences.last.expand(-1, 3))

    def observe(self, state: int, step: Step) -> None:
        if self.look is not None:
            self.look(step)


def with_tree(**wrong: Callable[[TreeTensors], Tensor]) -> Callable[[Sequences, Tensor], Draft]:
    def make(sequences: Sequences, tokens: Tensor) -> Draft:
        sound = tree(len(tokens))
        return Draft(tokens, replace(sound, **{name: change(sound) for name, change in wrong.items()}))

    return make


WRONG_TREES = {
    "sees everything": with_tree(visible=lambda t: torch.ones_like(t.visible)),
    "sees itself alone": with_tree(visible=lambda t: torch.eye(4, dtype=torch.bool).expand_as(t.visible)),
    "sees a sibling": with_tree(visible=lambda t: t.visible | (torch.arange(16).view(4, 4) == 13)),
    "positions": with_tree(offsets=lambda t: t.offsets + (torch.arange(4) == 2)),
    "ancestors": with_tree(ancestors=lambda t: t.visible & False | torch.eye(4, dtype=torch.bool)),
    "parents": with_tree(parents=lambda t: torch.tensor([0, 0, 3, 0]).expand_as(t.parents)),
    "child before parent": lambda s, t: Draft(t, backwards(len(t))),
    "out of range": with_tree(parents=lambda t: torch.tensor([0, 0, 9, 0]).expand_as(t.parents)),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_tree_that_does_not_follow_from_its_parents(llama: PreTrainedModel, wrong: str, rows: int) -> None:
    with pytest.raises(DraftError, match="'proposes' .* proposed an invalid tree: .* visible"):
        llama.generate(
            **prompts(rows),
            strategy=Proposes(WRONG_TREES[wrong]),
            max_new_tokens=8,
            do_sample=False,
            decoders_config=EAGER,
        )


def test_sound_trees_pass() -> None:
    lookahead = Topology((-1, 0, -1, -1), (0, 1, 1, 2), ((), (), (0,), (2, 0)))
    for sound in (tree(3), tree(3).padded(9), tree(3).merge(tree(3)), lookahead.tensors(3, torch.device("cpu"))):
        assert sound.sound().tolist() == sound.sound(wait=True).tolist() == [True] * 3


WRONG_SHAPES: dict[str, tuple[Callable[[Sequences, Tensor], Any], str]] = {
    "nothing": (lambda s, t: None, "must return a Draft, not NoneType"),
    "a list": (lambda s, t: Draft(t.tolist(), Topology.chain(3)), "must be int64"),
    "no topology": (lambda s, t: Draft(t, None), "topology must be a Topology or TreeTensors"),
    "too many": (lambda s, t: Draft.chain(s.last.expand(-1, MAX_NODES)), f"{MAX_NODES - 1} tokens per row at most"),
    "uneven lists": (lambda s, t: Draft.listed([[1, 2], [1]]), r"equally many draft tokens, not \[2, 1\]"),
    "tokens of one row": (lambda s, t: Draft.listed([1, 2]), r"a list of tokens for every row, not \[1, 2\]"),
    "chain of a list": (lambda s, t: Draft.chain([1, 2]), "a chain needs a tensor"),
    "chain of a row": (lambda s, t: Draft.chain(t[0]), r"not torch.int64 \[3\]"),
    "branches of a chain": (lambda s, t: Draft.branches(t), "branches need a tensor"),
    "scores of tokens": (lambda s, t: Draft(t, Topology.chain(3), t), "draft scores must be float32"),
    "long floats": (lambda s, t: Draft.chain(t.float()), "must be int64"),
    "int32": (lambda s, t: Draft.chain(t.int()), "must be int64"),
    "a row too many": (lambda s, t: Draft.chain(t.expand(2, -1)), r"int64 \[1, N-1\], not torch.int64 \[2, 3\]"),
    "one dimension": (lambda s, t: Draft(t[0], Topology.chain(3)), "must be int64"),
    "bare tokens": (lambda s, t: t, "must return a Draft, not Tensor"),
    "topology too long": (lambda s, t: Draft(t, Topology.chain(4)), "must have 4 nodes, not 5"),
    "a child before its parent": (lambda s, t: Draft(t, Topology.from_parents([-1, 2, 0, 0])), "must come before its child"),
    "goes on from a window": (lambda s, t: Draft(t, Topology((-1, -1, 1, 0), (0, 1, 2, 1))), "can never be accepted"),
    "sees a rival": (
        lambda s, t: Draft(t, Topology((-1, 0, 0, 0), (0, 1, 1, 1), ((), (), (1,), ()))), "may see its own ancestors only"
    ),
    "root": (lambda s, t: Draft(t, Topology.from_parents([0, 0, 1, 2])), "node 0 is the root"),
    "visible of floats": (with_tree(visible=lambda t: t.visible.float()), "visible of trees for 1 row of 4 nodes"),
    "parents of other rows": (with_tree(parents=lambda t: t.parents.expand(2, -1)), "parents of trees for 1 row"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
def test_a_draft_that_is_none(llama: PreTrainedModel, wrong: str) -> None:
    make, said = WRONG_SHAPES[wrong]
    with pytest.raises(DraftError, match=said):
        llama.generate(**prompts(), strategy=Proposes(make), max_new_tokens=8, do_sample=False, decoders_config=EAGER)
    assert llama.generate(**prompts(), strategy="prompt_lookup", max_new_tokens=2, decoders_config=EAGER).shape == (
        1,
        26,
    )


def test_a_part_of_a_merged_strategy_is_named(llama: PreTrainedModel) -> None:
    from decoders.strategies import PromptLookup
    from decoders.strategies.merged import Merged

    for make in (lambda s, t: None, lambda s, t: Draft(t, Topology.chain(2))):
        merged = Merged([PromptLookup(), Proposes(make)])
        with pytest.raises(DraftError, match="propose of 'proposes'"):
            llama.generate(**prompts(), strategy=merged, max_new_tokens=4, do_sample=False, decoders_config=EAGER)


WRONG_PARENTS = {
    "child before parent": [-1, 2, 0, 0], "itself": [-1, 1, 0, 0], "behind the end": [-1, 0, 7, 0], "a circle": [-1, 0, 3, 2],
    "below -1": [-1, 0, -9, 0], "no root": [0, 0, 1, 0],
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_PARENTS)
def test_parents_that_make_no_tree(llama: PreTrainedModel, wrong: str) -> None:
    def make(sequences: Sequences, tokens: Tensor) -> Draft:
        return Draft(tokens, TreeTensors.from_parents(torch.tensor(WRONG_PARENTS[wrong]).expand(len(tokens), -1)))

    with pytest.raises(DraftError, match="'proposes' .* proposed an invalid tree: a parent must come before"):
        llama.generate(**prompts(2), strategy=Proposes(make), max_new_tokens=8, do_sample=False, decoders_config=EAGER)


@pytest.mark.parametrize("wrong", [[-1, 0], torch.tensor([-1, 0]), torch.tensor([[-1.0, 0.0]])])
def test_parents_that_are_no_tensor_of_rows(wrong: Any) -> None:
    with pytest.raises(DraftError, match=r"parents of trees must be an int64 tensor \[B, N\].*, not"):
        TreeTensors.from_parents(wrong)


@pytest.mark.parametrize("name", ["tokens", "length", "prompt_length", "finished", "noise_keys"])
@pytest.mark.parametrize("hook", ["start", "propose", "observe"])
def test_writing_into_the_rows(llama: PreTrainedModel, hook: str, name: str) -> None:
    def write(sequences: Sequences) -> None:
        tensor = getattr(sequences, name)
        tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)

    def make(sequences: Sequences, tokens: Tensor) -> Draft:
        if hook == "propose":
            write(sequences)
        return Draft.chain(tokens)

    class Writes(Proposes):
        def start(self, context: Context) -> int:
            if hook == "start":
                write(context.sequences)
            return context.rows

    strategy = Writes(make, lambda step: write(step.sequences) if hook == "observe" else None)
    with pytest.raises(DraftError, match=f"{hook} of 'proposes' wrote into {name}"):
        llama.generate(**prompts(), strategy=strategy, max_new_tokens=8, do_sample=True, seed=1, decoders_config=EAGER)


def test_writing_into_a_step(llama: PreTrainedModel) -> None:
    for name in ("nodes", "chosen", "path", "accepted", "emitted", "logits", "hidden"):
        strategy = Proposes(lambda s, t: Draft.chain(t), lambda step, name=name: getattr(step, name).zero_())
        seen = "accepted" if name == "emitted" else name  # they share memory
        with pytest.raises(DraftError, match=f"wrote into {seen}"):
            llama.generate(**prompts(), strategy=strategy, max_new_tokens=8, do_sample=False, decoders_config=EAGER)


class Spoilt(Verifier):
    """Accepts nothing, by a outcome distribution that a test spoils."""

    name = "spoilt"
    spoil: ClassVar[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]

    def outcomes(self, block: Block) -> Outcomes:
        end = torch.zeros_like(block.target[..., 0])
        end[:, 0] = 1
        return Outcomes(*type(self).spoil(end, block.target.clone()))


WRONG_OUTCOMES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "negative": lambda end, next: (end - torch.tensor([0.0, 1.0, 0.0, 0.0])[: end.shape[1]], next),
    "negative root": lambda end, next: (-end, next),
    "not a number": lambda end, next: (end * torch.nan, next),
    "nothing": lambda end, next: (end * 0, next),
    "too much": lambda end, next: (end * 2, next),
    "next not a number": lambda end, next: (end, next * torch.nan),
    "next nothing": lambda end, next: (end, next * 0),
    "next negative": lambda end, next: (end, next - 1),
}


@pytest.mark.parametrize("wrong", WRONG_OUTCOMES)
def test_a_law_that_is_no_distribution(llama: PreTrainedModel, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spoilt, "spoil", staticmethod(WRONG_OUTCOMES[wrong]), raising=False)
    with pytest.raises(VerifierError, match="verifier 'spoilt' gave probabilities") as caught:
        llama.generate(
            **prompts(2), strategy=Proposes(lambda s, t: Draft.chain(t)), verifier=Spoilt(), max_new_tokens=8, do_sample=True,
            seed=2, decoders_config=EAGER,
        )  # fmt: skip
    assert isinstance(caught.value, DecodersError)


def raising(block: Block) -> Outcomes:
    raise KeyError(3)


WRONG_FORMS: dict[str, tuple[Callable[[Block], Any], type[Exception], str]] = {
    "a tuple": (lambda b: (b.target[..., 0], b.target), VerifierError, "must return Outcomes, not a tuple"),
    "too short": (lambda b: Outcomes(b.target[:, :1, 0], b.target), VerifierError, r"`end` must be torch.float32 \[1, .*, not"),
    "doubles": (lambda b: Outcomes(b.target[..., 0], b.target.double()), VerifierError, "`next` must be torch.float32"),
    "raises": (raising, KeyError, "verifier 'spoilt'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_FORMS)
def test_what_a_verifier_gives_is_no_outcome_distribution(llama: PreTrainedModel, wrong: str) -> None:
    give, kind, said = WRONG_FORMS[wrong]

    class Misshapen(Spoilt):
        def outcomes(self, block: Block) -> Outcomes:
            return give(block)

    with pytest.raises(kind) as caught:
        llama.generate(
            **prompts(), strategy=Proposes(lambda s, t: Draft.chain(t)), verifier=Misshapen(), max_new_tokens=8, do_sample=True,
            seed=2, decoders_config=EAGER,
        )  # fmt: skip
    everything = "\n".join([str(caught.value), *caught.value.__notes__])
    assert re.search(said, everything) and "verifier 'spoilt' (tests" in everything


def test_scores_of_another_vocabulary(llama: PreTrainedModel) -> None:
    strategy = Proposes(lambda s, t: Draft.chain(t, torch.zeros(*t.shape, 7)))
    with pytest.raises(DraftError, match="scores are over 7 tokens"):
        llama.generate(
            **prompts(),
            strategy=strategy,
            verifier="rejection",
            max_new_tokens=4,
            do_sample=True,
            decoders_config=EAGER,
        )
