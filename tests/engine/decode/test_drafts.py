"""Drafts of every shape: what is proposed changes how many steps a text takes, never the text."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from decoders import Context, Draft, Sequences, Step, Strategy, Topology, TreeTensors
from decoders.errors import DraftError
from decoders.strategies.merged import Merged, MergedSettings
from decoders.testing import decode, prompts, reference, tiny_model
from decoders.testing.models import VOCAB

EAGER = dict(decoders_config={"compile": False, "prefill_chunk": 8})
NEW = 24
P = 24


@functools.cache
def answers(rows: int) -> Tensor:
    """``[rows, slots]``: each row's greedy text without its padding, then token 1."""
    out = decode(tiny_model("llama"), prompts(rows), max_new_tokens=NEW).sequences
    texts = [text[int(mask.argmax()) :] for text, mask in zip(out, prompts(rows)["attention_mask"], strict=True)]
    known = torch.ones(rows, 1024, dtype=torch.int64)
    for row, text in enumerate(texts):
        known[row, : len(text)] = text
    return known


class Knowing(Strategy):
    """Base of strategies that know the answer: `ahead` gives each row's next tokens."""

    name = "knowing"

    def start(self, context: Context) -> Tensor:
        return answers(context.rows)

    def ahead(self, known: Tensor, sequences: Sequences, count: int) -> Tensor:
        return known.gather(1, sequences.length[:, None] + torch.arange(count))


def assert_exact(
    model: PreTrainedModel, strategy: Strategy, rows: int = 3, steps: int | None = None, **options: Any
) -> Any:
    """Greedy and sampled text are those without the strategy; greedy took at most `steps` steps."""
    greedy = decode(model, prompts(rows), strategy, max_new_tokens=NEW, **EAGER, **options)
    assert torch.equal(greedy.sequences, reference(model, prompts(rows), max_new_tokens=NEW, **options).sequences)
    if steps is not None:
        assert greedy.report.steps <= steps
    options = dict(max_new_tokens=NEW, do_sample=True, seed=3, **EAGER, **options)
    expected = reference(model, prompts(rows), "autoregressive", **options).sequences
    assert torch.equal(decode(model, prompts(rows), strategy, **options).sequences, expected)
    return greedy.report


class Chain(Knowing):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def propose(self, state: Tensor, sequences: Sequences) -> Draft:
        return Draft.chain(self.ahead(state, sequences, self.length))


