"""Lookahead decoding: the block as drawn by hand, and every step against plain Python."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import decoders
from decoders.enabling import graphs_compiled
from decoders.engine.model.compiled.functions import CompiledFunction
from decoders.errors import SettingsError
from decoders.sampling.processors import gumbel_noise, row_keys
from decoders.strategies import Lookahead, PromptLookup
from decoders.strategies.lookahead import BlockShape, advance_for, lookahead_block
from decoders.strategies.merged import Merged, MergedSettings
from decoders.strategy import Step, Strategy
from decoders.testing import assert_same_tokens, decode, prompts, tiny_model

EAGER = {"compile": False}
SAMPLING = dict(do_sample=True, seed=5, temperature=0.7, top_k=0)
NEW = 48


@functools.cache
def enabled(name: str = "llama") -> PreTrainedModel:
    return decoders.enable(tiny_model(name))


class Recorded(Lookahead):
    """Keeps what every step committed and accepted, per row."""

    def start(self, context):
        self.emitted: list[list[int]] = []
        self.accepted: list[list[int]] = []
        return super().start(context)

    def observe(self, state, step: Step) -> None:
        self.emitted.append(step.emitted.tolist())
        self.accepted.append(step.accepted.tolist())
        super().observe(state, step)


# --- the block --------------------------------------------------------------------------------------------------------

#: W = 3, N = 3, G = 2. Rows see columns; a: level 0 (a0 is the root), b: level 1, g and h: two candidates of two tokens.
DRAWN = """
       a0 a1 a2  b0 b1 b2  g1 g2  h1 h2    position
a0     #  .  .   .  .  .   .  .   .  .     0
a1     #  #  .   .  .  .   .  .   .  .     1
a2     #  #  #   .  .  .   .  .   .  .     2
b0     #  .  .   #  .  .   .  .   .  .     1
b1     #  #  .   .  #  .   .  .   .  .     2
b2     #  #  #   .  .  #   .  .   .  .     3
g1     #  .  .   .  .  .   #  .   .  .     1
g2     #  .  .   .  .  .   #  #   .  .     2
h1     #  .  .   .  .  .   .  .   #  .     1
h2     #  .  .   .  .  .   .  .   #  #     2
"""


def test_mask_and_positions_are_those_drawn_by_hand():
    block = lookahead_block(window=3, ngram=3, candidates=2)
    drawn = [line.split()[1:] for line in DRAWN.strip().splitlines()[1:]]
    visible = block.tensors(1, torch.device("cpu")).visible[0].tolist()
    assert [["#" if seen else "." for seen in row] for row in visible] == [row[:-1] for row in drawn]
    assert list(block.offsets) == [int(row[-1]) for row in drawn]
    assert block.parents == (-1, -1, -1, -1, -1, -1, 0, 6, 0, 8)


# --- plain Python -----------------------------------------------------------------------------------------------------


def scrambled(number: int) -> int:
    """splitmix64's finaliser, as a signed number."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    number ^= number >> 31
    return number - 2**64 if number >= 2**63 else number


