"""The drafters that `auto` chooses among. Decides when a drafter is asked, measures its gain, and limits the time spent on trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..costs import StepCosts, Trials, affordable, mean_seconds
from ..errors import SettingsError, UnsupportedError
from ..strategy import Context, PromptChunk, Sequences, Step, Strategy, check_draft
from .merged import layers_of_part

#: A drafter is cheap if `auto` can afford its draft at least every CHEAP_WAIT steps. Even the most expensive drafter is asked every
#: LONGEST_WAIT steps on average.
CHEAP_WAIT, LONGEST_WAIT = 4, 256
#: A drafter with the trait `misses_steps` need not observe every step. If it is asked less often than every UNTAUGHT steps, it observes
#: only the steps with its drafts.
UNTAUGHT = 16
#: When a draft token of a cheap drafter turns out right, the drafter is asked in each of the next PATIENCE steps.
PATIENCE = 4
#: Weight of a drafter's newest run in its mean seconds.
RUN_WEIGHT = 1 / 4
#: Depth requested for the first draft of a limited drafter: a drafter that takes a requested depth and runs one pass per token.
FIRST_DEPTH = 2


@dataclass
class Experience:
    """Statistics of a drafter, from this call and earlier calls.

    Attributes:
        runs: number of drafts that the drafter was asked for (runs).
        cost: mean seconds of a run; for a limited drafter (:class:`Candidate`), mean seconds per level of its draft.
        learning: mean seconds of `observe`, for a drafter with the trait `misses_steps`; otherwise 0.
        lost: seconds lost in trials, over all calls. A trial is a run while the drafter brings no gain. Calls share the time that
            trials may take (:data:`LOOKS_SHARE`), so that they can try a drafter that is too expensive for one call.
        trials: decides from the gains of past drafts how often the drafter is asked.
    """

    runs: int = 0
    cost: float = 0.0
    learning: float = 0.0
    lost: float = 0.0
    trials: Trials = field(default_factory=Trials)


class Candidate:
    """A strategy that `auto` may ask for drafts during a call: a drafter.

    Args:
        bit: the drafter's bit in bit masks that stand for sets of drafters (:mod:`decoders.costs.acceptance`).
        strategy, state: the drafter's strategy and its state.
        depth: greatest depth to request from a limited drafter.
        experience: the drafter's statistics, kept between calls.
        clock: the call's clock.
        first_price: expected seconds of the drafter's first run.
        layers: two tuples of indices of the target's layers: those that this drafter reads, and those that any candidate reads.

    Attributes:
        limited: whether the drafter drafts to a requested depth, because deeper drafts take more time.
        runs: number of its drafts in this call.
        proposed: number of its draft tokens in this call.
        right: number of this call's steps that wrote a token that the drafter had proposed.
        seconds: seconds of all its runs in this call, plus `observe` for a drafter with the trait `misses_steps`.
        preparing: seconds of this step's run if it is the drafter's first run in this call; otherwise 0.
        requested_depth: depth requested in this step. 1 for a drafter that is not limited; 0 if the drafter was not asked.
    """

    def __init__(
        self, bit: int, strategy: Strategy, state: Any, depth: int, experience: Experience, clock: Callable[[], float],
        first_price: float = 0.0, layers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> None:  # fmt: skip
        self._clock, self._first_price, (self._layers, self._every) = clock, first_price, layers
        self.bit, self.strategy, self.state, self.depth = bit, strategy, state, depth
        self.name = strategy.name
        self.limited = strategy.limits
        self._observes = strategy.observes
        self.runs = self.proposed = self.right = 0
        self.seconds, self.preparing, self.requested_depth = 0.0, 0.0, 0
        self.experience = experience
        self._waited = 0
        self._patience = 0 if experience.runs else PATIENCE

    def due(self, rate: float, seconds: float) -> bool:
        """Whether the drafter is asked in this step.

        Args:
            rate: present tokens per second.
            seconds: seconds of all calls so far, plus the expected seconds of the rest of this call.
        """
        past = self.experience
        cost = past.cost + past.learning
        most = affordable(rate * cost, LONGEST_WAIT)
        if self.limited:  # `due` is called only if no draft depth is worth its time, so this draft is a trial
            due = self._waited >= most
        else:
            due = (self._patience > 0 and most <= CHEAP_WAIT) or past.trials.due(self._waited, most)
            if past.trials.pays:
                return due
        price, share = (cost, LOOKS_SHARE) if past.runs else (self._first_price, FIRST_SHARE)
        return due and past.lost + price <= share * seconds

    def skip(self) -> None:
        """Notes that the drafter is not asked in this step."""
        self._waited += 1
        self.preparing, self.requested_depth = 0.0, 0

    def read(self, chunk: PromptChunk) -> None:
        """Passes a chunk of the prompts to the drafter's `prefill`, if the drafter reads prompts."""
        if self.strategy.reads_prompt:
            layers = layers_of_part(chunk.layers, self._every, self._layers)
            logits = chunk.logits if self.strategy.prompt_logits else None
            self.strategy.prefill(self.state, replace(chunk, layers=layers, logits=logits))

    def run(self, sequences: Sequences, limit: int | None = None) -> list[tuple[Any, ...]]:
        """Runs the drafter. Returns for every row the arguments of :meth:`Proposals.add`: tokens, the nodes' parents, and grades.

        Raises:
            DraftError: the strategy returned no valid draft. UnsupportedError: some nodes of the draft can never be accepted.
        """
        begun = self._clock()
        if limit is not None:
            self.strategy.limit(self.state, limit)
        draft = self.strategy.propose(self.state, sequences)
        check_draft(draft, self.name, len(sequences.length))
        if not draft.has_draft_tokens_only:
            raise UnsupportedError(
                f"auto cannot choose {self.name!r}: this strategy runs other nodes beside its draft tokens in every step, and auto "
                "does not ask every candidate in every step. Use the strategy by itself, or merged (a+b)"
            )
        tokens, parents, grades = draft.read()
        seconds = self._clock() - begun
        cost = seconds / max(draft.levels, 1) if self.limited else seconds
        past = self.experience
        past.cost = _mean(past.cost, cost, past.runs)
        past.runs += 1
        self.preparing = 0.0 if self.runs else seconds
        self.runs, self.requested_depth = self.runs + 1, limit or 1
        self.seconds += seconds
        self.proposed += sum(token >= 0 for row in tokens for token in row)
        self._waited, self._patience = 0, self._patience - 1
        return [(own, parents[row], grades and grades[row]) for row, own in enumerate(tokens)]

    def observe(self, step: Step, own_nodes: int) -> None:
        """Passes a verified step to the drafter's `observe`, unless it may miss steps and is rarely asked (:data:`UNTAUGHT`)."""
        rarely_asked = not self.requested_depth and self.experience.trials.wait >= UNTAUGHT
        if not self._observes or (rarely_asked and self.strategy.misses_steps):
            return
        begun = self._clock()
        layers = layers_of_part(step.layers, self._every, self._layers)
        self.strategy.observe(self.state, replace(step, own_nodes=own_nodes, layers=layers))
        if self.strategy.misses_steps:
            seconds, past = self._clock() - begun, self.experience
            past.learning = _mean(past.learning, seconds, past.runs)
            self.seconds += seconds

    def judge(self, benefit: float, verifying: float, rate: float) -> None:
        """Updates the drafter's statistics with the gain of its run in this step.

        Args:
            benefit: number of accepted tokens that this drafter was the first to propose, each multiplied by the weight of its row.
            verifying: seconds of verifying the nodes that this drafter was the first to propose.
            rate: present tokens per second, which converts seconds to tokens.
        """
        past = self.experience
        price = rate * (past.cost * self.requested_depth + past.learning + verifying)
        past.trials.judge(benefit - price, LONGEST_WAIT)
        if not past.trials.pays:
            past.lost += max(price - benefit, 0.0) / rate

    def was_right(self) -> None:
        """Counts a step that wrote a draft token of this drafter. A cheap drafter is then asked in each of the next PATIENCE steps."""
        self.right += 1
        self._patience = PATIENCE


