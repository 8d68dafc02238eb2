"""Checks that some draft tokens are accepted, and that draft tokens are drawn from ``Draft.scores``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..strategy import Strategy
from ..tree import Topology
from .conditions import Conditions, run
from .exactness import prompts
from .memory import parts_of
from .models import VOCAB
from .spy import Spy, SpyLog, spied
from .toy_grammar import TokenAutomaton

#: A strategy that drafts fewer tokens than this passes even without an accepted token.
FEWEST_DRAFTED = 64
#: Of this many steps with a draft, at least one must have an accepted token.
STEPS_PER_HIT = 50
#: Periods of the rows' texts, in tokens.
PERIODS = (1, 2, 3, 5)
#: Length of the periodic prompts: a multiple of all periods, so that each prompt continues with the first token of its period.
REPEATED = 30
#: An end-of-sequence token that occurs in no text.
STOP = 1


def check_draft_tokens_are_accepted(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """At least one in 50 steps with a draft has an accepted token.

    The texts are the kit's prompts, and periodic texts that grammars force. A strategy that drafts fewer than 64 tokens passes.
    """
    for part in parts_of(strategy):
        check_draft_tokens_are_accepted(part, conditions)
    name, drafted, steps, hits = conditions.models[0], 0, 0, 0
    inputs = prompts(len(PERIODS))
    stretches = [row[:period].tolist() for row, period in zip(inputs["input_ids"][:, -5:], PERIODS, strict=True)]
    ids = torch.tensor([stretch * (REPEATED // len(stretch)) for stretch in stretches])
    repeating = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    forced = [_forever(stretch) for stretch in stretches]
    for given, options in ((repeating, dict(grammar=forced, eos_token_id=STOP)), (inputs, {})):
        spy = Spy(strategy)
        with conditions.enabled(name) as model:
            report = run(model, name, spy, given, conditions, **options).report
        hits += sum(report.accepted_lengths[1:])
        for seen in spy.seen:
            proposed = (seen.draft.tokens >= 0)[~torch.tensor(seen.finished)]
            drafted, steps = drafted + int(proposed.sum()), steps + int(proposed.any(1).sum())
        if hits * STEPS_PER_HIT > steps:
            return
    assert drafted < FEWEST_DRAFTED, (
        f"{drafted} tokens were drafted in {steps} steps of rows, and {hits} of these steps had an accepted token: {strategy.name!r} "
        "is hardly ever right, not even if the text repeats itself"
    )


def _forever(tokens: list[int]) -> TokenAutomaton:
    """A grammar that forces `tokens`, repeated without end."""
    states = [{token: 2 + (place + 1) % len(tokens)} for place, token in enumerate(tokens)]
    return TokenAutomaton(states, set(), VOCAB, [STOP])


#: ROWS: greatest number of rows in a batch. NODES: greatest number of nodes of a step, over all rows. TOKENS: new tokens of each row.
ROWS, NODES, TOKENS = 256, 4096, 6
#: Number of bins of equal probability for the chi-square test of the draws.
BINS = 24
#: Greatest accepted deviation, in standard deviations. By chance, it is exceeded once in ten million cases.
MOST_DEVIATIONS = 5.2
#: A verifier of chains and trees that uses scores. On a chain it equals "rejection".
VERIFIER = "tree_rejection"


def check_draft_scores(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """``Draft.scores`` are float32 ``[B, N-1, V]`` without NaN, and draft tokens are drawn from them.

    With a verifier that uses scores, the output follows the target's distribution. Strategies that have no scores, or that do not
    support the verifier, pass.
    """
    for part in parts_of(strategy):
        check_draft_scores(part, conditions)
    inputs = prompts(1, length=12)
    name, spy = conditions.models[0], spied(strategy)
    options: dict[str, Any] = dict(do_sample=True, temperature=0.9, top_k=50, seed=5, verifier=VERIFIER)
    with conditions.enabled(name) as model:
        try:
            run(model, name, spy, _rows(inputs, 2), conditions, max_new_tokens=TOKENS, **options)
            if all(seen.draft.scores is None for seen in spy.seen):
                return
            inputs = _rows(inputs, min(ROWS, NODES // max(len(seen.draft.topology) for seen in spy.seen)))
            out = run(model, name, spy, inputs, conditions, max_new_tokens=TOKENS, output_scores=True, **options)
        except UnsupportedError:
            return
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([_drawn(seen, generator) for seen in spy.seen])
    _assert_uniform(drawn, f"the draft tokens of {strategy.name!r} are not drawn from Draft.scores")
    tokens = out.sequences[:, inputs["input_ids"].shape[1] :].cpu()
    target = torch.stack(out.scores, 1).softmax(-1).cpu()
    _assert_uniform(
        _ranks(target, tokens, generator).flatten(),
        f"with {strategy.name!r} tokens do not follow the target under verifier={VERIFIER!r}, though exact = {strategy.exact}",
    )


def _rows(inputs: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The single row of `inputs`, repeated `count` times."""
    return {key: tensor.expand(count, -1) for key, tensor in inputs.items()}