class Reference:
    """Lookahead decoding of one row with lists; every step is a forward pass over the whole text and the block."""

    def __init__(self, model: PreTrainedModel, lookahead: Lookahead, prompt: list[int], key: Tensor | None) -> None:
        s = lookahead.settings
        self.model, self.settings, self.key, self.prompt, self.text = model, s, key, len(prompt), list(prompt)
        cells = [
            [prompt[scrambled(j * s.window + i + 1) % len(prompt)] for i in range(s.window)] for j in range(s.ngram - 1)
        ]
        self.levels: list[list[int]] = cells
        self.pool: list[tuple[int, ...]] = []
        if s.seed_from_prompt:
            self.store(self.written(len(prompt))[: s.capacity])

    def written(self, count: int) -> list[tuple[int, ...]]:
        """The n-grams that end in the last `count` tokens, latest first."""
        n, text = self.settings.ngram, self.text
        return [tuple(text[end - n : end]) for end in range(len(text), len(text) - count, -1) if end >= n]

    def store(self, new: list[tuple[int, ...]]) -> None:
        kept: list[tuple[int, ...]] = []
        for ngram in new + self.pool:
            if ngram not in kept and sum(ngram[0] == other[0] for other in kept) < self.settings.candidates:
                kept.append(ngram)
        self.pool = kept[: self.settings.capacity]

    def step(self, room: int) -> int:
        """Writes up to `room` tokens; returns how many."""
        s, root = self.settings, self.text[-1]
        self.levels[0][0] = root
        candidates = [ngram[1:] for ngram in self.pool if ngram[0] == root][: s.candidates]
        window = [("window", j, i) for j in range(s.ngram - 1) for i in range(s.window)]
        proposed = [("candidate", g, t) for g in range(len(candidates)) for t in range(s.ngram - 1)]
        tokens = [self.levels[j][i] for _, j, i in window] + [candidates[g][t] for _, g, t in proposed]
        offsets = [j + i for _, j, i in window] + [t + 1 for _, _, t in proposed]
        chosen = dict(zip(window + proposed, self.forward(window + proposed, tokens, offsets), strict=True))

        best: list[int] = [chosen["window", 0, 0]]
        for g, candidate in enumerate(candidates):
            out = [chosen["window", 0, 0]]
            for t, token in enumerate(candidate):
                if token != out[-1]:
                    break
                out.append(chosen["candidate", g, t])
            best = max(best, out, key=len)
        self.text += best[:room]

        columns = [*self.levels, [chosen["window", s.ngram - 2, i] for i in range(s.window)]]
        new = self.written(min(len(best[:room]), s.ngram)) if s.keep_output else []
        self.store(new + [tuple(level[i] for level in columns) for i in range(s.window)])
        self.levels = [list(level) for level in columns[1:]]
        return len(best[:room])

    def forward(self, nodes: list[tuple[str, int, int]], tokens: list[int], offsets: list[int]) -> list[int]:
        """The target's token after each node."""
        past = len(self.text) - 1
        sees = torch.ones(past + len(nodes), past + len(nodes)).tril().bool()
        for q, node in enumerate(nodes):
            for k, other in enumerate(nodes):
                sees[past + q, past + k] = self.sees(node, other)
        mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
        positions = torch.tensor([[*range(past), *(past + offset for offset in offsets)]])
        ids = torch.tensor([self.text[:-1] + tokens])
        with torch.no_grad():
            logits = self.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0, past:]
        if self.key is not None:
            at = torch.tensor([offset + len(self.text) - self.prompt for offset in offsets])
            logits = logits / SAMPLING["temperature"] + gumbel_noise(self.key, at[None], logits.shape[-1])[0]
        return logits.argmax(-1).tolist()

    def sees(self, node: tuple[str, int, int], other: tuple[str, int, int]) -> bool:
        (kind, a, b), (other_kind, x, y) = node, other
        if kind == "candidate":
            return other == ("window", 0, 0) or (other_kind == kind and x == a and y <= b)
        return other_kind == kind and ((x == 0 and y <= b) or (y == b and x <= a))


SHAPES = [
    Lookahead(window=3, ngram=3, candidates=2),
    Lookahead(window=5, ngram=4, candidates=3, keep_output=False),
    Lookahead(window=4, ngram=2, candidates=4, seed_from_prompt=False),
    Lookahead(window=2, ngram=5, candidates=2, capacity=16),
    Lookahead(window=6, ngram=3, candidates=3, seed_from_prompt=False, keep_output=False),
]


def shape_of(strategy: Lookahead) -> str:
    s = strategy.settings
    return f"W{s.window} N{s.ngram} G{s.candidates}"


@pytest.mark.in_turns
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_of)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_step_is_that_of_plain_python(name, shape, sampling, rows):
    model, inputs, strategy = enabled(name), prompts(rows), Recorded(shape.settings)
    out = decode(model, inputs, strategy, max_new_tokens=NEW, decoders_config=EAGER, **sampling)
    keys = row_keys(SAMPLING["seed"], rows, torch.device("cpu"))
    for row in range(rows):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
        reference = Reference(model, strategy, prompt, keys[row : row + 1] if sampling else None)
        done, counts = 0, []
        while done < NEW:
            counts.append(reference.step(NEW - done))
            done += counts[-1]
        assert max(counts) > 1, "nothing was accepted, so nothing was tested"
        assert reference.text[len(prompt) :] == out.sequences[row, -NEW:].tolist()
        assert counts == [emitted[row] for emitted in strategy.emitted if emitted[row]], f"row {row}"


# --- in the loop ------------------------------------------------------------------------------------------------------


def test_the_token_after_a_full_match_is_never_lost():
    model, strategy = enabled("gpt2"), Recorded(window=3, ngram=3, candidates=2)
    decode(model, prompts(1), strategy, max_new_tokens=NEW, decoders_config=EAGER)
    assert [2] in strategy.accepted[:-1], "whole n-grams are accepted on this text"
    for accepted, emitted in zip(strategy.accepted[:-1], strategy.emitted[:-1], strict=True):
        assert emitted[0] == accepted[0] + 1


