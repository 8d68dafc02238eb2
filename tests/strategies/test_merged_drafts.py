"""Draft models merged with other drafters: whose tokens were accepted must not matter to the next draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoders.registry.resolve import resolve_strategy
from decoders.strategies import PromptLookup, Speculative
from decoders.strategies.merged import Merged, MergedSettings, MergedState
from decoders.strategy import Sequences, Step
from decoders.testing import Replay, assert_same_tokens, decode, prompts
from decoders.testing.company import check_rests
from decoders.testing.conditions import Conditions

from ..turns import slow_but

EAGER = {"compile": False, "prefill_chunk": 8}
SAMPLING = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)


def assert_exact(
    model: PreTrainedModel, draft: PreTrainedModel, strategy: Any, inputs: dict[str, Tensor], new: int
) -> None:
    """Greedy and sampled text are those without a draft."""
    for draw in (SAMPLING, {}):
        options = dict(max_new_tokens=new, decoders_config=EAGER, **draw)
        expected = decode(model, inputs, "autoregressive", **options)
        out = decode(model, inputs, strategy, assistant_model=draft, **options)
        assert_same_tokens(model, inputs, expected.sequences, out.sequences, f"{strategy!r}, {draw}")


MERGED = ["speculative+prompt_lookup", "prompt_lookup+speculative", "threshold+prompt_lookup", "speculative+threshold"]


@pytest.mark.in_turns
@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("strategy", slow_but([MERGED[0], MERGED[3]], MERGED))
def test_merged_drafters_write_what_plain_decoding_writes(target, near, strategy, rows):
    assert_exact(target, near, strategy, prompts(rows), new=32)


def replay(model: PreTrainedModel, inputs: dict[str, Tensor], sample: bool, **options: Any) -> Replay:
    """A drafter that knows the text but for some tokens."""
    draw = SAMPLING if sample else {}
    out = decode(model, inputs, "autoregressive", max_new_tokens=60, decoders_config=EAGER, **draw).sequences
    start = inputs["attention_mask"].argmax(1).tolist()
    return Replay(texts=tuple(tuple(row[s:].tolist()) for row, s in zip(out, start, strict=True)), **options)


@pytest.mark.in_turns
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tree", ["none", "static"])
def test_a_draft_model_reads_what_other_drafters_got_accepted(target, sample, first, tree):
    """The target drafts for itself: three draft tokens are accepted in every step, whoever was right in the step before."""
    inputs = prompts(4)
    known = replay(target, inputs, sample, length=7, wrong_every=6)
    own = Speculative(length=3, tree=tree, nodes=6)
    strategy = Merged([own, known] if first else [known, own])
    out = decode(
        target, inputs, strategy, assistant_model=target, max_new_tokens=60, decoders_config=EAGER,
        **(SAMPLING if sample else {}),
    )  # fmt: skip
    assert (
        tuple(tuple(r[m:].tolist()) for r, m in zip(out.sequences, inputs["attention_mask"].argmax(1), strict=True))
        == known.settings.texts
    )
    lengths = out.report.accepted_lengths
    assert sum(lengths[:3]) <= 4, f"but for the ends of the rows, every step brings four tokens: {lengths}"
    assert sum(lengths[4:]) > 8, "the other drafter was often right for longer"


def test_a_node_budget_that_cuts_the_own_nodes_hides_no_others(target):
    """Of twelve own nodes one is left, and that must be right wherever the other drafter is wrong at once."""
    inputs = prompts(2)
    known = replay(target, inputs, False, length=3, wrong_every=5)
    strategy = Merged([known, Speculative(length=12)], MergedSettings(nodes=5))
    out = decode(target, inputs, strategy, assistant_model=target, max_new_tokens=60, decoders_config=EAGER)
    assert out.report.accepted_lengths[0] <= 2, "but for the ends of the rows"
    assert sum(out.report.accepted_lengths[3:]) > 8


def test_a_block_with_more_nodes_of_others_than_there_are_tokens_changes_no_token(target, near):
    """Everything in the block might have been accepted; the text is shorter than that."""
    wide = Merged([Speculative(length=3), PromptLookup(length=64, branches=8)], MergedSettings(nodes=1024))
    for inputs in (prompts(1, length=3), prompts(3)):
        assert_exact(target, near, wide, inputs, new=12)


def seen_by_the_second(own_nodes: int | None) -> Step:
    """Of the root, two nodes of the first part, two of the second and a padded one; the paths go down one part's nodes each."""
    seen: list[Step] = []

    class Sees(PromptLookup):
        name = "sees"
        rests = True

        def observe(self, state: Any, step: Step) -> None:
            seen.append(step)

    nodes, one = torch.tensor([[10, 11, 12, 13, 14, 15]] * 2), torch.tensor([4, 4])
    step = Step(
        nodes=nodes, chosen=nodes + 100, path=torch.tensor([[0, 3, 4, 0], [0, 1, 2, 0]]), accepted=one - 2,
        emitted=one - 1, logits=nodes[..., None] + 0.5, hidden=nodes[..., None] + 0.25,
        sequences=Sequences(torch.zeros(2, 8, dtype=torch.int64), one, one, one > 9, one), own_nodes=own_nodes,
    )  # fmt: skip
    strategy = Merged([PromptLookup(), Sees()])
    assert strategy.rests
    strategy.observe(MergedState([None, None], [range(1, 3), range(3, 5)], 64), step)
    (mine,) = seen
    return mine


def test_every_part_sees_its_own_nodes_right_behind_the_root():
    mine = seen_by_the_second(None)
    assert mine.nodes.tolist() == [[10, 13, 14, 11, 12, 15]] * 2 and mine.own_nodes == 3
    assert mine.path.tolist() == [[0, 1, 2, 0], [0, 3, 4, 0]]
    for name, before in (("chosen", 100), ("logits", 0.5), ("hidden", 0.25)):
        assert torch.equal(getattr(mine, name).squeeze(-1), mine.nodes + before)


@pytest.mark.parametrize(
    ("verified", "own", "nodes"),
    [
        (5, 3, [10, 13, 14, 11, 12, 15]),
        (4, 2, [10, 13, 11, 12, 14, 15]),
        (2, 1, [10, 11, 12, 13, 14, 15]),
        (0, 0, [10, 11, 12, 13, 14, 15]),
    ],
)
def test_parts_are_told_how_many_of_their_nodes_were_verified(verified: int, own: int, nodes: list[int]) -> None:
    mine = seen_by_the_second(verified)
    assert (mine.own_nodes, mine.nodes[0].tolist()) == (own, nodes)


def test_a_part_is_told_how_much_of_its_draft_the_budget_left(target):
    left = []

    class Counts(PromptLookup):
        name = "counts"

        def observe(self, state: Any, step: Step) -> None:
            left.append(step.own_nodes)

    strategy = Merged([Counts(length=8, branches=1), PromptLookup()], MergedSettings(nodes=4))
    decode(target, prompts(1), strategy, max_new_tokens=3, decoders_config=EAGER)
    assert set(left) == {4}


@pytest.mark.parametrize("strategy", ["speculative+prompt_lookup", "suffix+token_recycling"])
def test_merged_drafters_that_can_rest_do(strategy: str) -> None:
    merged = resolve_strategy(strategy)
    assert merged.rests
    check_rests(merged, Conditions())