@pytest.mark.parametrize("length", [1, 23, 64, 65, 200])
def test_a_right_chain_of_any_length_is_accepted_whole(llama: PreTrainedModel, length: int) -> None:
    report = assert_exact(llama, Chain(length), steps=-(-NEW // (length + 1)))
    assert report.nodes == length + 1, "uncompiled blocks of several rows are not padded"
    assert report.accepted_lengths[-1] > 0 and len(report.accepted_lengths) == min(length + 1, NEW)


def test_a_wide_block_grows_the_cache_late_in_the_text(llama: PreTrainedModel) -> None:
    class Late(Knowing):
        """Plain steps first, then 200 branches."""

        def propose(self, state: Tensor, sequences: Sequences) -> Draft:
            if int((sequences.length - sequences.prompt_length).max()) < 10:
                return Draft.nothing(len(sequences.length), sequences.tokens.device)
            right = self.ahead(state, sequences, 4)
            decoys = torch.randint(0, VOCAB, (len(right), 49, 4), generator=torch.Generator().manual_seed(1))
            return Draft.branches(torch.cat([decoys, right[:, None]], dim=1))

    assert assert_exact(llama, Late(), steps=15).nodes == 201


def test_wrong_draft_tokens_cost_steps_only(llama: PreTrainedModel) -> None:
    class Wrong(Knowing):
        def propose(self, state: Tensor, sequences: Sequences) -> Draft:
            return Draft.chain((self.ahead(state, sequences, 6) + 1) % VOCAB)

    report = assert_exact(llama, Wrong())
    assert report.accepted == 0 and report.steps == NEW


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_nothing_is_accepted_behind_a_missing_draft_token(llama: PreTrainedModel, gap: int) -> None:
    class Gap(Knowing):
        def propose(self, state: Tensor, sequences: Sequences) -> Draft:
            draft_tokens = self.ahead(state, sequences, 5).clone()
            draft_tokens[:, gap] = -1
            return Draft.chain(draft_tokens)

    report = assert_exact(llama, Gap(), steps=-(-NEW // (gap + 1)))
    assert len(report.accepted_lengths) == gap + 1
    assert report.drafted < 5 * 3 * report.steps, "what is missing is not counted as drafted"


@pytest.mark.parametrize("outside", [VOCAB, 10**6, -7])
def test_draft_tokens_outside_the_vocabulary(llama: PreTrainedModel, outside: int) -> None:
    """Refused by name, or never accepted; not an index error from inside the model."""

    class Outside(Knowing):
        def propose(self, state: Tensor, sequences: Sequences) -> Draft:
            return Draft.chain(torch.full((len(sequences.length), 3), outside))

    try:
        assert_exact(llama, Outside())
    except DraftError as error:
        assert "vocabulary" in str(error) or str(outside) in str(error)


def test_equal_siblings(llama: PreTrainedModel) -> None:
    class Twins(Knowing):
        """The right first token three times; only the third twin's branch goes on rightly."""

        def propose(self, state: Tensor, sequences: Sequences) -> Draft:
            right = self.ahead(state, sequences, 3)
            wrong = torch.cat([right[:, :1], (right[:, 1:] + 1) % VOCAB], dim=1)
            return Draft.branches(torch.stack([wrong, wrong, right], dim=1))

    assert_exact(llama, Twins(), steps=6)


class Ignore(LogitsProcessor):
    """Changes nothing, but sends the choice to the host."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def test_equal_siblings_when_the_choice_is_made_on_the_host(llama: PreTrainedModel) -> None:
    class Twins(Knowing):
        def propose(self, state: Tensor, sequences: Sequences) -> Draft:
            right = self.ahead(state, sequences, 3)
            wrong = torch.cat([right[:, :1], (right[:, 1:] + 1) % VOCAB], dim=1)
            return Draft.branches(torch.stack([wrong, right], dim=1))

    report = assert_exact(llama, Twins(), rows=1, logits_processor=[Ignore()])
    assert report.steps <= 6, "the twin that goes on rightly is the one that is followed"


def test_trees_of_a_shape_of_their_own_per_row(llama: PreTrainedModel) -> None:
    class Dynamic(Knowing):
        """Row 0 gets a chain, row 1 a bush whose right branch comes last, row 2 mostly nodes that are no candidates."""

        shapes = torch.tensor([[-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 2, 4], [-1, -1, 0, -1, 2, -1]])
        right = torch.tensor([[0, 1, 2, 3, 4], [-2, 0, -2, 1, 2], [-2, 0, -2, 1, -2]])

        def propose(self, state: Tensor, sequences: Sequences) -> Draft:
            ahead = self.ahead(state, sequences, 5)
            tokens = torch.where(self.right >= 0, ahead.gather(1, self.right.clamp(min=0)), 5)
            return Draft(tokens, TreeTensors.from_parents(self.shapes))

    report = assert_exact(llama, Dynamic(), steps=8)
    assert report.new_tokens == [NEW] * 3 and report.accepted_lengths[5] > 0 and report.accepted_lengths[3] > 0


class Window(Knowing):
    """Shaped like a lookahead block: a window that sees more than its ancestors and is never accepted, and draft tokens."""

    topology = Topology(
        parents=(-1, -1, -1, -1, -1, 0, 5, 6, 0, 8),
        offsets=(0, 1, 2, 2, 3, 1, 2, 3, 1, 2),
        extra_visible=((), (0,), (0, 1), (0, 1), (0, 1, 2, 3), (), (), (), (), ()),
    )
    seen: list[Step]

    def start(self, context: Context) -> Tensor:
        self.seen = []
        return super().start(context)

    def propose(self, state: Tensor, sequences: Sequences) -> Draft:
        right = self.ahead(state, sequences, 3)
        window = right[:, [0, 1, 2, 2]]  # right tokens, which must not be accepted all the same
        return Draft(torch.cat([window, right, (right[:, :2] + 1) % VOCAB], dim=1), self.topology)

    def observe(self, state: Tensor, step: Step) -> None:
        self.seen.append(step)


def test_a_window_that_is_never_accepted_changes_nothing(llama: PreTrainedModel) -> None:
    window = Window()
    assert_exact(llama, window, steps=6)
    for step in window.seen:
        depth = torch.arange(step.nodes.shape[1])
        accepted = torch.where((depth >= 1) & (depth <= step.accepted[:, None]), step.path, 5)
        assert (accepted >= 5).all(), "only nodes 5 and up may be accepted"


def test_a_window_gets_logits_for_what_it_sees(llama: PreTrainedModel) -> None:
    """Node 1 sees the root, node 2 also node 1: that is plain text, whose logits are known."""
    window = Window()
    decode(llama, prompts(1), window, max_new_tokens=6, **EAGER)
    step = window.seen[0]
    with torch.no_grad():
        plain = llama(torch.cat([prompts(1)["input_ids"], step.nodes[:, 1:3]], dim=1)).logits[0, P - 1 :]
    torch.testing.assert_close(step.logits[0, :3], plain, atol=2e-4, rtol=1e-4)


def test_observe_is_told_what_became_of_the_draft(llama: PreTrainedModel) -> None:
    steps: list[tuple[Step, Tensor]] = []

    class Watching(Chain):
        def observe(self, state: Tensor, step: Step) -> None:
            steps.append((step, step.sequences.length.clone()))

    out = decode(llama, prompts(2), Watching(4), max_new_tokens=13, **EAGER).sequences[:, P:]
    done = torch.zeros(2, dtype=torch.int64)
    start = prompts(2)["attention_mask"].sum(1)
    for step, length in steps:
        for row in range(2):
            new = [int(step.chosen[row, node]) for node in step.path[row, : int(step.emitted[row])]]
            at = int(done[row])
            assert out[row, at : at + len(new)].tolist() == new
        assert (step.accepted <= step.emitted).all()
        done += step.emitted
        assert torch.equal(length, start + done)
        assert step.logits.shape == (*step.nodes.shape, VOCAB) and step.hidden.shape[:2] == step.nodes.shape
        assert step.logits.argmax(-1).tolist() == step.chosen.tolist()
    assert done.tolist() == [13, 13]


class First(Chain):
    """Half of the answer: right for the first two tokens."""

    name = "first"

    def __init__(self) -> None:
        super().__init__(2)
        self.seen: list[Step] = []

    def observe(self, state: Tensor, step: Step) -> None:
        self.seen.append(step)


class Second(First):
    """A bush: a wrong branch, then the right one, longer than `First`'s."""

    name = "second"

    def propose(self, state: Tensor, sequences: Sequences) -> Draft:
        right = self.ahead(state, sequences, 4)
        return Draft.branches(torch.stack([(right + 1) % VOCAB, right], dim=1))


def test_merged_drafters_verify_one_tree_and_see_their_own_nodes_first(llama: PreTrainedModel) -> None:
    first, second = First(), Second()
    report = assert_exact(llama, Merged([first, second]), steps=6)
    assert report.strategy == "first+second" and report.nodes == 1 + 2 + 8
    first.seen.clear()
    second.seen.clear()
    decode(llama, prompts(2), Merged([first, second]), max_new_tokens=NEW, **EAGER)
    done = prompts(2)["attention_mask"].sum(1)
    known = answers(2)
    for mine, other in zip(first.seen, second.seen, strict=True):
        right = known.gather(1, done[:, None] + torch.arange(4))
        assert torch.equal(mine.nodes[:, 1:3], right[:, :2])
        assert torch.equal(other.nodes[:, 1:5], (right + 1) % VOCAB) and torch.equal(other.nodes[:, 5:9], right)
        # The longest right branch is the second's nodes 5 to 8; the first sees them behind its own two.
        full = mine.accepted == 4
        assert torch.equal(other.path[full, :5], torch.tensor([0, 5, 6, 7, 8]).expand(int(full.sum()), 5))
        assert torch.equal(mine.path[full, :5], torch.tensor([0, 7, 8, 9, 10]).expand(int(full.sum()), 5))
        assert torch.equal(mine.chosen[:, 0], other.chosen[:, 0])
        done = done + mine.emitted


def test_a_merged_tree_keeps_to_its_node_budget(llama: PreTrainedModel) -> None:
    report = assert_exact(llama, Merged([First(), Second()], MergedSettings(nodes=6)))
    assert report.nodes == 6


def test_merging_with_a_drafter_that_proposes_nothing(llama: PreTrainedModel) -> None:
    options = dict(max_new_tokens=NEW, **EAGER)
    alone = decode(llama, prompts(3), "prompt_lookup", **options)
    for name in ("prompt_lookup+autoregressive", "autoregressive+prompt_lookup"):
        merged = decode(llama, prompts(3), name, **options)
        assert torch.equal(merged.sequences, alone.sequences)
        assert merged.report.steps == alone.report.steps and merged.report.strategy == name