def _drawn(seen: SpyLog, generator: torch.Generator) -> Tensor:
    """The quantile of each drawn token in its distribution, ``[draws]``, see :func:`_ranks`.

    Only children of the root, of its first child, of the first child's first child and so on are included. Tokens below other nodes may
    be copies of these draws, and not independent.
    """
    draft = seen.draft
    if draft.scores is None:
        return torch.empty(0)
    tree, going = draft.topology, ~torch.tensor(seen.finished)
    if isinstance(tree, Topology):
        tree = tree.tensors(len(going), torch.device("cpu"))
    parents, candidate = tree.parents.cpu()[going], tree.candidates.cpu()[going]
    tokens, q = draft.tokens.cpu()[going], draft.scores.cpu()[going].softmax(-1)
    vocabulary = torch.arange(q.shape[-1])
    rows, ranks = torch.arange(len(tokens)), []
    spine = torch.zeros(len(tokens), 1, dtype=torch.int64)  # in each row, the node whose children are counted
    taken = torch.zeros_like(q[:, 0], dtype=torch.bool)  # tokens of earlier siblings
    eldest = torch.full_like(spine[:, 0], -1)
    for node in range(1, parents.shape[1]):
        token, own = tokens[:, node - 1], q[:, node - 1]
        deeper = (parents[:, node] == eldest) & (eldest > 0)
        spine = torch.where(deeper[:, None], eldest[:, None], spine)
        taken = taken & ~deeper[:, None]
        eldest = torch.where(deeper, -1, eldest)
        counted = candidate[:, node] & (parents[:, node] == spine[:, 0]) & (token >= 0)
        left = own.masked_fill(taken, 0.0)
        left = left / left.sum(-1, keepdim=True)
        mass = left[rows, token.clamp(min=0)]
        # Tokens that an earlier sibling also has are left out, and so are (almost) certain tokens.
        first = counted & ~taken[rows, token.clamp(min=0)]
        assert not (first & (mass == 0)).any(), (
            "a draft token has probability 0 in Draft.scores: it was not drawn from them, and is never accepted"
        )
        drawn = first & (left.amax(-1) <= 0.999)
        if drawn.any():
            ranks.append(_ranks(left[drawn], token[drawn], generator))
        taken = taken | (counted[:, None] & (vocabulary == token[:, None]))
        eldest = torch.where(counted & (eldest < 0), node, eldest)
    return torch.cat(ranks) if ranks else torch.empty(0)


def _ranks(distribution: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """For each token, the total probability of likelier tokens plus a random share of its own probability, ``[…]``.

    If the tokens were drawn from `distribution`, the result is uniform in 0 … 1.

    Args:
        distribution: ``[…, V]``.
        tokens: ``[…]`` int64.
    """
    own = distribution.gather(-1, tokens[..., None])
    index = torch.arange(distribution.shape[-1])
    before = (distribution > own) | ((distribution == own) & (index < tokens[..., None]))
    share = torch.rand(own.shape, generator=generator)
    return (torch.where(before, distribution, 0.0).sum(-1, keepdim=True) + share * own)[..., 0]


def _assert_uniform(values: Tensor, otherwise: str) -> None:
    """Raises AssertionError with the message `otherwise` if `values`, ``[draws]`` in 0 … 1, fail a chi-square test of uniformity."""
    draws = len(values)
    if draws < 10 * BINS:
        return
    counts = torch.bincount((values.double() * BINS).long().clamp(0, BINS - 1), minlength=BINS).double()
    expected, free = draws / BINS, BINS - 1
    square = float(((counts - expected) ** 2).sum()) / expected
    # The cube root of a chi-square is nearly normal (Wilson & Hilferty).
    deviations = ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    distance = float((counts / draws - 1 / BINS).abs().sum()) / 2
    chance = math.sqrt((BINS - 1) / (2 * math.pi * draws))
    assert deviations < MOST_DEVIATIONS, (
        f"{otherwise}: total variation is {distance:.3f} in {draws} draws, and {chance:.3f} by chance"
    )
