"""What is compiled for CUDA compiles there, and gives what it gives uncompiled: the noise's 64 bits stay 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decoders.engine.decode.rules import draw
from decoders.engine.decode.verify import settle
from decoders.engine.model.compiled import regions
from decoders.engine.model.self_check import target_of
from decoders.heads.medusa import HeadsConfig, MedusaHeads
from decoders.sampling import SamplingInputs, SamplingPlan, candidates, gumbel_noise
from decoders.sampling.prefixes import READ_TEXT, Prefixes
from decoders.sampling.processors import process, row_keys
from decoders.sampling.top import MOST_OF_TOP_K
from decoders.strategies.lookahead import first_window
from decoders.strategies.medusa import draft_tokens
from decoders.testing.models import tiny_model
from decoders.tree import Topology, TreeTensors
from decoders.verifiers import BUILT_IN, Block, Outcomes

from .triton_code import needs_the_interpreter, run_as_triton_code, same, written_for_triton

CPU = torch.device("cpu")
VOCAB = 40
TREE = Topology.branches(2, 2)
PLANS = {
    "greedy": SamplingPlan(),
    "temperature, top_k, top_p": SamplingPlan(("temperature", "top_k", "top_p"), sample=True),
    "min_p": SamplingPlan(("min_p",), sample=True),
    "typical_p": SamplingPlan(("typical_p",), sample=True),
    "min_new_tokens": SamplingPlan(("min_new_tokens",), sample=True),
}
VALUES = {"temperature": 0.7, "top_k": 9.0, "top_p": 0.1, "min_p": 0.1, "typical_p": 0.8, "min_new_tokens": 2.0}


@pytest.fixture(autouse=True)
def interpreter() -> None:
    needs_the_interpreter()


def inputs_of(plan: SamplingPlan, rows: int) -> SamplingInputs:
    values = torch.tensor([VALUES[name] for name in plan.operations] or [0.0])
    return SamplingInputs(values, row_keys(5, rows, CPU), torch.tensor([3, -1]))


def scores_of(*shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))


def chosen_from(logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor) -> Tensor:
    return candidates(logits, plan, inputs, positions).choose(plan, inputs, positions)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("positions", ["given", "index", "constant"])
@pytest.mark.in_turns
def test_noise_is_the_same(positions, dynamic, tmp_path):
    def noise(keys: Tensor, given: Tensor) -> Tensor:
        index = {"given": given, "index": torch.arange(3).expand(2, 3), "constant": torch.full((2, 3), -2)}[positions]
        return gumbel_noise(keys, index, VOCAB)

    arguments = row_keys(7, 2, CPU), torch.tensor([[0, 1, 1], [4, 5, 100_000]])
    # One wrong bit of the hash is another number altogether.
    torch.testing.assert_close(run_as_triton_code(tmp_path, noise, *arguments, dynamic=dynamic), noise(*arguments))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if plan.sample else name for name, plan in PLANS.items()]
)
def test_choice_is_the_same(name, tmp_path):
    plan, positions = PLANS[name], torch.tensor([[0, 1], [5, 6]])
    arguments = scores_of(2, 2, VOCAB), plan, inputs_of(plan, 2), positions
    assert same(run_as_triton_code(tmp_path, chosen_from, *arguments), chosen_from(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("names", ["temperature, top_k, top_p", "top_p", "typical_p"])
def test_what_is_left_of_a_large_vocabulary_is_the_same(names, tmp_path):
    plan = SamplingPlan(tuple(names.split(", ")), sample=True)
    arguments = scores_of(1, 2, MOST_OF_TOP_K + 9), plan, inputs_of(plan, 1), torch.tensor([[0, 1]])
    assert same(run_as_triton_code(tmp_path, process, *arguments), process(*arguments))


@pytest.mark.parametrize(
    "names",
    ["repetition_penalty, no_repeat_ngram", pytest.param(", ".join(READ_TEXT), marks=pytest.mark.slow)],
)
def test_what_the_text_leaves_is_the_same(names, tmp_path):
    generator = torch.Generator().manual_seed(2)
    plan, tree = SamplingPlan(tuple(names.split(", "))), TREE.tensors(2, CPU)
    count = len(plan.operations)
    inputs = SamplingInputs(
        torch.tensor([{"no_repeat_ngram": 2.0, "suppress_at": 9.0, "forced_tokens": 10.0}.get(n, 1.3) for n in plan.operations]),
        row_keys(5, 2, CPU), torch.tensor([3, -1]), torch.randint(4, (count, 8, 4), generator=generator).sort(1).values,
        torch.linspace(-1, 1, 8).expand(count, 8).clone(), torch.tensor([[-1, -1], [-1, 0]]),
    )  # fmt: skip
    tokens, nodes = (
        torch.randint(4, (2, 20), generator=generator),
        torch.randint(4, (2, len(TREE)), generator=generator),
    )
    lengths = torch.tensor([20, 13])
    nodes[:, 0] = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    prefixes = Prefixes(
        tokens, lengths, lengths - 9, nodes, tree.offsets, tree.visible, torch.tensor([[-1, -1], [-1, 0]])
    )
    arguments = scores_of(2, len(TREE), VOCAB), plan, inputs, 9 + tree.offsets, None, prefixes
    assert same(run_as_triton_code(tmp_path, process, *arguments), process(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_medusas_draft_tokens_are_the_same(dynamic, tmp_path):
    heads = MedusaHeads(HeadsConfig(heads=3, layers=1, hidden_size=8, vocab_size=VOCAB), scores_of(VOCAB, 8))
    plan = SamplingPlan(("temperature",), sample=True)
    positions = torch.tensor([[7], [9]]) + torch.arange(3)
    arguments = (scores_of(2, 8), positions, heads.weights(), scores_of(VOCAB, 8), None, plan, inputs_of(plan, 2), 5)
    with torch.no_grad():
        drawn, _ = run_as_triton_code(tmp_path, draft_tokens, *arguments, dynamic=dynamic)
        assert same(drawn, draft_tokens(*arguments)[0])


def test_lookaheads_first_window_is_the_same(tmp_path):
    tokens, length = torch.arange(60).view(2, 30), torch.tensor([19, 30])
    expected = first_window(tokens, length, 4, 3)
    assert same(run_as_triton_code(tmp_path, first_window, tokens, length, 4, 3), expected)


def test_accepted_paths_and_appended_tokens_are_the_same(tmp_path):
    tree = TREE.tensors(2, CPU)
    nodes = torch.tensor([[1, 2, 3, 4, 5], [6, 7, -1, 8, 9]])
    chosen = torch.tensor([[4, 0, 0, 5, 11], [7, 12, 0, 0, 0]])

    def settled(*rows: Tensor) -> tuple[Tensor, ...]:
        return (*settle(nodes, chosen, tree, *rows), *rows[:4])  # the rows are written in place

    def rows() -> tuple[Tensor, ...]:
        tokens, finished = torch.zeros(2, 20, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
        return tokens, torch.tensor([3, 4]), torch.tensor([15, 15]), finished, torch.tensor([[12, -1], [12, -1]])

    assert same(run_as_triton_code(tmp_path, settled, *rows()), settled(*rows()))


def drawn(nodes: Tensor, tree: TreeTensors, outcomes: Outcomes, keys: Tensor) -> tuple[Tensor, ...]:
    acceptance, last, sound = draw(nodes, tree, outcomes, keys)
    return acceptance.path, acceptance.depth, last, sound


@pytest.mark.slow
def test_what_is_drawn_of_outcomes_is_the_same(tmp_path):
    nodes = torch.tensor([[1, 2, 3, 4, 5], [6, 7, -1, 8, 9]])
    outcomes = Outcomes(scores_of(2, 5).softmax(-1), scores_of(2, 5, VOCAB).softmax(-1))
    arguments = nodes, TREE.tensors(2, CPU), outcomes, row_keys(5, 2, CPU)
    assert same(run_as_triton_code(tmp_path, drawn, *arguments), drawn(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILT_IN)
def test_what_verifiers_let_through_is_the_same(kind, tmp_path):
    topology = TREE if kind.trees else Topology.chain(2)
    tree, n, siblings, verifier = topology.tensors(2, CPU), len(topology), topology.max_siblings, kind()
    nodes = torch.randint(0, 6, (2, n), generator=torch.Generator().manual_seed(0))

    def judged(keys: Tensor, nodes: Tensor, target: Tensor, draft: Tensor) -> tuple[Tensor, ...]:
        return drawn(nodes, tree, verifier.outcomes(Block(nodes, tree, target, draft, siblings)), keys)

    arguments = row_keys(5, 2, CPU), nodes, scores_of(2, n, 6).softmax(-1), scores_of(2, n - 1, 6).softmax(-1)
    assert same(run_as_triton_code(tmp_path, judged, *arguments), judged(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_forward_passes_are_the_same(name, tmp_path):
    target = target_of(tiny_model(name))
    forward = regions.regional_forward(target)

    def arguments() -> tuple[Any, ...]:
        torch.manual_seed(0)
        nodes, base, tree, buffers, view, kept = regions.examples(target, 2, 5)
        return nodes, base, tree, buffers, view, kept

    with torch.no_grad(), written_for_triton(tmp_path) as sources:
        forward.compile(*arguments())
        ours, theirs = arguments(), arguments()
        results = zip(forward(*ours), forward.function(*theirs), strict=True)
    assert forward.regional and sources
    for result, expected in (*results, *zip(ours[3].tensors, theirs[3].tensors, strict=True)):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
