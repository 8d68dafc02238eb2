"""A strategy that says it can rest: left out of steps, and shown what became of other nodes than its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..strategy import Context, Draft, Sequences, Step, Strategy
from .conditions import Conditions, run
from .exactness import assert_same_tokens, prompts, reference


class Resting(Strategy):
    """Asks `inner` in two steps of four, and verifies the first half of what it drafts, or nothing of it, or a token of its own."""

    name = "resting"

    def __init__(self, inner: Strategy) -> None:
        super().__init__()
        self.inner = inner
        self.needs_assistant, self.needs_grammar = inner.needs_assistant, inner.needs_grammar

    def finish(self, state: dict[str, Any]) -> None:
        self.inner.finish(state["inner"])

    def start(self, context: Context) -> dict[str, Any]:
        return {"inner": self.inner.start(context), "step": 0, "own": None}

    def propose(self, state: dict[str, Any], sequences: Sequences) -> Draft:
        state["step"] += 1
        turn, state["own"] = state["step"] % 4, 0
        if turn in (1, 2):
            self.inner.limit(state["inner"], turn)
            draft = self.inner.propose(state["inner"], sequences)
            if turn == 1:
                kept = draft.tokens.shape[1] // 2
                state["own"] = kept + 1
                return draft.head(kept)
        if turn == 3:
            return Draft.chain(sequences.last)
        return Draft.nothing(len(sequences.length), sequences.length.device)

    def observe(self, state: dict[str, Any], step: Step) -> None:
        missed = self.inner.misses_steps and state["step"] % 4 in (3, 0)
        if self.inner.observes and not missed:
            self.inner.observe(state["inner"], replace(step, own_nodes=state["own"]))

    def details(self, state: dict[str, Any]) -> Mapping[str, Any]:
        return self.inner.details(state["inner"])


def check_rests(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """One that says it `rests` can be left out of steps, and be shown steps with other nodes than its own, as ``auto`` does: its
    hooks do not mind, and the tokens are the same.
    """
    if (strategy.observes and not strategy.rests) or not strategy.exact:
        return
    if strategy.reads_layers:  # auto leaves such out
        return
    name, inputs = conditions.models[0], prompts(3)
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model, torch.no_grad():
        expected = reference(model, inputs, max_new_tokens=16)
        out = run(model, name, Resting(strategy), inputs, eager, max_new_tokens=16)
        assert_same_tokens(model, inputs, expected.sequences, out.sequences, "left out of every other step")
        out = run(
            model, name, strategy, inputs, eager, max_new_tokens=16, decoders_config={"compile": False, "prune": True}
        )
        assert_same_tokens(model, inputs, expected.sequences, out.sequences, "with what is not worth its time left out")
