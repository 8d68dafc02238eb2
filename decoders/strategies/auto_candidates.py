"""The drafters that `auto` chooses among: when each is asked, what it brought, and how much time all may spend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..costs import Looks, StepCosts, affordable, mean_seconds
from ..errors import SettingsError, UnsupportedError
from ..strategy import Context, PromptChunk, Sequences, Step, Strategy, check_draft
from .merged import layers_of_part

#: A drafter is cheap if it may be asked at least every CHEAP_WAIT steps; the most expensive one is asked every DEAREST_WAIT steps.
CHEAP_WAIT, DEAREST_WAIT = 4, 256
#: A drafter that is asked less often than every so many steps does not observe the steps between, if it may miss steps.
UNTAUGHT = 16
#: A cheap drafter that was right is asked in each of the next so many steps.
PATIENCE = 4
#: Weight of the newest run in the means of a drafter.
RUN_WEIGHT = 1 / 4
#: Tokens of the first draft of a limited drafter, which needs a pass per token.
FIRST_DEPTH = 2


@dataclass
class Experience:
    """Statistics of a drafter, from this call and earlier ones.

    Attributes:
        runs: how often it was asked.
        cost: mean seconds of a run; per token of its draft if it is limited.
        learning: mean seconds of `observe`, if it can be left out with the draft.
        lost: seconds of trials without a gain, over all calls, so that several calls together can afford a trial that one call
            cannot.
        looks: the gains of trials, and how often the drafter is asked.
    """

    runs: int = 0
    cost: float = 0.0
    learning: float = 0.0
    lost: float = 0.0
    looks: Looks = field(default_factory=Looks)


class Candidate:
    """A drafter in a call.

    Args:
        bit: its bit in masks.
        strategy, state: of the drafter.
        depth: most tokens that it drafts on a path.
        experience: its statistics, kept between calls.
        clock: of the call.
        first_price: expected seconds of its first run.
        layers: of the target, that it reads; and those that are read for all candidates.

    Attributes:
        limited: whether it drafts to a requested depth, because deeper drafts take more time.
        runs: how often it was asked.
        proposed: number of its draft tokens.
        right: number of its draft tokens that were written.
        seconds: time of all its runs, and of observing steps that it may miss.
        preparing: seconds of its run in this step, if that was the first one of this call.
        requested_depth: depth requested in this step; 1 if it has no limit, 0 if it was left out.
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
        """Whether it is asked in this step.

        Args:
            rate: present tokens per second.
            seconds: of all calls so far, and the expected rest of this one.
        """
        known = self.experience
        cost = known.cost + known.learning
        most = affordable(rate * cost, DEAREST_WAIT)
        if self.limited:  # it is known not to pay, so asking it is a trial
            due = self._waited >= most
        else:
            due = (self._patience > 0 and most <= CHEAP_WAIT) or known.looks.due(self._waited, most)
            if known.looks.pays:
                return due
        price, share = (cost, LOOKS_SHARE) if known.runs else (self._first_price, FIRST_SHARE)
        return due and known.lost + price <= share * seconds

    def skip(self) -> None:
        """Leaves it out of the step."""
        self._waited += 1
        self.preparing, self.requested_depth = 0.0, 0

    def read(self, chunk: PromptChunk) -> None:
        """Shows the drafter a chunk of the prompts, if it reads prompts."""
        if self.strategy.reads_prompt:
            layers = layers_of_part(chunk.layers, self._every, self._layers)
            logits = chunk.logits if self.strategy.prompt_logits else None
            self.strategy.prefill(self.state, replace(chunk, layers=layers, logits=logits))

    def run(self, sequences: Sequences, limit: int | None = None) -> list[tuple[Any, ...]]:
        """Its draft: for every row the tokens, the nodes' parents and the grades; see :meth:`Proposals.add`.

        Raises:
            DraftError: it is no draft. UnsupportedError: the nodes of the drafter's tree cannot be selected one by one.
        """
        begun = self._clock()
        if limit is not None:
            self.strategy.limit(self.state, limit)
        draft = self.strategy.propose(self.state, sequences)
        check_draft(draft, self.name, len(sequences.length))
        if not draft.has_draft_tokens_only:
            raise UnsupportedError(
                f"strategy {self.name!r} runs nodes of its own beside its draft tokens, in every step: auto, which may leave it "
                "out, cannot choose it. Use it by itself, or merged"
            )
        tokens, parents, grades = draft.read()
        seconds = self._clock() - begun
        cost = seconds / max(draft.levels, 1) if self.limited else seconds
        known = self.experience
        known.cost = _mean(known.cost, cost, known.runs)
        known.runs += 1
        self.preparing = 0.0 if self.runs else seconds
        self.runs, self.requested_depth = self.runs + 1, limit or 1
        self.seconds += seconds
        self.proposed += sum(token >= 0 for row in tokens for token in row)
        self._waited, self._patience = 0, self._patience - 1
        return [(own, parents[row], grades and grades[row]) for row, own in enumerate(tokens)]

    def observe(self, step: Step, own_nodes: int) -> None:
        """Lets it observe the step, if it learns from steps and is asked often enough."""
        rarely_asked = not self.requested_depth and self.experience.looks.wait >= UNTAUGHT
        if not self._observes or (rarely_asked and self.strategy.misses_steps):
            return
        begun = self._clock()
        layers = layers_of_part(step.layers, self._every, self._layers)
        self.strategy.observe(self.state, replace(step, own_nodes=own_nodes, layers=layers))
        if self.strategy.misses_steps:
            seconds, known = self._clock() - begun, self.experience
            known.learning = _mean(known.learning, seconds, known.runs)
            self.seconds += seconds

    def judge(self, benefit: float, verifying: float, rate: float) -> None:
        """Learns the gain of the run.

        Args:
            benefit: accepted tokens that no earlier drafter has proposed.
            verifying: seconds of verifying nodes that no earlier drafter has proposed.
            rate: present tokens per second, the value of time.
        """
        known = self.experience
        price = rate * (known.cost * self.requested_depth + known.learning + verifying)
        known.looks.judge(benefit - price, DEAREST_WAIT)
        if not known.looks.pays:
            known.lost += max(price - benefit, 0.0) / rate

    def was_right(self) -> None:
        """Called when one of its draft tokens was written: a cheap drafter is asked again in the next steps."""
        self.right += 1
        self._patience = PATIENCE


