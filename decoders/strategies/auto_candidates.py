"""The drafters that `auto` chooses among: when each is asked, what it has brought, and what all of them may spend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..costs import Looks, StepCosts, affordable, mean_seconds
from ..errors import SettingsError, UnsupportedError
from ..strategy import Context, Sequences, Step, Strategy, check_draft

#: A drafter is cheap if asking it every so many steps costs little; the most expensive one is asked every so many steps.
CHEAP_WAIT, DEAREST_WAIT = 4, 256
#: A drafter that is asked so rarely is not shown the steps in between either, if it can miss steps.
UNTAUGHT = 16
#: A cheap drafter that was right is asked in each of the next so many steps.
PATIENCE = 4
#: Weight of the newest run in the means of a drafter.
RUN_WEIGHT = 1 / 4
#: Tokens that a drafter to which every token costs a pass drafts at first.
FIRST_DEPTH = 2


@dataclass
class Experience:
    """What is known of a drafter, in this call and the ones before.

    Attributes:
        runs: how often it was asked.
        cost: mean seconds of a run; of a token of its draft, where it is limited.
        learning: mean seconds of what it learns from a step, where that can be left out with its draft.
        lost: seconds of runs that brought nothing. A run that one call cannot afford is made in a later one.
        looks: what runs have brought, and how often it is asked.
    """

    runs: int = 0
    cost: float = 0.0
    learning: float = 0.0
    lost: float = 0.0
    looks: Looks = field(default_factory=Looks)


class Candidate:
    """A drafter and what is known of it in a call.

    Args:
        bit: stands for it in masks.
        strategy, state: of the drafter.
        depth: most tokens that it drafts on a path.
        experience: of it, kept between calls.
        clock: of the call.
        first_price: seconds that its first run is expected to take, before there was one.

    Attributes:
        limited: whether it drafts as deep as it is told to, so that a token more costs time.
        runs: how often it was asked.
        proposed: how many draft tokens it made.
        right: how often the token that was written next stood where it had proposed it.
        seconds: of all its runs, and of what it learnt from steps that it can miss.
        preparing: seconds of its run in this step, if that was the first one of this call.
        requested_depth: how deep it was told to draft in this step; 1 if it knows no limit, 0 if it was left out.
    """

    def __init__(
        self, bit: int, strategy: Strategy, state: Any, depth: int, experience: Experience, clock: Callable[[], float],
        first_price: float = 0.0,
    ) -> None:  # fmt: skip
        self._clock, self._first_price = clock, first_price
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
            seconds: of all calls so far and, as expected, the rest of this one.
        """
        known = self.experience
        cost = known.cost + known.learning
        most = affordable(rate * cost, DEAREST_WAIT)
        if self.limited:  # what it is worth is known before it is asked: this is a look
            due = self._waited >= most
        else:
            due = (self._patience > 0 and most <= CHEAP_WAIT) or known.looks.due(self._waited, most)
            if known.looks.pays:
                return due
        price, share = (cost, LOOKS_SHARE) if known.runs else (self._first_price, FIRST_SHARE)
        return due and known.lost + price <= share * seconds

    def skip(self) -> None:
        """The step goes without it."""
        self._waited += 1
        self.preparing, self.requested_depth = 0.0, 0

    def run(self, sequences: Sequences, limit: int | None = None) -> list[tuple[Any, ...]]:
        """Its draft: of every row the tokens, the nodes' parents and the grades; see :meth:`Proposals.add`.

        Raises:
            DraftError: no draft. UnsupportedError: one whose nodes cannot be taken one by one.
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
        tokens, parents = draft.tokens.tolist(), draft.parents
        grades = [None] * len(tokens) if draft.grades is None else draft.grades.tolist()
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
        return list(zip(tokens, parents, grades, strict=True))

    def observe(self, step: Step, own_nodes: int) -> None:
        """Shows it the step, if it learns from steps and is asked often enough."""
        rarely_asked = not self.requested_depth and self.experience.looks.wait >= UNTAUGHT
        if not self._observes or (rarely_asked and self.strategy.misses_steps):
            return
        begun = self._clock()
        self.strategy.observe(self.state, replace(step, own_nodes=own_nodes))
        if self.strategy.misses_steps:
            seconds, known = self._clock() - begun, self.experience
            known.learning = _mean(known.learning, seconds, known.runs)
            self.seconds += seconds

    def judge(self, benefit: float, verifying: float, rate: float) -> None:
        """Learns what the run was worth.

        Args:
            benefit: accepted tokens that no drafter before it has proposed.
            verifying: seconds that were spent on verifying what no drafter before it has proposed.
            rate: present tokens per second: the time is worth those.
        """
        known = self.experience
        price = rate * (known.cost * self.requested_depth + known.learning + verifying)
        known.looks.judge(benefit - price, DEAREST_WAIT)
        if not known.looks.pays:
            known.lost += max(price - benefit, 0.0) / rate

    def was_right(self) -> None:
        """A token that it had proposed was written: it is asked in the next steps, where that costs little."""
        self.right += 1
        self._patience = PATIENCE


def _mean(known: float, seconds: float, runs: int) -> float:
    """The first run prepares things: it is no part of the mean."""
    return mean_seconds(known if runs >= 2 else None, seconds, RUN_WEIGHT)


def first_price(strategy: Strategy, context: Context, costs: StepCosts) -> float:
    """Seconds that the first run of a drafter is expected to take: a draft model reads the prompt, and drafts :data:`FIRST_DEPTH`
    tokens. Its passes are taken to take as long as the target's of so many layers. Drafters that are no model take next to nothing.
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
            f"auto: {strategy.name!r} learns from steps and does not say that it can be left out of some (`rests = True`)"
        )
    if not strategy.exact:
        raise SettingsError(f"auto: {strategy.name!r} is not exact")


