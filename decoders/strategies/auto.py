"""Collects draft tokens from several drafters in each step, and lets the target verify those that are worth their time.

The tokens that a row writes do not depend on its drafts. So a draft can be compared with the written tokens even if it was not
verified, and every drafter's acceptance rates are known. The rates give the probability of each draft token. The seconds of a step
with a given number of nodes are measured. Let ``P`` be the probability that all tokens on a node's path are accepted, and ``R`` the
present rate in tokens per second. A node is verified if ``P`` exceeds ``R`` times the seconds that the node adds (Dinkelbach 1967).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator
from torch import Tensor

from ..costs import AcceptanceRates, Follower, StepCosts, row_weights
from ..errors import DecodersError, SettingsError, UnsupportedError, canonical
from ..settings import Settings, Table
from ..strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy, finish_all, merged_traits
from .auto_candidates import FIRST_DEPTH, Candidate, Experience, Ledger, first_price, missing, refuse_unfit
from .auto_plan import AutoState, Memory, Plan
from .merged import union

#: Weight of the newest step in two moving means: tokens per step and seconds per step. The ratio of both means is the present rate.
RATE_WEIGHT = 1 / 32


class AutoSettings(Settings):
    """The settings of `auto`."""

    candidates: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None,
        description="Strategies to choose among, the cheapest first. None: grammar, suffix, ngram, medusa, speculative, and "
        "strategies of plugins with an auto_place. Candidates that a call cannot use are skipped, for instance "
        "speculative without assistant_model.",
    )
    config: Table = Field(
        Table(), description='Settings of the candidates, by name: {"prompt_lookup": {"max_ngram": 4}}.'
    )
    nodes: int = Field(64, ge=1, le=256, description="Maximum number of draft tokens verified per step and row.")

    @field_validator("candidates")
    @classmethod
    def _different(cls, candidates: tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = [name.replace("-", "_") for name in candidates or ()]
        if len(set(names)) < len(names) or "auto" in names:
            raise ValueError("name each candidate once, and do not name auto")
        return tuple(names) or None


class Auto(Strategy):
    """Asks several other strategies (its candidates) for draft tokens, and verifies in each step those that are worth their time.

    Trying the candidates costs about 1 % of the time of plain decoding. Candidates that bring no gain are tried less and less often.
    A call that has fallen 1.5 % behind plain decoding decodes plainly until it can afford another attempt.
    """

    name = "auto"
    summary = "Chooses among the other strategies, by measured costs and observed acceptance, in every step."
    settings_class = AutoSettings
    takes_assistant = True
    timed = True
    rows_apart = False
    on_device = False  # the host decides what to verify
    reads_prompt = finds_layers = False  # `compose` sets a trait to True if a candidate has the trait

    def __init__(self, settings: Settings | None = None, /, **values: Any) -> None:
        super().__init__(settings, **values)
        self._made: dict[str, Strategy] = {}

    @property
    def candidates(self) -> tuple[Strategy, ...]:
        """The candidates, the cheapest first. Empty before :meth:`compose` is called."""
        return tuple(self._made.values())

    def compose(self, resolve: Callable[..., Strategy], registered: Mapping[str, type[Strategy]]) -> None:
        """Creates the candidates, and sets the traits that say whether a candidate reads prompts or layers of the target."""
        if self._made:
            return
        names = self.settings.candidates
        if names is None:
            offered = [(cls.auto_place, name) for name, cls in registered.items() if cls.auto_place is not None]
            names = tuple(name for _, name in sorted(offered))
        unknown = sorted(set(self.settings.config) - set(names))
        if unknown:
            raise SettingsError(f"auto: config sets {unknown[0]!r}, which is not a candidate: {', '.join(names)}")
        own = {name: registered.get(canonical(name), Strategy).auto_settings for name in names}
        made = {name: resolve(name, {**own[name], **self.settings.config.get(name, {})}) for name in names}
        for strategy in made.values():
            refuse_unfit(strategy)
        merged = merged_traits(tuple(made.values()))
        self.declare(**{name: merged[name] for name in ("reads_prompt", "prompt_logits", "finds_layers")})
        # A candidate without `rebatch` is started anew when the rows change: impossible if it reads prompts, which come only once.
        self.rebatches = all(strategy.rebatches or not strategy.reads_prompt for strategy in made.values())
        self._made = made  # set last, so that after an error above the next call raises the same error

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        return union(self._layers_of(part, config, count) for part in self._made.values())

    def _layers_of(self, candidate: Strategy, config: Any, count: int) -> tuple[int, ...]:
        """Indices of the target's layers that `candidate` reads; empty if the candidate cannot start, for instance without its files.

        Raises:
            DecodersError: `candidate` cannot start, although the user has configured it.
        """
        if not candidate.reads_layers:
            return ()
        try:
            return candidate.layers_for(config, count)
        except DecodersError:
            if candidate.name in self.settings.config:
                raise
            return ()

    def start(self, context: Context) -> AutoState:
        if not context.coupled:
            raise UnsupportedError(
                "auto chooses which draft tokens to verify by tokens that were drawn before, which is exact with the coupled verifier "
                "only: take verifier='coupled', or another strategy"
            )
        self.compose(context.strategy, {})
        # Plugins can be added or removed between calls, so candidates may differ. Each set of candidates has its own statistics.
        memory: Memory = context.memory(f"rates of {', '.join(self._made)}", Memory)
        costs: StepCosts = context.costs(measure=True) or _Flat()
        every = self.layers_for(getattr(context.model, "config", None), context.decoder_layers)
        candidates: list[Candidate] = []
        left_out: dict[str, str] = {}
        for name in self._made:
            try:
                opened = self._opened(context, name, memory, costs, every)
            except BaseException as error:
                finish_all(((c.strategy, c.state) for c in candidates), error)
                raise
            if isinstance(opened, Candidate):
                candidates.append(opened)
            else:
                left_out[name] = opened
        common, several = memory.rates, context.rows > 1
        common.grade_rates = {candidate.bit: candidate.strategy.grade_rates for candidate in candidates}
        rates = [AcceptanceRates(common) for _ in range(context.rows)] if several else [common]
        ledger = Ledger(None if context.new_tokens is None else [0] * context.rows)
        rows = [Follower(r) for r in rates]
        return AutoState(memory, candidates, left_out, costs, rows, ledger, context.new_tokens, clock=context.clock)

    def _opened(
        self, context: Context, name: str, memory: Memory, costs: StepCosts, every: tuple[int, ...]
    ) -> Candidate | str:
        """Starts the candidate `name`. Returns a :class:`Candidate`, or the reason why the candidate is left out of the call.

        Args:
            every: indices of all layers that the candidates read.

        Raises:
            DecodersError: the candidate cannot start, although the user has configured it.
        """
        strategy = self._made[name]
        reason = missing(strategy, context)
        if reason is not None:
            return reason
        try:
            state = strategy.start(context.part(strategy, seldom=True))
        except DecodersError as error:
            if name in self.settings.config:
                raise
            return str(error)
        # Candidates that are left out keep their bits, so that a candidate has the same bit in every call.
        bit = 1 << list(self._made).index(name)
        experience = memory.experience.setdefault(name, Experience())
        price = first_price(strategy, context, costs)
        config, count = getattr(context.model, "config", None), context.decoder_layers
        layers = self._layers_of(strategy, config, count), every
        return Candidate(bit, strategy, state, self.settings.nodes, experience, context.clock, price, layers)

    def keeps_rows(self, state: AutoState) -> bool:
        return all(candidate.strategy.keeps_rows(candidate.state) for candidate in state.candidates)

    def rebatch(self, state: AutoState, rows: Tensor, context: Context) -> AutoState:
        """Rows that stay keep their acceptance rates. New rows begin with the rates of all rows and calls."""
        before, costs = state.rows, context.costs(measure=True) or _Flat()
        for candidate in state.candidates:
            candidate.state = candidate.strategy.rebatch(
                candidate.state, rows, context.part(candidate.strategy, seldom=True)
            )
        # The rate is scaled to the new number of rows.
        state.tokens *= context.rows / len(before)
        state.seconds *= costs.step(1) / state.costs.step(1)
        state.costs = costs
        state.rows = [
            before[row] if row >= 0 else Follower(AcceptanceRates(state.memory.rates)) for row in rows.tolist()
        ]
        state.plan = None
        return state

    def prefill(self, state: AutoState, chunk: PromptChunk) -> None:
        for candidate in state.candidates:
            candidate.read(chunk)

    def finish(self, state: AutoState) -> None:
        finish_all((candidate.strategy, candidate.state) for candidate in state.candidates)

    def propose(self, state: AutoState, sequences: Sequences) -> Draft:
        begun = state.clock()
        active = [row for row, ended in enumerate(sequences.read().finished) if not ended]
        if not state.seconds:
            state.tokens, state.seconds = float(len(active)), state.costs.step(1)
        tries = state.ledger.may_try(state.costs.step(1))
        plan = state.plan = Plan(state, _weights(state, active), self.settings.nodes, begun, tries=tries)
        for candidate in state.candidates:
            depth = _depth(state, plan, candidate)
            if depth == 0:
                candidate.skip()
                continue
            drafts = candidate.run(sequences, depth)
            for row in active:
                plan.proposals[row].add(candidate.bit, *drafts[row])
        plan.weigh()
        draft = plan.draft()
        plan.note()
        return draft

    def observe(self, state: AutoState, step: Step) -> None:
        plan = state.plan
        assert plan is not None
        observed = state.clock()
        seconds = observed - plan.begun
        read = step.read()
        emitted = list(map(len, read.tokens))
        right, credit = 0, dict.fromkeys((c.bit for c in state.candidates), 0.0)
        rows = zip(state.rows, plan.proposals, read.tokens, read.accepted, strict=True)
        worth = 0.0
        for row, (follower, proposals, tokens, drafted) in enumerate(rows):
            count = len(tokens)
            weight = plan.weights.get(row, 0.0)
            worth += weight * count
            if count:
                follower.follow(proposals)
                # A token that several drafters proposed is credited to the first of them only.
                for sources in proposals.path(tokens[:drafted]):
                    credit[sources & -sources] += weight
            for token in tokens:
                right |= follower.write(token)
        for candidate in state.candidates:
            candidate.observe(step, plan.width + 1 if candidate.bit & plan.chain else 0)
            if candidate.requested_depth:
                candidate.judge(credit[candidate.bit], plan.verifying.get(candidate.bit, 0.0), state.rate)
            if candidate.bit & right:
                candidate.was_right()
        state.history[-1].tokens += sum(emitted)
        # The seconds are clipped, because a step that is interrupted or that compiles would distort the rate.
        seconds = min(seconds, 4 * state.costs.step(step.nodes.shape[1]) + plan.chosen - plan.begun)
        state.memory.seconds += seconds
        once = sum(candidate.preparing for candidate in state.candidates)
        drafting = plan.chosen - plan.begun - once + state.clock() - observed
        plan.book(drafting, {row: emitted[row] for row in plan.active})
        newest = max(RATE_WEIGHT, 1 / (state.steps + 1))
        state.tokens += newest * (worth - state.tokens)
        state.seconds += newest * (seconds - state.seconds)

    def details(self, state: AutoState) -> Mapping[str, Any]:
        return {
            "choices": [
                {
                    "step": c.step, "steps": c.steps, "strategies": c.strategies, "nodes": round(c.nodes / c.steps, 2),
                    "expected": round(c.expected / c.steps, 2), "tokens": round(c.tokens / c.steps, 2),
                }
                for c in state.history
            ],
            "candidates": {
                c.name: {"runs": c.runs, "proposed": c.proposed, "right": c.right, "seconds": round(c.seconds, 6)}
                for c in state.candidates
            },
            "left_out": state.left_out,
        }  # fmt: skip


def _depth(state: AutoState, plan: Plan, candidate: Candidate) -> int | None:
    """The depth to request from a candidate in this step. 0: do not ask the candidate. None: ask it without requesting a depth."""
    if not plan.tries:
        return 0
    if candidate.limited:
        plan.weigh()
        if worth := plan.depth_of(candidate):
            return worth
    if not candidate.due(state.rate, state.all_seconds):
        return 0
    if not candidate.limited:
        return None
    return 1 if candidate.experience.runs else FIRST_DEPTH


def _weights(state: AutoState, active: list[int]) -> dict[int, float]:
    """The weight of a token in each active row, by row index. It is 1 on average, and larger in rows that are likely to finish last."""
    written = state.ledger.written
    if state.new_tokens is None or written is None or len(state.rows) == 1:
        return dict.fromkeys(active, 1.0)
    left = [state.new_tokens - written[row] for row in active]
    return dict(zip(active, row_weights(left, [state.rows[row].outlook for row in active]), strict=True))


class _Flat(StepCosts):
    """Assumed costs, for a call without measured costs: every node adds a hundredth of a step's time."""

    def __init__(self) -> None:
        super().__init__(None, 1, 1)

    def step(self, nodes: int) -> float:
        return 0.01 * (1 + 0.01 * nodes)