def _mean(known: float, seconds: float, runs: int) -> float:
    """The mean without the first run, which includes preparation."""
    return mean_seconds(known if runs >= 2 else None, seconds, RUN_WEIGHT)


def first_price(strategy: Strategy, context: Context, costs: StepCosts) -> float:
    """Expected seconds of the first run of a drafter: a draft model reads the prompt and drafts :data:`FIRST_DEPTH` tokens.

    Its passes are estimated from the target's by the number of layers. Drafters without a model take almost no time.
    """
    if not strategy.limits:
        return 0.0
    read = 0 if context.sequences is None else int(context.sequences.length.max())
    config = getattr(context.assistant_model, "config", None)
    own = getattr(config.get_text_config(), "num_hidden_layers", 0) if config is not None else 0
    share = min(own / context.decoder_layers, 1.0) if own and context.decoder_layers else 1.0
    return share * (costs.step(1 + read) + FIRST_DEPTH * costs.step(1))


def refuse_unfit(strategy: Strategy) -> None:
    """Raises SettingsError for a strategy that must see every step of its own."""
    if strategy.observes and not strategy.rests:
        raise SettingsError(
            f"auto leaves a drafter out of steps in which it does not pay, and {strategy.name!r} has to see every step: take it out of "
            f"candidates, and use it by itself (strategy={strategy.name!r}) or beside another one in every step "
            f"(strategy='{strategy.name}+prompt_lookup')"
        )
    if not strategy.exact:
        raise SettingsError(f"auto: {strategy.name!r} is not exact")


def missing(strategy: Strategy, context: Context) -> str | None:
    """What `strategy` needs and the call lacks, or None."""
    if strategy.needs_grammar and context.guide is None:
        return "the call has no grammar"
    if strategy.needs_assistant and context.assistant_model is None:
        return "the call has no assistant_model"
    return None


#: Share of the time for trials of a drafter without a gain; the first run of a draft model given by the user may take twice that.
LOOKS_SHARE, FIRST_SHARE = 0.0075, 0.015
#: A call may fall behind plain decoding by this share of the time.
BEHIND_SHARE = 0.015
#: Most tokens per row that the rest of a call is expected to have, since it may end early.
COUNTED_AHEAD = 256
#: A call may be behind by this share of so many steps at its start; each step adds its own share.
FIRST_STEPS = 64
#: Most plain steps that a call can be ahead, so that old gains are not spent; and most plain steps in a row before another attempt.
MOST_AHEAD, LONGEST_REST = 64, 32
#: Factor on the price of a draft token when a call is as far behind as it may be.
STRICTNESS = 4


@dataclass
class Ledger:
    """Tracks how far a call is behind plain decoding; beyond a limit, the call decodes plainly until it can afford another attempt.

    The progress of rows that begin together is that of the slowest row.

    Attributes:
        written: tokens of each row; None where rows join and leave: then their mean counts.
        least: tokens of the slowest active row.
        behind: seconds behind plain decoding, less the allowance so far; negative if it is ahead.
    """

    written: list[int] | None
    least: int = 0
    behind: float = 0.0

    def may_try(self, plain: float) -> bool:
        """Whether this step may have a draft. plain: seconds of a step without one."""
        return self.behind <= FIRST_STEPS * BEHIND_SHARE * plain

    def strictness(self, plain: float) -> float:
        """The factor on a draft token's price, which grows with how far the call is behind."""
        return 1 + STRICTNESS * max(self.behind, 0.0) / (FIRST_STEPS * BEHIND_SHARE * plain)

    def book(self, extra: float, plain: float, emitted: dict[int, int]) -> None:
        """Books a step.

        Args:
            extra: seconds beyond a plain step, without preparation that is done once per call.
            plain: seconds of a plain step.
            emitted: tokens written, by active row.
        """
        behind = self.behind + extra - plain * (self._gained(emitted) - 1 + BEHIND_SHARE)
        most = (FIRST_STEPS + LONGEST_REST) * BEHIND_SHARE * plain
        self.behind = min(max(behind, -MOST_AHEAD * plain), most)

    def _gained(self, emitted: dict[int, int]) -> float:
        """The number of plain steps with the same progress."""
        if self.written is None:
            return sum(emitted.values()) / max(len(emitted), 1)
        for row, count in emitted.items():
            self.written[row] += count
        before, self.least = self.least, min((self.written[row] for row in emitted), default=self.least)
        return self.least - before
