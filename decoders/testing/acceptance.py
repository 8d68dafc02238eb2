"""Some draft tokens are accepted: that none is, no comparison of tokens shows."""

from __future__ import annotations

import torch

from ..strategy import Strategy
from .conditions import Conditions, run
from .exactness import prompts
from .memory import parts_of
from .models import VOCAB
from .spy import Spy
from .toy_grammar import TokenAutomaton

#: A strategy that drafts fewer tokens than this is not judged.
FEWEST_DRAFTED = 64
#: Of so many steps with a draft at least one must have a token accepted.
STEPS_PER_HIT = 50
#: What the rows repeat: one token, two, three and five.
PERIODS = (1, 2, 3, 5)
#: Length of these prompts; a multiple of all periods, so that the text goes on with its first token.
REPEATED = 30
#: An end-of-sequence token that no text holds.
STOP = 1


def check_draft_tokens_are_accepted(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Some draft tokens are right: in one of 50 steps with a draft, on texts that grammars force to repeat themselves and on the
    kit's usual ones. A strategy that drafts fewer than 64 tokens there is not judged.
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
        f"{drafted} tokens were drafted in {steps} steps of the rows, of which {hits} had one accepted: {strategy.name!r} is "
        "never right, not even where the text repeats itself"
    )


def _forever(tokens: list[int]) -> TokenAutomaton:
    """The grammar of one text: `tokens`, over and over."""
    states = [{token: 2 + (place + 1) % len(tokens)} for place, token in enumerate(tokens)]
    return TokenAutomaton(states, set(), VOCAB, [STOP])
