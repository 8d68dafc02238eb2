"""Checks of a strategy as a part of a merged strategy, when it is left out of steps, and when rows join and leave in a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import SettingsError
from ..registry import registry
from ..scheduling.scheduler import Scheduler
from ..strategies.merged import Merged, MergedSettings
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import MAX_NODES
from .conditions import Conditions, needs, run, run_alike
from .exactness import assert_same_tokens, prompts, reference
from .memory import parts_of
from .spy import Spy, spied

#: Strategies that need no model and are often right. A strategy is merged with the first partner that it does not contain.
PARTNERS = ("prompt_lookup", "ngram", "lookahead")


def check_merged(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """As first or last part of a merged strategy, the strategy passes the checks of ``Spy``, and the tokens stay the same.

    The same holds if the merged tree has no room for most of the strategy's draft.
    """
    parts = parts_of(strategy) or (strategy,)
    free = [name for name in PARTNERS if name not in {part.name for part in parts}]
    if not free:
        return
    partner = registry().strategy(free[0])()
    name, inputs = conditions.models[0], prompts(3)
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model:
        for order, nodes in (((partner, *parts), MAX_NODES), ((*parts, partner), MAX_NODES), ((*parts, partner), 3)):
            merged = Merged(order, MergedSettings(nodes=nodes))
            what = f"as {merged.name} with room for {nodes} nodes"
            try:
                run_alike(model, name, spied(merged), inputs, eager, what, max_new_tokens=16)
            except SettingsError:
                if nodes == MAX_NODES:
                    raise
                # Nodes that are not draft tokens, such as lookahead's window, cannot be left out.


class Resting(Strategy):
    """Uses `inner` as ``auto`` does: not in every step, and not with its whole draft. The following four steps are repeated.

    Step 1: drafts nothing. Step 2: drafts the first half of a draft of `inner`. Step 3: asks `inner` for a draft, and drafts nothing.
    Step 4: drafts a token that is not from `inner`.
    """

    name = "resting"

    def __init__(self, inner: Strategy) -> None:
        super().__init__()
        self.inner = inner
        self.needs_assistant, self.needs_grammar = inner.needs_assistant, inner.needs_grammar

    def finish(self, state: dict[str, Any]) -> None:
        self.inner.finish(state["inner"])

    def start(self, context: Context) -> dict[str, Any]:
        return {"inner": self.inner.start(context), "step": 0, "own": 0}

    def propose(self, state: dict[str, Any], sequences: Sequences) -> Draft:
        state["step"] += 1
        turn, state["own"] = state["step"] % 4, 0
        if turn in (2, 3):
            self.inner.limit(state["inner"], turn - 1)
            draft = self.inner.propose(state["inner"], sequences)
            if turn == 2:
                kept = draft.tokens.shape[1] // 2
                state["own"] = kept + 1
                return draft.head(kept)
        if turn == 0:
            return Draft.chain(sequences.last)
        return Draft.nothing(len(sequences.length), sequences.length.device)

    def observe(self, state: dict[str, Any], step: Step) -> None:
        missed = self.inner.misses_steps and state["step"] % 4 in (0, 1)
        if self.inner.observes and not missed:
            self.inner.observe(state["inner"], replace(step, own_nodes=state["own"]))

    def details(self, state: dict[str, Any]) -> Mapping[str, Any]:
        return self.inner.details(state["inner"])


def check_rests(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """A strategy that `rests` or has no `observe` writes the same tokens if its drafts are skipped, cut or replaced (``auto``)."""
    if (strategy.observes and not strategy.rests) or not strategy.exact:
        return
    name, inputs = conditions.models[0], prompts(3)
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model, torch.no_grad():
        if not (strategy.reads_layers or strategy.reads_prompt):  # `Resting` forwards neither layers nor prompts
            what = "with drafts skipped, cut and replaced"
            run_alike(model, name, Resting(strategy), inputs, eager, what, max_new_tokens=16)
        loop = {"compile": False, "prune": True}
        what = "with draft tokens left out"
        run_alike(model, name, strategy, inputs, eager, what, max_new_tokens=16, decoders_config=loop)


#: Number of new tokens of each request. Requests end at different times, and waiting requests then take their rows.
NEW_TOKENS = (6, 17, 3, 12, 9)
#: Share of drafts that may differ, because rounding can change the order of nearly equal candidates of a draft head.
ROUNDINGS = 0.2


def check_rows_come_and_go(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Five requests are decoded two at a time. When one ends, the next joins. Each request writes the tokens that it writes alone.

    The check fails if `rebatch` mixes up the states of rows. (The default `rebatch` keeps no state, but calls `start`.)
    """
    name, inputs = conditions.models[0], prompts(len(NEW_TOKENS))
    texts = _rows_of(inputs)
    with conditions.enabled(name) as model, torch.no_grad():
        alone = [
            reference(
                model, text, "autoregressive", max_new_tokens=new, do_sample=True, seed=number,
                decoders_config={"compile": False},
            ).sequences
            for number, (text, new) in enumerate(zip(texts, NEW_TOKENS, strict=True))
        ]  # fmt: skip
        together = _come_and_go(strategy, model, needs(model, name, strategy), texts, do_sample=True)
        for number, (text, own, shared) in enumerate(zip(texts, alone, together, strict=True)):
            what = (
                f"request {number} beside requests that join and leave, compared with the request alone (see rebatch)"
            )
            assert_same_tokens(model, text, own, shared, what)