def missing(strategy: Strategy, context: Context) -> str | None:
    """What the call lacks that `strategy` needs."""
    if strategy.needs_grammar and context.guide is None:
        return "the call has no grammar"
    if strategy.needs_assistant and context.assistant_model is None:
        return "the call has no assistant_model"
    if strategy.reads_layers:
        return "it reads hidden layers of the target, which auto does not hand out"
    return None


#: Looks at a drafter that bring nothing may cost this share of the time; the first run of a draft model, which somebody has given,
#: twice as much.
LOOKS_SHARE, FIRST_SHARE = 0.0075, 0.015
#: Steps in which drafts are made may leave a call behind plain decoding by this share of the time.
BEHIND_SHARE = 0.015
#: Of a call that is to come, at most so many tokens per row are counted on: it may end sooner.
COUNTED_AHEAD = 256
#: From the start a call may be behind by the share of so many steps; each step adds its own.
FIRST_STEPS = 64
#: A call cannot be ahead by more plain steps than this, what was gained long ago is not staked; nor decode plainly for more steps on
#: end than this before it makes another attempt.
MOST_AHEAD, LONGEST_REST = 64, 32
#: How many times more than its price a draft token is to bring where a call is as far behind as it may be.
STRICTNESS = 4


@dataclass
class Ledger:
    """How far a call is behind plain decoding; where it is too far, it decodes plainly until it can afford another attempt.

    Rows that begin and end together are as far as the last of them: a call takes as long as its slowest row.

    Attributes:
        written: tokens of each row; None where rows come and go, whose mean counts.
        least: tokens of the last row that goes on.
        behind: seconds, less what it may be behind after so many steps; negative if it is ahead.
    """

    written: list[int] | None
    least: int = 0
    behind: float = 0.0

    def may_try(self, plain: float) -> bool:
        """Whether drafts may be made in this step. plain: seconds of a step without."""
        return self.behind <= FIRST_STEPS * BEHIND_SHARE * plain

    def strictness(self, plain: float) -> float:
        """How many times its price a draft token is to bring: the further behind, the surer it has to be."""
        return 1 + STRICTNESS * max(self.behind, 0.0) / (FIRST_STEPS * BEHIND_SHARE * plain)

    def book(self, extra: float, plain: float, emitted: dict[int, int]) -> None:
        """A step is done.

        Args:
            extra: seconds that it took more than a plain one, without what is done once in a call.
            plain: seconds of a plain one.
            emitted: tokens that it wrote, by row that goes on.
        """
        behind = self.behind + extra - plain * (self._gained(emitted) - 1 + BEHIND_SHARE)
        most = (FIRST_STEPS + LONGEST_REST) * BEHIND_SHARE * plain
        self.behind = min(max(behind, -MOST_AHEAD * plain), most)

    def _gained(self, emitted: dict[int, int]) -> float:
        """How many plain steps would have brought the call as far."""
        if self.written is None:
            return sum(emitted.values()) / max(len(emitted), 1)
        for row, count in emitted.items():
            self.written[row] += count
        before, self.least = self.least, min((self.written[row] for row in emitted), default=self.least)
        return self.least - before