def _mean(mean: float, seconds: float, runs: int) -> float:
    """The moving `mean`, updated with a run of `seconds` after `runs` earlier runs.

    The second run replaces the first, because the first run includes preparation.
    """
    return mean_seconds(mean if runs >= 2 else None, seconds, RUN_WEIGHT)


def first_price(strategy: Strategy, context: Context, costs: StepCosts) -> float:
    """Expected seconds of a limited drafter's first run: its model reads the prompt and drafts :data:`FIRST_DEPTH` tokens.

    A pass of the draft model is assumed to cost as much as a pass of the target, times the ratio of their layer counts. 0 if
    `strategy` is not limited.
    """
    if not strategy.limits:
        return 0.0
    read = 0 if context.sequences is None else int(context.sequences.length.max())
    config = getattr(context.assistant_model, "config", None)
    own = getattr(config.get_text_config(), "num_hidden_layers", 0) if config is not None else 0
    share = min(own / context.decoder_layers, 1.0) if own and context.decoder_layers else 1.0
    return share * (costs.step(1 + read) + FIRST_DEPTH * costs.step(1))


def refuse_unfit(strategy: Strategy) -> None:
    """Raises SettingsError for a strategy that is not exact, or that must observe every step."""
    if strategy.observes and not strategy.rests:
        raise SettingsError(
            f"auto leaves drafters out of some steps, but {strategy.name!r} has to see every step: take it out of candidates, and "
            f"use it by itself (strategy={strategy.name!r}) or merged with another one (strategy='{strategy.name}+prompt_lookup')"
        )
    if not strategy.exact:
        raise SettingsError(f"auto: {strategy.name!r} is not exact: take it out of candidates")