def check_rows_draft_apart(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """A row drafts the same tokens in a batch as alone.

    If :meth:`~decoders.strategy.Strategy.rebatch` keeps the row's state, the row also drafts the same tokens beside requests that
    join and leave. Checks of output tokens do not find mixed-up rows, because verification corrects the output. Strategies whose drafts
    depend on the clock (`timed`) or on other rows (:attr:`~decoders.strategy.Strategy.rows_apart` is False) are not checked.
    """
    if strategy.timed or not strategy.rows_apart:
        return
    name, inputs, spy = conditions.models[0], prompts(len(NEW_TOKENS)), spied(strategy)
    eager, longest = replace(conditions, compile=False), max(NEW_TOKENS)
    texts, alone = _rows_of(inputs), dict[tuple[int, ...], frozenset[tuple[int, ...]]]()
    with conditions.enabled(name) as model, torch.no_grad():
        for text in texts:
            run(model, name, spy, text, eager, max_new_tokens=longest)
            alone |= _drafts(spy)
        run(model, name, spy, inputs, eager, max_new_tokens=longest)
        _compare(alone, _drafts(spy), "in a batch")
        if strategy.rebatches:
            _come_and_go(spy, model, needs(model, name, strategy), texts, do_sample=False)
            _compare(alone, _drafts(spy), "beside rows that join and leave (see rebatch)")


def _rows_of(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The rows of a padded batch, each as a batch of its own."""
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [{"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]} for ids, mask in pairs]


def _come_and_go(
    strategy: Strategy,
    model: PreTrainedModel,
    options: dict[str, Any],
    texts: Sequence[dict[str, Tensor]],
    do_sample: bool,
) -> list[Tensor]:
    """Decodes `texts` two at a time, up to :data:`NEW_TOKENS`, and returns the outputs. options: the result of :func:`needs`."""
    loop = {"compile": False, "prune": False, "memory": False}
    with Scheduler(model, strategy=strategy, rows=2, decoders_config=loop, **options) as scheduler:
        requests = [
            scheduler.submit(
                text["input_ids"][0], max_new_tokens=new, do_sample=do_sample, seed=number if do_sample else None
            )
            for number, (text, new) in enumerate(zip(texts, NEW_TOKENS, strict=True))
        ]
        return [request.result(120) for request in requests]


def _drafts(spy: Spy) -> dict[tuple[int, ...], frozenset[tuple[int, ...]]]:
    """All logged drafts of unfinished rows, by the text before the draft. A draft is represented by the set of paths in its tree."""
    return {
        text: _paths(log.draft, row)
        for log in spy.seen
        for row, (text, ended) in enumerate(zip(log.texts, log.finished, strict=True))
        if not ended
    }


def _paths(draft: Draft, row: int) -> frozenset[tuple[int, ...]]:
    parents = draft.parents[row]
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, token in enumerate(draft.tokens[row].tolist(), 1):
        if token >= 0 and parents[node] in paths:
            paths[node] = (*paths[parents[node]], token)
    return frozenset(paths.values())


def _compare(alone: dict[tuple[int, ...], Any], together: dict[tuple[int, ...], Any], where: str) -> None:
    """Compares the drafts after equal texts. Raises AssertionError if more drafts differ than rounding in a batch can explain."""
    common = [text for text in together if text in alone and len(together[text] | alone[text]) > 1]
    differ = [text for text in common if together[text] != alone[text]]
    if len(differ) > ROUNDINGS * len(common):
        text = differ[0]
        other, own = sorted(together[text] - alone[text]), sorted(alone[text] - together[text])
        raise AssertionError(
            f"in {len(differ)} of {len(common)} steps a row drafts other tokens {where} than alone: after a text of {len(text)} tokens "
            f"it drafts {other[:3]}, not {own[:3]}. Keep a row's state with its row, read no tokens beyond its "
            "length, or set rows_apart = False in the class"
        )
