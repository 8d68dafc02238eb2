"""What `suffix` drafts for hand-made texts, and what it remembers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoders import enable, testing
from decoders.strategies import Suffix
from decoders.strategy import Context, Draft, Sequences
from decoders.testing import tiny_draft, tiny_model
from decoders.text_memory import TextMemory
from decoders.tree import Topology


def sequences(*rows: list[int], prompt: int = 1, junk: int = 0) -> Sequences:
    width = max(map(len, rows)) + 3
    lengths = torch.tensor([len(row) for row in rows])
    return Sequences(
        torch.tensor([row + [junk] * (width - len(row)) for row in rows]), lengths, torch.full_like(lengths, prompt),
        torch.zeros(len(rows), dtype=torch.bool), torch.zeros(len(rows), dtype=torch.int64),
    )  # fmt: skip


def context(rows: int = 1, memory: TextMemory | None = None, level: int = 0) -> Context:
    kept: dict[str, Any] = {}

    def remember(*arguments: Any) -> Any:
        return kept.setdefault("memory", memory if memory is not None else arguments[-1]())

    return testing.context(rows, level=level, memory=remember)


def propose(*rows: list[int], memory: TextMemory | None = None, **settings: Any) -> Draft:
    strategy = Suffix(**{"alpha": 1} | settings)
    return strategy.propose(strategy.start(context(len(rows), memory)), sequences(*rows))


def parents(draft: Draft) -> list[list[int]]:
    tree = draft.topology
    return [list(tree.parents)] if isinstance(tree, Topology) else tree.parents.tolist()


def test_a_longer_match_is_worth_a_longer_draft():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 51]
    assert propose([*text, 4], alpha=2).tokens.tolist() == [[5, 6]]
    assert propose([*text, 3, 4], alpha=2).tokens.tolist() == [[5, 6, 7, 8]]
    assert propose([*text, 2, 3, 4], alpha=1).tokens.tolist() == [[5, 6, 7]]


def test_a_draft_has_no_more_nodes_than_allowed():
    assert propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], alpha=64, nodes=4).tokens.tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_continued_beyond_the_end_of_the_text(period):
    loop = list(range(10, 10 + period))
    assert propose([1, 2, 3] + loop * 4, alpha=64, nodes=12).tokens.tolist() == [(loop * 12)[:12]]


def test_frequent_continuations_form_a_tree_and_rare_ones_are_left_out():
    text = [7, 1, 2, 8, 7, 1, 2, 9, 7, 1, 3, 4, 7]
    draft = propose(text, alpha=4, min_probability=0.3)
    # After 1 comes 2 twice and 3 once; after 1 2 come 9 and 8, once each.
    assert draft.tokens[0].tolist() == [1, 2, 9, 3] and parents(draft)[0][1:5] == [0, 1, 2, 1]
    assert propose(text, alpha=4, min_probability=0.6).tokens[0].tolist() == [1, 2]


def test_the_longest_match_is_taken_where_its_tree_scores_best():
    #      a match of three, once         matches of one, more often
    text = [1, 2, 3, 60, 61, 62, 63, 64, 3, 70, 3, 70, 1, 2, 3]
    assert propose(text).tokens.tolist() == [[60, 61, 62]]


def test_rows_have_trees_of_their_own():
    rows = [[7, 1, 8, 7, 2, 9, 7], [1, 2, 3, 4, 1, 2], [5, 6]]
    together = propose(*rows, alpha=3)
    for row, tokens in zip(rows, together.tokens.tolist(), strict=True):
        alone = propose(row, alpha=3).tokens.tolist()[0]
        assert sorted(tokens) == sorted(alone + [-1] * (len(tokens) - len(alone)))


def test_one_row_has_its_likeliest_path_in_front_and_several_their_likeliest_nodes():
    """A cut leaves the likeliest nodes of several rows; nothing is cut in one."""
    text = [7, 1, 2, 8, 7, 1, 2, 9, 7, 1, 3, 4, 7]
    settings = {"alpha": 4, "min_probability": 0.3}
    assert propose(text, **settings).tokens.tolist() == [[1, 2, 9, 3]]
    assert propose(text, text, **settings).tokens.tolist() == [[1, 2, 3, 9]] * 2


def test_a_row_that_was_taken_back_is_read_again():
    """As happens where it drafts for a draft model."""
    strategy = Suffix(alpha=3)
    state = strategy.start(context(level=1))
    strategy.propose(state, sequences([1, 2, 3, 1, 2, 3, 4, 5]))
    assert strategy.propose(state, sequences([1, 2, 3, 1, 2])).tokens[0, :1].tolist() == [3]
    assert strategy.propose(state, sequences([1, 2, 9, 8, 1, 2])).tokens[0, :1].tolist() == [9]


def test_a_row_that_gets_another_text_is_read_anew_and_its_old_text_remembered():
    strategy, memory = Suffix(alpha=1), TextMemory(1000)
    state = strategy.start(context(memory=memory))
    strategy.propose(state, sequences([1, 2, 3, 4, 5, 6]))
    draft = strategy.propose(state, sequences([9, 2, 3]))
    assert memory.texts == 1 and draft.tokens.tolist() == [[4, 5]]


def test_what_an_earlier_call_wrote_is_drafted():
    strategy, memory = Suffix(alpha=2), TextMemory(1000)
    first = strategy.start(context(memory=memory))
    strategy.propose(first, sequences([1, 2, 3, 4, 5, 6], prompt=2))
    strategy.finish(first)
    second = strategy.start(context(memory=memory))
    draft = strategy.propose(second, sequences([20, 2, 3], prompt=2))
    assert draft.tokens.tolist() == [[4, 5, 6]], "to the end of that text, and not beyond"
    assert strategy.details(second)["texts_used"] == 1


def test_rows_that_come_and_go_take_their_texts_with_them():
    strategy, memory = Suffix(alpha=1), TextMemory(1000)
    state = strategy.start(context(2, memory))
    strategy.propose(state, sequences([1, 2, 3, 4, 5, 6], [7, 8, 9, 7]))
    state = strategy.rebatch(state, torch.tensor([1, -1]), context(2, memory))
    draft = strategy.propose(state, sequences([7, 8, 9, 7], [20, 2, 3]))
    assert memory.texts == 1 and draft.tokens.tolist() == [[8, -1], [4, 5]]


def test_texts_of_the_row_come_before_remembered_ones_that_match_as_well():
    strategy, memory = Suffix(), TextMemory(1000)
    first = strategy.start(context(memory=memory))
    strategy.propose(first, sequences([1, 2, 50, 51]))
    strategy.finish(first)
    draft = strategy.propose(strategy.start(context(memory=memory)), sequences([1, 2, 60, 61, 9, 1, 2]))
    assert draft.tokens[0, 0] == 60


def test_grades_tell_long_matches_and_agreement():
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 8, 3, 7, 3]
    short = propose(text)
    long = propose([*text, 9, 1, 2])
    assert short.grades.max() < long.grades.min()
    agreed, single = propose([1, 2, 5, 1, 2, 6, 1]), propose([1, 2, 5, 1])
    assert agreed.grades[0, 0] == single.grades[0, 0] + 1, "two occurrences that agree, against one"


def test_remembering_nothing_is_a_setting():
    strategy, memory = Suffix(remember=0), TextMemory(0)
    for _ in range(2):
        state = strategy.start(context(memory=memory))
        draft = strategy.propose(state, sequences([1, 2, 3, 4]))
        strategy.finish(state)
    assert draft.tokens.shape == (1, 0)


def test_a_second_call_takes_fewer_steps_and_writes_the_same():
    model = enable(tiny_model("llama"))
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(3))
    options = dict(
        max_new_tokens=40, do_sample=True, seed=3, strategy="suffix", return_dict_in_generate=True,
        decoders_config={"compile": False},
    )  # fmt: skip
    first, second = (model.generate(ids, **options) for _ in range(2))
    assert second.sequences.tolist() == first.sequences.tolist()
    assert second.report.steps < first.report.steps / 2
    assert second.report.details["texts"] == 2


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 5}], ids=["greedy", "sampled"])
def test_it_drafts_for_a_draft_model_whose_text_is_taken_back(sampling):
    model = enable(tiny_model("llama"))
    ids = torch.randint(5, 90, (3, 12), generator=torch.Generator().manual_seed(4))
    options = dict(max_new_tokens=24, decoders_config={"compile": False}, **sampling)
    plain = model.generate(ids, strategy="autoregressive", **options)
    staged = model.generate(
        ids, strategy="staged", strategy_config={"stage": "suffix"}, assistant_model=tiny_draft("llama"), **options
    )
    assert staged.tolist() == plain.tolist()