def missing(strategy: Strategy, context: Context) -> str | None:
    """Says which input for `strategy` is missing in the call, the grammar or the assistant model; None if none is missing."""
    if strategy.needs_grammar and context.guide is None:
        return "the call has no grammar"
    if strategy.needs_assistant and context.assistant_model is None:
        return "the call has no assistant_model"
    return None


#: A drafter that brings no gain may spend this share of all time on trials: FIRST_SHARE for its first run, LOOKS_SHARE afterwards.
LOOKS_SHARE, FIRST_SHARE = 0.0075, 0.015
#: A call may fall behind plain decoding by this share of its time.
BEHIND_SHARE = 0.015
#: The remaining time of a call is estimated for at most COUNTED_AHEAD tokens per row, because the call may end early.
COUNTED_AHEAD = 256
#: A plain step is a step without a draft. At its start a call may fall behind by BEHIND_SHARE times the time of FIRST_STEPS plain
#: steps. Every step raises this limit by BEHIND_SHARE times the time of a plain step.
FIRST_STEPS = 64
#: A call that is ahead of plain decoding counts as ahead by at most MOST_AHEAD plain steps. A call that is too far behind drafts again
#: after at most LONGEST_REST plain steps.
MOST_AHEAD, LONGEST_REST = 64, 32
#: The price of a draft token rises as a call falls behind. At the limit the price is multiplied by ``1 + STRICTNESS``.
STRICTNESS = 4


@dataclass
class Ledger:
    """Tracks how far a call is behind plain decoding. Beyond a limit, the call decodes plainly until it can afford another attempt.

    If all rows begin together, the progress of the call is the progress of its slowest row. If rows join and leave, it is the rows'
    mean progress.

    Attributes:
        written: number of tokens that each row has written; None if rows join and leave.
        least: number of tokens that the slowest active row has written.
        behind: seconds that the call is behind plain decoding; negative if it is ahead. Every step subtracts the share of a plain step
            by which a call may fall behind (:data:`BEHIND_SHARE`).
    """

    written: list[int] | None
    least: int = 0
    behind: float = 0.0

    def may_try(self, plain: float) -> bool:
        """Whether this step may have a draft. plain: seconds of a step without a draft."""
        return self.behind <= FIRST_STEPS * BEHIND_SHARE * plain

    def strictness(self, plain: float) -> float:
        """The factor on a draft token's price: 1 for a call that is not behind, ``1 + STRICTNESS`` for a call at its limit."""
        return 1 + STRICTNESS * max(self.behind, 0.0) / (FIRST_STEPS * BEHIND_SHARE * plain)

    def book(self, extra: float, plain: float, emitted: dict[int, int]) -> None:
        """Updates `written`, `least` and `behind` after a step.

        Args:
            extra: seconds that the step took longer than a plain step, without preparation that happens once per call.
            plain: seconds of a plain step.
            emitted: number of tokens written by each active row.
        """
        behind = self.behind + extra - plain * (self._gained(emitted) - 1 + BEHIND_SHARE)
        most = (FIRST_STEPS + LONGEST_REST) * BEHIND_SHARE * plain
        self.behind = min(max(behind, -MOST_AHEAD * plain), most)

    def _gained(self, emitted: dict[int, int]) -> float:
        """Updates `written` and `least`. Returns the number of plain steps that would have made the same progress as this step."""
        if self.written is None:
            return sum(emitted.values()) / max(len(emitted), 1)
        for row, count in emitted.items():
            self.written[row] += count
        before, self.least = self.least, min((self.written[row] for row in emitted), default=self.least)
        return self.least - before