def test_window_alone_finds_ngrams():
    """Neither prompt nor output feed the pool: what is accepted comes from the Jacobi iteration."""
    strategy = Lookahead(window=6, ngram=3, candidates=3, seed_from_prompt=False, keep_output=False)
    out = decode(enabled("gpt2"), prompts(1), strategy, max_new_tokens=60, decoders_config=EAGER)
    assert out.report.mean_accepted_length > 1.5


class Untouched(LogitsProcessor):
    """Forces the choice to the host and changes nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def test_window_goes_on_when_processors_run_on_the_host():
    model, shape = enabled("gpt2"), Lookahead(window=4, ngram=3, candidates=3)
    options = dict(max_new_tokens=NEW, decoders_config=EAGER)
    plain = decode(model, prompts(1), shape, **options).report
    hosted = decode(model, prompts(1), shape, logits_processor=[Untouched()], **options).report
    assert hosted.accepted_lengths == plain.accepted_lengths


def test_report_counts_candidates_and_not_the_window():
    report = decode(enabled(), prompts(1), Lookahead(window=9, ngram=3, candidates=1), max_new_tokens=NEW,
                    decoders_config=EAGER).report  # fmt: skip
    assert report.nodes == 20
    assert report.accepted < report.drafted <= 2 * report.steps


def test_merged_budget_may_cut_candidates_but_not_the_window():
    model, lookahead = enabled("gpt2"), Lookahead(window=4, ngram=3, candidates=3)  # 8 nodes of window, 6 of candidates

    def merged(nodes: int, *parts: Strategy) -> Tensor:
        strategy = Merged(parts, MergedSettings(nodes=nodes))
        return decode(model, prompts(1), strategy, max_new_tokens=NEW, decoders_config=EAGER).sequences

    expected = decode(model, prompts(1), max_new_tokens=NEW).sequences
    assert torch.equal(merged(10, lookahead, PromptLookup()), expected)
    assert torch.equal(merged(16, PromptLookup(length=8), lookahead), expected)
    for nodes, parts in ((7, (lookahead, PromptLookup())), (9, (PromptLookup(length=8), lookahead))):
        with pytest.raises(SettingsError, match=f"lookahead needs 14 nodes.* {nodes} nodes leaves this strategy"):
            merged(nodes, *parts)


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the compiler's own
@pytest.mark.usefixtures("traced_only")
def test_the_update_is_traced_once():
    # As many rows as columns, candidates and tokens of an n-gram: none of these sizes may be taken for another.
    strategy, shape, generator = Lookahead(), BlockShape(3, 3, 3), torch.Generator().manual_seed(0)
    update = advance_for(3, 3, True)
    compiled, before = CompiledFunction(update), graphs_compiled()
    for rows, slots in ((3, 24), (2, 40), (3, 90)):
        tokens, length = torch.randint(9, (rows, slots), generator=generator), torch.arange(15, 15 + rows)
        block, pool = strategy._first(tokens, length, shape)
        nodes = torch.cat([tokens[:, :1], block], 1)
        chosen = torch.randint(-1, 9, nodes.shape, generator=generator)
        logits = torch.rand(*nodes.shape, 9, generator=generator)
        arguments = nodes, chosen, logits, tokens, length, torch.arange(1, 1 + rows)
        ours, plain = (block.clone(), pool.clone()), (block.clone(), pool.clone())
        compiled(*ours, *arguments)
        update(*plain, *arguments)
        assert all(map(torch.equal, ours, plain)) and not torch.equal(ours[0], block)
    assert graphs_compiled() - before == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("traced_only")
def test_a_second_call_traces_nothing():
    assert_a_second_call_compiles_nothing()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_second_call_compiles_nothing():
    assert_a_second_call_compiles_nothing()


def assert_a_second_call_compiles_nothing():
    # As many rows as columns, candidates and tokens of an n-gram: none of these sizes may be taken for another.
    model, strategy = decoders.enable(tiny_model("gpt2")), Lookahead(window=3, ngram=3, candidates=3)
    reports = []
    for rows, length in ((3, 24), (2, 40), (3, 90)):
        inputs = prompts(rows, length=length)
        expected = decode(model, inputs, max_new_tokens=NEW).sequences
        out = decode(model, inputs, strategy, max_new_tokens=NEW, decoders_config={"compile": True})
        assert_same_tokens(model, inputs, expected, out.sequences, f"compiled, {rows} rows")
        reports.append(out.report)
    first, *later = reports
    eager = decode(model, prompts(3), strategy, max_new_tokens=NEW, decoders_config=EAGER).report
    assert first.accepted_lengths == eager.accepted_lengths
    assert first.compiled and first.compilations == 2  # the core and the update
    assert first.timings.observe < first.timings.compile
    assert all(t >= 0 for t in (first.timings.propose, first.timings.observe))
    assert [report.compilations for report in later] == [0, 0]
