"""The loop that all strategies share: a step is propose, forward + verify + commit, observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...report import Stopwatch
from ...strategy import Draft, PromptChunk, check_draft
from ...tree import TreeTensors
from ..model.blocks import Blocks, LeadingText, NodeBlock, PromptPiece, without_empty_end
from ..model.buckets import round_up, row_bucket
from ..model.cache import CacheBuffers
from ..model.invariance import branch_length
from . import guard
from .core import StepOutput
from .criteria import Outcome
from .drafts.drafter import ModelDrafter
from .engine import Engine
from .grammar.device_guide import guide_of
from .grammar.guide import Guide
from .guard import check_tree, untouched
from .request import Request
from .request_output import RequestOutput, empty_report
from .resources import CallResources
from .rows import Rows
from .session import Session
from .steps import StepFunction, make_step
from .verify import step_keys
from .worth import DraftWorth


class Call:
    """Rows that are decoded together, and what belongs to their steps; what belongs to a request is its :class:`RequestOutput`.

    In :class:`~decoders.engine.decode.fixed_batch.FixedBatch` it is one request whose rows come and go together. In
    :class:`~decoders.engine.decode.lane.Lane` requests of one row come and go between two steps.

    Attributes:
        members: the requests and the first row of each, in the order of rows; every row is a member's.
        capacity: most rows there can be, where requests come and go; 0 elsewhere.
        worth: says how much of a draft is verified, where it is counted.
        resources: what the strategy may use.
        where: what is being done, for notes on errors.
        step: forward, verification and commit of a block.
        session: where the rows' tokens, keys and values are.
        longest: most tokens that a row can come to.
        noise_keys: ``[B]``, the keys of the rows' noise.
        next_piece: gives what the next step reads of another row's prompt, where it does.
        piece_seconds: what such a step has spent on that.

    Args:
        stack: closes what is opened here.
    """

    step: StepFunction
    session: Session
    longest: int
    noise_keys: Tensor

    def __init__(self, engine: Engine, request: Request, stack: ExitStack) -> None:
        self.engine, self.request, self.stack = engine, request, stack
        self.forward_pass = engine.forward_pass_for(request.strategy)
        self.target = self.forward_pass.target
        self.width = row_bucket(len(request.prompts), self.target.static)  # rows nobody has asked for have ended
        chosen = request.verifier
        # Where nothing is drawn, all exact rules are one: keep what matches.
        built_in = chosen is None or chosen.coupled or (chosen.exact and not request.plan.sample)
        self.verifier = None if built_in else chosen
        self.where = "while the prompt was read"  # for notes on errors
        self.report = empty_report(request, self.target)
        self.members: list[tuple[RequestOutput, int]] = []
        self.capacity = 0
        self.worth: DraftWorth | None = None
        self.next_piece: Callable[[], PromptPiece] | None = None
        self.piece_seconds = 0.0
        self.may_err = self.verifier is not None  # whether a hook can do wrong what only the device sees
        self.resources = CallResources(self, stack)
        self.state: Any = None  # the strategy's
        self.guide: Guide | None = None
        self.pending = self.prompt_left = 0
        self._verified: int | None = None  # the nodes of a draft that was cut off
        self._learning = 0.0  # seconds that the last draft's strategy has observed, where that goes with its draft

    @property
    def rows(self) -> Rows:
        return self.session.rows

    @property
    def blocks(self) -> Blocks:
        """The sizes of the rows' blocks."""
        return self.session.blocks

    @property
    def drafters(self) -> list[ModelDrafter]:
        """The draft models that the strategy has opened."""
        return self.resources.drafters

    @property
    def batch(self) -> int:
        """Rows that the host looks at."""
        return sum(member.rows for member, _ in self.members)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return [length for member, _ in self.members for length in member.lengths]

    @property
    def finished(self) -> list[bool]:
        return [ended for member, _ in self.members for ended in member.finished]

    @property
    def culprit(self) -> str:
        """The strategy as messages name it."""
        strategy = self.request.strategy
        return f"strategy {strategy.name!r} ({self.request.origin or type(strategy).__module__})"

    def read_prompts(self, lengths: list[int], reusable: list[int], *, leave_last_chunk: bool = False) -> None:
        """Prefills the rows.

        Args:
            lengths: tokens per row.
            reusable: how many of them have their keys and values in place.
            leave_last_chunk: whether the end of the prompts is left to the first step; a recorded one has one size.
        """
        shows = self.request.strategy.reads_prompt
        run = self._read_and_show if shows else self.prefill
        reused, left = self.session.prefill(
            lengths, reusable, self.request.runtime.prefill_chunk, run, leave_last_chunk=leave_last_chunk, padded=shows
        )
        self.pending = self.prompt_left = left  # tokens of the prompts that the first step reads
        self.report.reused = reused[: self.batch]

    def read_rest(self) -> None:
        """Reads what was left to the first step: a draft in the target's own slots begins behind it."""
        if not self.prompt_left:
            return
        begin = (self.rows.length - 1 - self.prompt_left).clamp(min=0)
        latest = max(max(self.lengths) - 1 - self.prompt_left, 0)
        self.session.read(self.rows, begin, latest, 0, self.prompt_left, self.prefill)
        self.pending = self.prompt_left = 0

    @property
    def prefill(self) -> Callable[..., None]:
        """Reads a stretch of the prompts, see :meth:`~decoders.engine.model.compiled.tiers.ForwardPass.prefill`."""
        return partial(self.forward_pass.prefill, recordings=self.session.recordings)

    def _read_and_show(self, tokens: Tensor, begin: Tensor, buffers: CacheBuffers, view: Tensor, latest: int) -> None:
        """Runs a stretch of the prompts and hands it to the strategy. tokens: ``[B, N]`` from slots `begin` ``[B]`` on."""
        logits = self.request.strategy.prompt_logits
        self.show(self.read_chunk(self.rows.length, tokens, begin, buffers, view, latest, logits=logits), latest)

    def show(self, chunk: PromptChunk, latest: int) -> None:
        """Hands a stretch of the prompts to the strategy. latest: largest of the slots at which it begins."""
        for module in self.resources.modules:  # what is read behind the prompts' ends needs room as well
            module.reserve(latest + chunk.tokens.shape[1])
        strategy = self.request.strategy
        with untouched("prefill", strategy, chunk):
            strategy.prefill(self.state, chunk)

    def read_chunk(
        self, lengths: Tensor, tokens: Tensor, begin: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool
    ) -> PromptChunk:  # fmt: skip
        """Runs a stretch of texts for a strategy that reads prompts.

        Args:
            lengths: ``[B]``, of the texts.
            tokens, begin, buffers, view, latest: as of :meth:`Target.features`.
            logits: whether the chunk has them.
        """
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        valid = positions < lengths[:, None] - 1
        result = self.forward_pass.features(
            tokens, begin, buffers, view, latest, logits=logits, valid=valid, recordings=self.session.recordings
        )
        return PromptChunk(tokens, positions, valid, result.hidden, result.layers, result.logits if logits else None)

    def start(self) -> None:
        """Has the strategy begin with the rows as they are."""
        strategy, context = self.request.strategy, self.resources.context()
        with untouched("start", strategy, context.sequences):
            self.state = strategy.start(context)

    def rebatch(self, sources: list[int]) -> None:
        """Tells the strategy, its draft models and modules which rows there are now.

        Args:
            sources: which row of the batch before each row is, -1 for one that is new.
        """
        strategy, context = self.request.strategy, self.resources.rebatch(sources)
        with untouched("rebatch", strategy, context.sequences):
            self.state = strategy.rebatch(self.state, torch.tensor(sources, device=self.target.device), context)

    def make_step(self) -> StepFunction:
        return make_step(
            self.engine, self.forward_pass, self.request, self.verifier, self.members, self.session.recordings
        )

    def fit_blocks(self) -> None:
        """Says how blocks are padded, by what the next pass runs as. Budgets depend on it: a strategy starts with it."""
        self.forward_pass.fit(self.blocks, self.batch)
        # Text that is run in front of a block is a multiple of nodes, and then the block is one as well.
        if self.pending:
            self.blocks.single = False

    def advance(self) -> None:
        """One step of all rows: propose, mask, forward + verify + commit, observe."""
        state, timings = self.state, self.report.timings
        before = replace(timings)
        stopwatch = Stopwatch(timings)
        self.renew_keys()
        self.where = "propose"
        skipped = self._prunes and self.worth is not None and not self.worth.due()
        draft = Draft.nothing(self.width, self.target.device) if skipped else self.propose(state, max(self.lengths))
        self.fit_blocks()
        draft = self.pruned(draft)
        if skipped:
            self._verified = 0
        block = self.block_of(draft)
        self.target.ranks.check_draft(draft, self.lengths)
        self.where = "forward pass and verification"
        drafting = stopwatch.next()
        timings.propose += drafting
        block = self.masked(draft, block)
        timings.mask += stopwatch.next()
        passes, replays = self.engine.compiled_passes, self.session.replays
        out = self.step(draft, block, self.rows)
        self.raise_faults(wait=False)
        compiled, replayed = self.engine.compiled_passes > passes, self.session.replays > replays
        self.report.compiled_steps += compiled
        self.report.replayed_steps += replayed
        # The one place where the host waits for the device.
        summary, new = self.session.lists(out.summary, out.new)
        outcome = Outcome.of(summary, new, self.batch)
        core = stopwatch.next()
        if replayed:
            self.book_replay(drafting + core)
        if self.prompt_left and not self.report.steps:
            self.report.prefill_steps = 1
            timings.prefill += core  # says nothing of what nodes cost
        else:
            self.learn_cost(core, draft, block, outcome, compiled, replayed, None if skipped else drafting)
        if self.worth is not None:
            self.worth.follow([tokens[:count] for tokens, count in zip(outcome.new, outcome.emitted, strict=True)])
        if not self.report.steps:
            self.report.time_to_first_token = timings.prefill + timings.steps
        for member, first in self.members:
            if member.criteria is not None:
                self.where = "stopping criteria"
                with self.callback_of(member):
                    part, end = outcome.part(first, member.rows), first + member.rows
                    member.criteria.apply(part, out.of_rows(first, end), self.rows.of_rows(first, end), member.finished)
                    outcome.put(first, part)
        if (states := self.rows.buffers.states) is not None:  # cannot be cut back: only now is it known how far rows go
            timings.host += stopwatch.next()
            states.commit(out.path, out.summary[0], self.rows.length)
            timings.core += stopwatch.next()
        if self.guide is not None:
            self.guide.commit(out, self.rows.finished, outcome)
        timings.mask += stopwatch.next()
        self.where = "observe"
        goes_with_draft = self.request.strategy.misses_steps
        if not (skipped and goes_with_draft):
            self.observe(state, out)
        observing = stopwatch.next()
        timings.observe += observing
        if goes_with_draft and not skipped:
            self._learning = observing
        self.where = "streamer"
        self.book(outcome, out)
        if self.target.multiple > 1:
            self.pending = round_up(branch_length(out.path, outcome.emitted), self.target.multiple)
        timings.host += stopwatch.next()
        spent = timings.since(before)
        for member, _ in self.members:
            if member.report is not self.report:
                member.report.share(spent, self.report.nodes, compiled, replayed)

    def learn_cost(
        self, core: float, draft: Draft, block: NodeBlock, outcome: Outcome, compiled: bool, replayed: bool,
        drafting: float | None,
    ) -> None:  # fmt: skip
        """Books the `core` seconds of a step. drafting: what its draft took, None if none was to be made."""
        nodes = block.draft_tokens.shape[1] + 1 + block.text.length
        if block.piece is not None:  # says nothing of what nodes cost
            read = block.piece.tokens.shape[1]
            self.piece_seconds = core * read / (read + nodes * self.width)
            self.report.timings.core += core - self.piece_seconds
            return
        self.report.timings.core += core
        if not draft.tokens.shape[1]:
            self.forward_pass.book_single(core, self.batch)
        if self.worth is None and self.resources.costs is None:
            return
        if self.session.recordings is not None and not replayed:  # the next steps of this size will be
            return
        agreed = self.target.ranks.first_number
        seconds = agreed(core)
        if self.worth is not None:
            own = None if drafting is None else agreed(drafting + self._learning)
            self.worth.observe(nodes, seconds, compiled, outcome.emitted, own)
        if self.resources.costs is not None:
            self.resources.costs.observe(nodes, seconds, max(self.lengths), compiled)

    @property
    def tiers(self) -> tuple:
        """What of a step runs compiled now: of the target's pass, those of draft models, and the strategy's functions."""
        target = self.forward_pass.tier(self.width, self.request.plan)
        return target, self.engine.functions_ready, *(drafter.tiers for drafter in self.drafters)

    def book_replay(self, seconds: float) -> None:
        """Notes the time of a replayed step with all whose passes it may hold: once it was long enough, they are compiled."""
        share = seconds / (1 + len(self.drafters))
        self.forward_pass.book_replay(share, self.width)
        for drafter in self.drafters:
            drafter.book_replay(share)

    def renew_keys(self) -> None:
        """Other verifiers than the coupled one want noise that no step has seen before."""
        if self.verifier is not None:
            self.rows.sampling.keys.copy_(step_keys(self.noise_keys, self.rows.length))

    @contextmanager
    def callback_of(self, member: RequestOutput) -> Iterator[None]:
        """Where requests share steps, what a callback raises ends the request that it belongs to."""
        try:
            yield
        except Exception as error:
            if not self.capacity:
                raise
            error.add_note(f"decoders: {self.where} of one request, after {member.report.steps} steps")
            member.error = member.error or error

    def new_guide(self) -> Guide | None:
        """A guide at the beginning of every row's text."""
        if not self.request.plan.masked:
            return None
        grammars = [*self.request.grammars, *[None] * (self.width - len(self.request.grammars))]
        compile = self.resources.settings.compiler(self.engine)
        return guide_of(grammars, self.target.vocab_size, self.target.device, compile, self.target.static)

    def propose(self, state: Any, length: int) -> Draft:
        """What the strategy proposes, shown `length` slots of the rows."""
        strategy, sequences = self.request.strategy, self.session.view(length)[1]
        with untouched("propose", strategy, sequences):
            return strategy.propose(state, sequences)

    @property
    def _prunes(self) -> bool:
        """Whether what is drafted need not be verified. Other verifiers, and strategies that learn from every step, see all of it."""
        strategy = self.request.strategy
        return not self.target.static and self.verifier is None and (strategy.rests or not strategy.observes)

    def pruned(self, draft: Draft) -> Draft:
        """`draft` without the nodes at its end that no row has a draft token for, or that are not worth verifying."""
        strategy, self._verified = self.request.strategy, None
        if not self._prunes:
            return draft
        check_draft(draft, strategy.name, self.blocks.rows)
        proposed, tree = draft.tokens.shape[1], draft.topology
        draft = without_empty_end(draft, self.rows.finished)
        if self.worth is not None and draft.tokens.shape[1] and draft.has_draft_tokens_only:
            if isinstance(tree, TreeTensors):
                check_tree(tree, self.rows, self.culprit, wait=True)
            draft = draft.head(self.worth.nodes(draft, self.lengths, self.finished, self.blocks.size))
        if draft.tokens.shape[1] < proposed:
            self._verified = draft.tokens.shape[1] + 1
        return draft

    def raise_faults(self, wait: bool) -> None:
        """Raises what hooks did wrong as far as the device saw it; without `wait` only where looking is no waiting."""
        if not self.may_err or (self.target.static and not wait):
            return
        guard.raise_faults(self.rows, self.culprit, f"verifier {self.report.verifier!r}")

    def block_of(self, draft: Draft) -> NodeBlock:
        """A checked draft as the core wants it."""
        draft_tokens, tree = self.blocks.of(draft, self.request.strategy.name)
        if isinstance(draft.topology, TreeTensors):
            self.may_err = self.target.static or self.may_err
            check_tree(draft.topology, self.rows, self.culprit, wait=not self.target.static)
        for drafter in self.drafters:
            drafter.proposed = len(draft.topology)
        # Where steps may be recorded there is room from the beginning: nobody looks later.
        end = (self.longest if self.target.static else max(self.lengths)) + draft_tokens.shape[1] + 1
        self.session.reserve(end)
        self.report.nodes = max(self.report.nodes, draft_tokens.shape[1] + 1)
        text = LeadingText(self.pending, max(self.lengths) - 1 - self.pending) if self.pending else LeadingText()
        self.pending = 0
        piece = self.next_piece() if self.next_piece is not None else None
        return NodeBlock(draft_tokens, tree, self.session.view(end)[0], text=text, piece=piece)

    def masked(self, draft: Draft, block: NodeBlock) -> NodeBlock:
        """`block` with what the grammars allow after each node, and without the draft tokens that they forbid."""
        if self.guide is None:
            return block
        legal, masks = self.guide.block(block.draft_tokens, draft.topology, draft.levels)
        # Other verifiers know what a draft token was drawn from: taking one out would change the distribution.
        return replace(block, draft_tokens=legal if self.verifier is None else block.draft_tokens, masks=masks)

    def observe(self, state: Any, out: StepOutput) -> None:
        """Shows the strategy what became of its draft."""
        strategy = self.request.strategy
        if not strategy.observes:
            return
        sequences = self.session.view(max(self.lengths) + out.nodes.shape[1])[1]
        step = out.observed(sequences)
        with untouched("observe", strategy, sequences, step):
            strategy.observe(state, step if self._verified is None else replace(step, own_nodes=self._verified))

    def book(self, outcome: Outcome, out: StepOutput | None) -> None:
        """Books a step; `out` is needed for logits and scores only."""
        if self.capacity:
            self.report.steps += 1  # elsewhere its only request counts them
        for member, first in self.members:
            new = member.book(outcome.part(first, member.rows), out, first)
            with self.callback_of(member):
                member.tell(new)
