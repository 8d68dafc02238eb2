"""The loop that all strategies share: propose, forward + verify + commit, observe, until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.steps import StepCosts
from ..report import Report, Stopwatch
from ..strategy import Context, Draft, PromptChunk, Strategy, finishing, no_memory
from ..tree import Topology, TreeTensors
from .blocks import NodeBlock
from .buckets import round_up, row_bucket
from .capture import WARM_UP_STEPS
from .core import StepOutput
from .criteria import Outcome
from .drafter import CallSettings, ModelDrafter, opener
from .engine import Engine
from .grammar.device_guide import guide_of
from .grammar.guide import Guide
from .guard import check_tree, raise_faults, untouched
from .invariance import branch_length
from .modules import SlotPasses
from .recording import CallRecording, recordable
from .request import Decoded, Request
from .rows import Rows, sampling_inputs
from .steps import StepFunction, make_step
from .verify import step_keys
from .worth import DraftWorth
from .written import Written


def decode(engine: Engine, request: Request) -> Decoded:
    """Runs a call to its end. Calls on one engine run one after the other."""
    # Packed weights, compiled code and kept texts are in the model's own precision, in whatever context the call is made.
    own_precision = torch.autocast(engine.target.device.type, enabled=False)
    with (
        engine.lock,
        engine.active(),
        own_precision,
        torch.inference_mode(False),
        torch.no_grad(),
        ExitStack() as stack,
    ):
        return Call(engine, request, stack).run()  # the stack gives sessions back, whatever happens


class Call:
    """Rows that are decoded together, and what belongs to their steps; what belongs to a request is its :class:`Written`.

    A fixed batch is one request whose rows come and go together. In :class:`~decoders.engine.lane.Lane` requests of one row
    come and go between two steps.

    Attributes:
        members: the requests and the first row of each, in the order of rows.
        held: length of every row that no member has: its step writes behind that, where nothing is kept.
        capacity: most rows there can be, where requests come and go.
        worth: how deep drafts are verified, where it is counted.
        isolates: whether what a callback of one request raises ends that request alone.

    Args:
        stack: closes what is opened here.
    """

    def __init__(self, engine: Engine, request: Request, stack: ExitStack) -> None:
        self.engine, self.request, self.stack = engine, request, stack
        self.passes = engine.passes(request.strategy)
        self.target = self.passes.target
        self.width = row_bucket(len(request.prompts), self.target.static)  # rows nobody has asked for have ended
        chosen = request.verifier
        # Where nothing is drawn, all exact rules are one: keep what matches.
        built_in = chosen is None or chosen.coupled or (chosen.exact and not request.plan.sample)
        self.verifier = None if built_in else chosen
        self.where = "while the prompt was read"  # for notes on errors
        self.report = self.new_report(request)
        self.members: list[tuple[Written, int]] = []
        self.held = [1] * len(request.prompts)
        self.isolates, self.capacity = False, 0
        self.worth: DraftWorth | None = None
        self.may_err = self.verifier is not None  # whether a hook can do wrong what only the device sees
        self.drafting = stack.enter_context(ExitStack())  # closes what the strategy has opened
        self.drafters: list[ModelDrafter] = []
        self.modules: list[SlotPasses] = []
        self.state: Any = None  # the strategy's
        self.guide: Guide | None = None
        self.costs: StepCosts | None = None  # once a strategy has asked for them
        self.pending = self.prompt_left = 0

    def new_report(self, request: Request) -> Report:
        """An empty report on a request that is decoded here."""
        strategy, chosen, target = request.strategy, request.verifier, self.target
        return Report(
            strategy=strategy.name, settings=strategy.settings.model_dump(mode="json"),
            exact=strategy.exact and (chosen is None or chosen.exact),
            verifier=chosen.name if chosen is not None else "coupled",
            rows=len(request.prompts), prompt_tokens=[len(prompt) for prompt in request.prompts],
            same_bits=target.invariance.holds if target.invariance is not None else None,
            weights=target.precision.weights or "keep", kv_cache=target.precision.cache or "keep",
        )  # fmt: skip

    @property
    def rows(self) -> Rows:
        return self.session.rows

    @property
    def batch(self) -> int:
        """Rows that the host looks at."""
        return len(self.held)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        lengths = list(self.held)
        for member, first in self.members:
            lengths[first : first + member.rows] = member.lengths
        return lengths

    @property
    def finished(self) -> list[bool]:
        finished = [True] * self.batch
        for member, first in self.members:
            finished[first : first + member.rows] = member.finished
        return finished

    def run(self) -> Decoded:
        """Decodes to the end. An exception on the way gets a note, and ``partial``: what was committed before."""
        self.members.append((Written(self.request, self.report), 0))
        try:
            self._run()
        except BaseException as error:
            error.add_note(
                f"decoders: {self.culprit}, {self.where}, after {self.report.steps} steps; error.partial is what was written."
            )
            error.partial = self._decoded()  # type: ignore[attr-defined]
            raise
        return self._decoded()

    @property
    def culprit(self) -> str:
        """The strategy as messages name it."""
        strategy = self.request.strategy
        return f"strategy {strategy.name!r} ({self.request.origin or type(strategy).__module__})"

    def _decoded(self) -> Decoded:
        self.report.stages = [drafter.report() for drafter in self.drafters]
        return self.members[0][0].decoded()

    def _run(self) -> None:
        request, target, timings = self.request, self.target, self.report.timings
        timings.pack, self.engine.preparing = self.engine.preparing, 0.0
        self.stack.enter_context(self.passes.during(request.compile, self.report))
        self.step = self.make_step()
        stopwatch = Stopwatch(timings)
        sampling = sampling_inputs(request.values, request.seed, self.width, request.stop_tokens, target.device)
        self.longest = max(self.lengths) + request.new_tokens
        slots = max(self.longest, request.slots or 0)
        # A strategy that reads prompts reads all of them: equal calls draft alike, and its own cache has no holes.
        reads = request.strategy.reads_prompt
        opened = self.stack.enter_context(
            self.engine.sessions.open(request.prompts, request.new_tokens, sampling, slots, request.reuse and not reads)
        )
        self.session, self.blocks = opened.session, opened.session.blocks
        self.noise_keys = sampling.keys.clone()
        if not reads:
            leave = target.reads_ahead and not target.static and request.new_tokens > 0
            self.read_prompts(opened.lengths, opened.reusable, leave)
        self.where = "start"
        self.guide = self.new_guide()
        self.state = request.strategy.start(self.context())
        with finishing(request.strategy, lambda: self.state):
            if reads:
                self.where = "prefill"
                self.read_prompts(opened.lengths, opened.reusable, leave=False)
            timings.prefill = stopwatch.next()
            self._decode()

    def read_prompts(self, lengths: list[int], reusable: list[int], leave: bool) -> None:
        """Prefills the rows.

        Args:
            lengths: tokens per row.
            reusable: how many of them have their keys and values in place.
            leave: whether the end of the prompts is left to the first step; a recorded one has one size.
        """
        run = self._show if self.request.strategy.reads_prompt else None
        reused, left = self.session.prefill(lengths, reusable, self.request.prefill_chunk, leave, run)
        self.pending = self.prompt_left = left  # tokens of the prompts that the first step reads
        self.report.reused = reused[: self.batch]

    def _show(self, tokens: Tensor, begin: Tensor, view: Tensor, latest: int) -> None:
        """Runs a stretch of the prompts and hands it to the strategy. tokens: ``[B, N]`` from slots `begin` ``[B]`` on."""
        strategy, rows = self.request.strategy, self.rows
        for module in self.modules:  # what is read behind the prompts' ends needs room as well
            module.reserve(latest + tokens.shape[1])
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        valid = positions < rows.prompt_length[:, None] - 1
        result = self.target.features(tokens, begin, rows.buffers, view, latest, strategy.prompt_logits, valid)
        logits = result.logits if strategy.prompt_logits else None
        chunk = PromptChunk(tokens, positions, valid, result.hidden, result.layers, logits)
        strategy.prefill(self.state, chunk)

    def _decode(self) -> None:
        """Steps until every row has ended."""
        recording = None
        if not all(self.finished) and recordable(self):
            recording = CallRecording(self, self.state, self.step)
            recording.replay_earlier()
            self.state = recording.state
        while not all(self.finished):
            if recording is not None and self.report.steps == WARM_UP_STEPS:
                recording.record_and_replay()
                self.state, recording = recording.state, None
                continue
            self.advance()
        if self.guide is not None:
            self.guide.check()
        self._raise_faults(wait=True)
        self.session.keep([max(length - 1 - self.pending, 0) for length in self.lengths])
        self.report.peak_memory = self._memory()
        self.report.details = dict(self.request.strategy.details(self.state))

    def make_step(self) -> StepFunction:
        return make_step(self.engine, self.passes, self.request, self.verifier, self.members, self.report)

    def advance(self) -> None:
        """One step of all rows: propose, mask, forward + verify + commit, observe."""
        state, timings = self.state, self.report.timings
        before = replace(timings)
        stopwatch = Stopwatch(timings)
        self.renew_keys()
        self.where = "propose"
        draft = self.propose(state, max(self.lengths))
        if not self.target.static:
            several = self.batch > 1 and not self.passes.compiles(several=True)
            self.blocks.exact = several and not self.target.rounds
            draft = self.cut(draft)
        block = self.block_of(draft)
        self.where = "forward pass and verification"
        timings.propose += stopwatch.next()
        block = self.masked(draft, block)
        timings.mask += stopwatch.next()
        passes = self.engine.compiled_passes
        out = self.step(draft, block, self.rows)
        self._raise_faults(wait=False)
        compiled = self.engine.compiled_passes > passes
        self.report.compiled_steps += compiled
        # The one place where the host waits for the device.
        outcome = Outcome.of(out.summary.tolist(), out.new.tolist(), self.batch)
        if self.prompt_left and not self.report.steps:
            self.report.prefill_steps = 1
            timings.prefill += stopwatch.next()
        else:
            core = stopwatch.next()
            timings.core += core
            if self.worth is not None:
                self.worth.observe(self.batch, block.draft_tokens.shape[1] + 1, core, outcome.drafted, outcome.accepted)
            if self.costs is not None:
                self.costs.observe(
                    block.draft_tokens.shape[1] + 1, core, max(self.lengths), self.engine.compiled_passes > passes
                )
        if not self.report.steps:
            self.report.time_to_first_token = timings.prefill + timings.steps
        for member, first in self.members:
            if member.criteria is not None:
                self.where = "stopping criteria"
                with self.callback_of(member):
                    part, end = outcome.part(first, member.rows), first + member.rows
                    member.criteria.apply(part, out.of_rows(first, end), self.rows.of_rows(first, end), member.finished)
                    outcome.put(first, part)
        if self.guide is not None:
            self.guide.commit(out, self.rows.finished)
        timings.mask += stopwatch.next()
        self.where = "observe"
        self.observe(state, out)
        timings.observe += stopwatch.next()
        self.where = "streamer"
        self.book(outcome, out)
        if self.target.multiple > 1:
            self.pending = round_up(branch_length(out.path, outcome.emitted), self.target.multiple)
        timings.host += stopwatch.next()
        for member, _ in self.members:
            if member.report is not self.report:
                member.report.share(before, self.report, compiled)

    def renew_keys(self) -> None:
        """Other verifiers than the coupled one want noise that no step has seen before."""
        if self.verifier is not None:
            self.rows.sampling.keys.copy_(step_keys(self.noise_keys, self.rows.length))

    @contextmanager
    def callback_of(self, member: Written) -> Iterator[None]:
        """Where requests share steps, what a callback raises ends the request that it belongs to."""
        try:
            yield
        except Exception as error:
            if not self.isolates:
                raise
            error.add_note(f"decoders: {self.where} of one request, after {member.report.steps} steps")
            member.error = member.error or error

    @property
    def settings(self) -> CallSettings:
        """What holds for all models that take part."""
        request, rows = self.request, self.rows
        return CallSettings(
            request=request, longest=self.longest,
            plan=replace(request.plan, keep_scores=self.verifier is not None and request.plan.sample), sampling=rows.sampling,
            block_size=self.blocks.size, report=self.report, stack=self.drafting, capacity=self.capacity,
        )  # fmt: skip

    def new_guide(self) -> Guide | None:
        """A guide at the beginning of every row's text."""
        if not self.request.plan.masked:
            return None
        grammars = [*self.request.grammars, *[None] * (self.width - len(self.request.grammars))]
        compile = self.settings.compiler(self.engine)
        return guide_of(grammars, self.target.vocab_size, self.target.device, compile, self.target.static)

    def context(self) -> Context:
        """What the strategy may prepare itself from."""
        request, rows, call = self.request, self.rows, self.settings
        context = Context(
            rows=self.width, slots=rows.slots, device=self.target.device, compile=call.compiler(self.engine),
            vocab_size=self.target.vocab_size, sequences=self.session.view(max(self.lengths))[1], coupled=self.verifier is None,
            plan=request.plan, sampling=rows.sampling, guide=self.guide, model=request.model, tokenizer=request.tokenizer,
            assistant_model=request.assistant_model, costs=self._costs,
            decoder_layers=self.target.decoder_layers, embed=self.target.embed, head=self.engine.head, module=self._module,
            memory=self._memory_of if request.memory else no_memory,
        )  # fmt: skip
        if request.resolve is not None:
            context = replace(context, strategy=request.resolve)
        return replace(context, draft=opener(call, context, self.guide, self.drafters))

    def _module(self, module: nn.Module, *, ahead: int, example: tuple[Tensor, ...]) -> SlotPasses:
        """See :attr:`Context.module`."""
        compile = partial(self.engine.function, compile=self.request.compile, report=self.report)
        slots = max(self.longest, self.rows.slots) + ahead
        self.modules.append(SlotPasses(self.engine.module(module, example), self.width, slots, compile))
        return self.modules[-1]

    def _memory_of(self, key: str, factory: Callable[[], Any], of: Strategy | None = None) -> Any:
        """See :attr:`Context.memory`."""
        return self.engine.memory(of or self.request.strategy, key, factory)

    def _costs(self, measure: bool = False) -> StepCosts | None:
        """See :attr:`Context.costs`."""
        if self.costs is None:
            calibration, compile, folder = self.engine.calibration, self.request.compile, self.request.cost_folder
            context = max(self.lengths)
            known = calibration.known(folder)
            if measure:
                known = calibration.measured(folder, [self.width], [context], compile)
            if known is not None:
                self.costs = StepCosts(known, self.width, context, self.blocks.size)
        return self.costs

    def propose(self, state: Any, length: int) -> Draft:
        """What the strategy proposes, shown `length` slots of the rows."""
        strategy, sequences = self.request.strategy, self.session.view(length)[1]
        with untouched(f"propose of {strategy.name!r}", **vars(sequences)):
            return strategy.propose(state, sequences)

    def _raise_faults(self, wait: bool) -> None:
        """Raises what hooks did wrong as far as the device saw it; without `wait` only where looking is no waiting."""
        if not self.may_err or (self.target.static and not wait):
            return
        raise_faults(self.rows, self.culprit, f"verifier {self.report.verifier!r}")

    def cut(self, draft: Draft) -> Draft:
        """`draft` without the nodes at its end that hold no draft token in any row that goes on."""
        if self.verifier is not None or self.request.strategy.observes:
            return draft
        if not isinstance(draft, Draft) or not isinstance(draft.topology, Topology):
            return draft  # what is no draft is refused where drafts are checked
        tokens = draft.tokens
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.shape[1] or len(tokens) != self.width:
            return draft
        drafted = (tokens >= 0) & ~self.rows.finished[:, None]
        count = int((drafted.any(0) * torch.arange(1, tokens.shape[1] + 1)).amax())
        if self.worth is not None and count and draft.topology == Topology.chain(tokens.shape[1]):
            count = self.worth.depth(self.batch, drafted[:, :count].sum(0).tolist())
        if count == tokens.shape[1] or len(draft.topology) != tokens.shape[1] + 1:
            return draft
        return replace(
            draft, tokens=tokens[:, :count], topology=draft.topology.head(count + 1),
            grades=draft.grades[:, :count] if draft.grades is not None else None,
            scores=draft.scores[:, :count] if draft.scores is not None else None,
        )  # fmt: skip

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
        text = (self.pending, max(self.lengths) - 1 - self.pending) if self.pending else (0, 0)
        again, self.pending = text[0] > 0 and self.report.steps > 0, 0
        return NodeBlock(draft_tokens, tree, self.session.view(end)[0], text=text, again=again)

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
        with untouched(f"observe of {strategy.name!r}", **vars(sequences), path=out.path, logits=out.logits):
            strategy.observe(state, out.observed(sequences))

    def book(self, outcome: Outcome, out: StepOutput | None) -> None:
        """Books a step; `out` is needed for logits and scores only."""
        if self.capacity:
            self.report.steps += 1  # elsewhere its only request counts them
        for member, first in self.members:
            new = member.book(outcome.part(first, member.rows), out, first)
            with self.callback_of(member):
                member.tell(new)

    def _memory(self) -> int:
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device)
        own = self.rows.buffers.nbytes + sum(module.nbytes for module in self.modules)
        return own + sum(drafter.nbytes for drafter in self.drafters)
