"""The loop that all strategies share: propose, forward + verify + commit, observe, until every row has ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.steps import StepCosts
from ..report import Report, Stopwatch
from ..strategy import Context, Draft, PromptChunk, Strategy, finishing, no_memory
from ..tree import TreeTensors
from .blocks import NodeBlock
from .buckets import round_up, row_bucket
from .capture import WARM_UP_STEPS
from .core import StepOutput
from .criteria import CriteriaRun, Outcome
from .drafter import CallSettings, ModelDrafter, opener
from .engine import Engine
from .grammar.device_guide import guide_of
from .grammar.guide import Guide
from .guard import check_tree, raise_faults, untouched
from .host_processors import Prefixes
from .invariance import branch_length
from .modules import SlotPasses
from .recording import CallRecording, recordable
from .request import Decoded, Request
from .rows import Rows, sampling_inputs
from .session import OpenSession
from .steps import StepFunction, make_step
from .verify import step_keys


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
    """The state of one call. stack: closes what it opens."""

    def __init__(self, engine: Engine, request: Request, stack: ExitStack) -> None:
        self.engine, self.request, self.stack = engine, request, stack
        self.passes = engine.passes(request.strategy)
        self.target = self.passes.target
        self.batch = len(request.prompts)
        self.width = row_bucket(self.batch, self.target.static)  # rows that a call has not asked for have ended
        self.lengths = [len(p) for p in request.prompts]
        self.generated: list[list[int]] = [[] for _ in range(self.batch)]
        self.logits: list[list[Tensor]] = [[] for _ in range(self.batch)]
        self.scores: list[list[Tensor]] = [[] for _ in range(self.batch)]
        strategy, chosen = request.strategy, request.verifier
        # Where nothing is drawn, all exact rules are one: keep what matches.
        built_in = chosen is None or chosen.coupled or (chosen.exact and not request.plan.sample)
        self.verifier = None if built_in else chosen
        self.finished = [False] * self.batch
        self.where = "while the prompt was read"  # for notes on errors
        self.report = Report(
            strategy=strategy.name, settings=strategy.settings.model_dump(mode="json"),
            exact=strategy.exact and (chosen is None or chosen.exact),
            verifier=chosen.name if chosen is not None else "coupled",
            rows=self.batch, prompt_tokens=list(self.lengths),
            same_bits=self.target.invariance.holds if self.target.invariance is not None else None,
            weights=self.target.precision.weights or "keep", kv_cache=self.target.precision.cache or "keep",
        )  # fmt: skip
        self.prefixes = Prefixes(request.padded_prompt, self.generated, request.pad_token)
        self.may_err = self.verifier is not None  # whether a hook can do wrong what only the device sees
        self.criteria: CriteriaRun | None = None
        if request.criteria is not None:
            self.criteria = CriteriaRun(request.criteria, self.prefixes, self.scores if request.keep_scores else None)
        self.drafters: list[ModelDrafter] = []
        self.modules: list[SlotPasses] = []
        self.state: Any = None  # the strategy's
        self.guide: Guide | None = None
        self.costs: StepCosts | None = None  # once a strategy has asked for them

    @property
    def rows(self) -> Rows:
        return self.session.rows

    def run(self) -> Decoded:
        """Decodes to the end. An exception on the way gets a note, and ``partial``: what was committed before."""
        try:
            self._run()
        except BaseException as error:
            error.add_note(
                f"decoders: {self._culprit}, {self.where}, after {self.report.steps} steps; error.partial is what was written."
            )
            error.partial = self._decoded()  # type: ignore[attr-defined]
            raise
        return self._decoded()

    @property
    def _culprit(self) -> str:
        """The strategy as messages name it."""
        strategy = self.request.strategy
        return f"strategy {strategy.name!r} ({self.request.origin or type(strategy).__module__})"

    def _decoded(self) -> Decoded:
        report = self.report
        report.new_tokens = [len(tokens) for tokens in self.generated]
        report.stages = [drafter.report() for drafter in self.drafters]
        return Decoded(self.generated, report, self.logits, self.scores)

    def _run(self) -> None:
        request, target, timings = self.request, self.target, self.report.timings
        timings.pack, self.engine.preparing = self.engine.preparing, 0.0
        self.stack.enter_context(self.passes.during(request.compile, self.report))
        step = make_step(self.engine, self.passes, request, self.verifier, self.prefixes, self.report)
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
            self._read_prompts(opened, leave=target.reads_ahead and not target.static and request.new_tokens > 0)
        self.where = "start"
        self.state = request.strategy.start(self._context())
        with finishing(request.strategy, lambda: self.state):
            if reads:
                self.where = "prefill"
                self._read_prompts(opened, leave=False)
            timings.prefill = stopwatch.next()
            self._decode(step)

    def _read_prompts(self, opened: OpenSession, leave: bool) -> None:
        """Prefills the rows. leave: whether the end of the prompts is left to the first step; a recorded one has one size."""
        run = self._show if self.request.strategy.reads_prompt else None
        reused, left = self.session.prefill(opened.lengths, opened.reusable, self.request.prefill_chunk, leave, run)
        self.pending = self.prompt_left = left  # tokens of the prompts that the first step reads
        self.report.reused = reused[: self.batch]

    def _show(self, tokens: Tensor, begin: Tensor, view: Tensor, latest: int) -> None:
        """Runs a stretch of the prompts and hands it to the strategy. tokens: ``[B, N]`` from slots `begin` ``[B]`` on."""
        strategy, rows = self.request.strategy, self.rows
        for module in self.modules:  # what is read behind the prompts' ends needs room as well
            module.reserve(latest + tokens.shape[1])
        result = self.target.features(tokens, begin, rows.buffers, view, latest, strategy.prompt_logits)
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        valid = positions < rows.prompt_length[:, None] - 1
        logits = result.logits if strategy.prompt_logits else None
        chunk = PromptChunk(tokens, positions, valid, result.hidden, result.layers, logits)
        strategy.prefill(self.state, chunk)

    def _decode(self, step: StepFunction) -> None:
        """Steps until every row has ended."""
        request = self.request
        self.finished = [request.new_tokens == 0] * self.batch
        recording = None
        if not all(self.finished) and recordable(self):
            recording = CallRecording(self, self.state, step)
            recording.replay_earlier()
            self.state = recording.state
        while not all(self.finished):
            if recording is not None and self.report.steps == WARM_UP_STEPS:
                recording.record_and_replay()
                self.state, recording = recording.state, None
                continue
            self._step(self.state, step)
        if self.guide is not None:
            self.guide.check()
        self._raise_faults(wait=True)
        self.session.keep([max(length - 1 - self.pending, 0) for length in self.lengths])
        self.report.peak_memory = self._memory()
        self.report.details = dict(request.strategy.details(self.state))

    def _step(self, state: Any, step: StepFunction) -> None:
        """Propose, mask, forward + verify + commit, observe."""
        timings = self.report.timings
        stopwatch = Stopwatch(timings)
        self.renew_keys()
        self.where = "propose"
        draft = self.propose(state, max(self.lengths))
        block = self.block_of(draft)
        self.where = "forward pass and verification"
        timings.propose += stopwatch.next()
        block = self.masked(draft, block)
        timings.mask += stopwatch.next()
        passes = self.engine.compiled_passes
        out = step(draft, block, self.rows)
        self._raise_faults(wait=False)
        self.report.compiled_steps += self.engine.compiled_passes > passes
        # The one place where the host waits for the device.
        outcome = Outcome.of(out.summary.tolist(), out.new.tolist(), self.batch)
        if self.prompt_left and not self.report.steps:
            self.report.prefill_steps = 1
            timings.prefill += stopwatch.next()
        else:
            core = stopwatch.next()
            timings.core += core
            if self.costs is not None:
                self.costs.observe(
                    block.draft_tokens.shape[1] + 1, core, max(self.lengths), self.engine.compiled_passes > passes
                )
        if not self.report.steps:
            self.report.time_to_first_token = timings.prefill + timings.steps
        if self.criteria is not None:
            self.where = "stopping criteria"
            self.criteria.apply(outcome, out, self.rows, self.finished)
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

    def renew_keys(self) -> None:
        """Other verifiers than the coupled one want noise that no step has seen before."""
        if self.verifier is not None:
            self.rows.sampling.keys.copy_(step_keys(self.noise_keys, self.rows.length))

    def _context(self) -> Context:
        """What the strategy may prepare itself from."""
        request, rows = self.request, self.rows
        coupled = self.verifier is None
        call = CallSettings(
            request=request, longest=self.longest,
            plan=replace(request.plan, keep_scores=not coupled and request.plan.sample), sampling=rows.sampling,
            block_size=self.blocks.size, report=self.report, stack=self.stack,
        )  # fmt: skip
        if request.plan.masked:
            vocabulary, device = self.target.vocab_size, self.target.device
            grammars = [*request.grammars, *[None] * (self.width - self.batch)]
            self.guide = guide_of(grammars, vocabulary, device, call.compiler(self.engine), self.target.static)
        context = Context(
            rows=self.width, slots=rows.slots, device=self.target.device, compile=call.compiler(self.engine),
            vocab_size=self.target.vocab_size, sequences=self.session.view(max(self.lengths))[1], coupled=coupled,
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
        raise_faults(self.rows, self._culprit, f"verifier {self.report.verifier!r}")

    def block_of(self, draft: Draft) -> NodeBlock:
        """A checked draft as the core wants it."""
        draft_tokens, tree = self.blocks.of(draft, self.request.strategy.name)
        if isinstance(draft.topology, TreeTensors):
            self.may_err = self.target.static or self.may_err
            check_tree(draft.topology, self.rows, self._culprit, wait=not self.target.static)
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
        if type(strategy).observe is Strategy.observe:
            return
        sequences = self.session.view(max(self.lengths) + out.nodes.shape[1])[1]
        with untouched(f"observe of {strategy.name!r}", **vars(sequences), path=out.path, logits=out.logits):
            strategy.observe(state, out.observed(sequences))

    def book(self, outcome: Outcome, out: StepOutput | None) -> None:
        """Books a step; `out` is needed for logits and scores only."""
        request, report = self.request, self.report
        report.steps += 1
        report.accepted += sum(map(min, outcome.accepted, outcome.emitted))  # criteria may have cut the row
        report.drafted += sum(outcome.drafted)
        new = [tokens[:count] for tokens, count in zip(outcome.new, outcome.emitted, strict=True)]
        for row, tokens in enumerate(new):
            if self.finished[row]:
                continue
            count = len(tokens)
            histogram = report.accepted_lengths
            histogram.extend([0] * (count - len(histogram)))
            histogram[count - 1] += 1
            if out is not None and request.keep_logits:
                self.logits[row] += out.logits[row, out.path[row, :count]].unbind(0)
            if out is not None and out.scores is not None:
                self.scores[row] += out.scores[row, out.path[row, :count]].unbind(0)
            self.generated[row] += tokens
            self.lengths[row] += count
        self.finished = [bool(ended) for ended in outcome.ended]
        if request.on_step is not None:
            request.on_step(new, self.finished)

    def _memory(self) -> int:
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device)
        own = self.rows.buffers.nbytes + sum(module.nbytes for module in self.modules)
        return own + sum(drafter.nbytes for drafter in self.drafters)
