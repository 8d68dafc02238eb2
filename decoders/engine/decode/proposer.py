"""Runs the strategy of a batch: opens its draft models, calls its hooks, and decides which of its draft tokens are verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...common.devices import accelerator
from ...common.host_reads import recorded
from ...costs.steps import StepCosts
from ...costs.worth import DraftWorth
from ...strategy import Context, Draft, HostStep, PromptChunk, Strategy, check_draft, finish_all, no_memory
from ...tree import TreeTensors
from ..model.blocks import without_empty_end
from .batch import Batch
from .core import StepOutput
from .drafters.drafter import ModelDrafter
from .drafters.modules import SlotPasses
from .drafters.staged import context_draft
from .hook_checks import check_tree, untouched
from .output import RequestOutput
from .request import Request
from .verify import Outcome, step_keys


class Proposer:
    """The strategy of a batch, with its state, and the draft models and networks that it has opened.

    Attributes:
        drafters: the open draft models.
        modules: the open drafting networks that are not language models.
        costs: estimates the costs of a step; None until the strategy or the loop needs an estimate.
        state: the strategy's state.
        worth: decides how many nodes of a draft are verified; None with ``prune=False``, or if drafts must not be cut.
        arranged: whether :meth:`arrange` was called yet.
        skipped: whether steps have no draft at present, because drafting does not pay. It is decided anew after every step.

    Args:
        batch: the batch that the strategy drafts for.
        stack: at the end of the call, closes the draft models and networks.
    """

    def __init__(self, batch: Batch, stack: ExitStack) -> None:
        self.batch, self._opened = batch, stack.enter_context(ExitStack())
        self.drafters: list[ModelDrafter] = []
        self.modules: list[SlotPasses] = []
        self.costs: StepCosts | None = None
        self._former: StepCosts | None = None  # the value of `costs` before the last `arrange`
        self._measured = self._has_measured = False
        self.state: Any = None
        self.worth: DraftWorth | None = None
        request, shared = batch.request, batch.shared
        strategy = request.strategy
        # Drafts are not cut or skipped if sizes are static, a verifier judges drafts, or the strategy learns from every step.
        self._prunes = not batch.target.static and batch.verifier is None and (strategy.rests or not strategy.observes)
        if self._prunes and request.runtime.prune:
            ends = [len(prompt) + request.new_tokens for prompt in request.prompts]
            self.worth = DraftWorth(self.step_costs, None if shared else ends, strategy.grade_rates)
        self.skipped = self.arranged = self._started = False
        self._verified: int | None = None  # number of verified nodes, root included, if the draft's end was cut

    def arrange(self, request: Request, members: list[tuple[RequestOutput, int]], sources: Sequence[int]) -> bool:
        """Arranges the rows of the batch (:meth:`Batch.arrange`), and starts or rebatches the strategy.

        Returns:
            whether the strategy was started (for the first time or again); False if it was rebatched.
        """
        batch, strategy = self.batch, request.strategy
        same = self.arranged and request.plan == batch.request.plan
        stays = same and strategy.keeps_rows(self.state)
        batch.where = "rebatch" if stays else "start"
        self.arranged = True
        batch.arrange(request, members, sources, same=same)
        if self.worth is not None:
            self.worth.rebatch(sources[: batch.row_count])
        self.costs, self._former = None, self.costs or self._former
        if stays:
            context = self._rebatched(sources)
            with untouched("rebatch", strategy, context.sequences):
                self.state = strategy.rebatch(self.state, torch.tensor(sources, device=batch.target.device), context)
        else:
            self.finish()
            self._opened.close()
            self.drafters.clear()
            self.modules.clear()
            context = self._context()
            with untouched("start", strategy, context.sequences):
                self.state = strategy.start(context)
            self._started = True
        if self.worth is not None:  # reads the files of measured costs before the first step
            self.step_costs()
        return not stays

    def show(self, chunk: PromptChunk, latest: int) -> None:
        """Passes a chunk of the prompts to the strategy's `prefill`. latest: the largest slot at which a row's chunk begins."""
        self.batch.where = "prefill"
        for module in self.modules:  # padding of the chunk needs slots, too
            module.reserve(latest + chunk.tokens.shape[1])
        strategy = self.batch.request.strategy
        with untouched("prefill", strategy, chunk):
            strategy.prefill(self.state, chunk)

    def details(self) -> dict[str, Any]:
        """The details that the strategy adds to the report."""
        self.batch.where = "details"
        return dict(self.batch.request.strategy.details(self.state))

    def finish(self, cause: BaseException | None = None) -> None:
        """Calls the strategy's `finish` if `start` has run. cause: see :func:`~decoders.strategy.finish_all`."""
        if self._started:
            self._started = False
            if cause is None:
                self.batch.where = "finish"
            finish_all([(self.batch.request.strategy, self.state)], cause)

    @property
    def tiers(self) -> tuple:
        """Which parts of the step are compiled: the target's pass, the strategy's functions, and the draft models' passes."""
        batch = self.batch
        target = batch.forward_pass.tiers.tier(batch.width, batch.request.plan)
        return target, batch.engine.functions_ready, *(drafter.tiers for drafter in self.drafters)

    def book_replay(self, seconds: float) -> None:
        """Divides the seconds of a replayed step equally among the step's models: after enough seconds a model is worth compiling."""
        share = seconds / (1 + len(self.drafters))
        self.batch.forward_pass.tiers.book_replay(share, self.batch.width)
        for drafter in self.drafters:
            drafter.book_replay(share)

    def propose(self) -> Draft:
        """The strategy's draft, without the nodes at its end that are not worth verifying."""
        batch, strategy = self.batch, self.batch.request.strategy
        batch.where = "propose"
        if batch.verifier is not None:  # verifiers other than the built-in coupled rule need fresh noise in every step
            batch.rows.sampling.keys.copy_(step_keys(batch.noise_keys, batch.rows.length))
        if self.skipped:
            draft = Draft.nothing(batch.width, batch.target.device)
        else:
            sequences = batch.session.view(max(batch.lengths))[1]
            if self._shows_lists:
                sequences = replace(sequences, known=batch.known())
            with untouched("propose", strategy, sequences):
                draft = strategy.propose(self.state, sequences)
        check_draft(draft, strategy.name, batch.blocks.rows)
        batch.fit_blocks()
        # The number of pending tokens is a multiple of `Target.multiple`. The block's size must be a multiple, too, so it cannot be 1.
        if batch.pending:
            batch.blocks.single = False
        if batch.verifier is not None:  # the verifier judges the scores on the device
            draft = draft if draft.scores is None else draft.moved(batch.target.device)
        draft = self._pruned(self._without_placeholders(draft))
        if self.skipped:
            self._verified = 0
        for drafter in self.drafters:
            drafter.proposed = draft.tokens.shape[1] + 1
        return draft

    @property
    def _shows_lists(self) -> bool:
        """Whether the strategy also gets the rows as lists on the host: True unless it is `on_device` or a step is being recorded."""
        return not self.batch.request.strategy.on_device and not recorded()

    def _without_placeholders(self, draft: Draft) -> Draft:
        """`draft` without placeholder tokens of images, which occur only in prompts. If a verifier judges drafts, all tokens stay."""
        target = self.batch.target
        if target.vocabulary.placeholders is None or self.batch.verifier is not None:
            return draft
        placeholders = target.vocabulary.placeholders_on_host if draft.on_host else target.vocabulary.placeholders
        assert placeholders is not None  # either both placeholder tensors are None, or neither
        # torch.isin is not used here: for many placeholders or few tokens it sorts, and waits for the device.
        stands_for_images = (draft.tokens[..., None] == placeholders).any(-1)
        return replace(draft, tokens=draft.tokens.masked_fill(stands_for_images, -1))

    def _pruned(self, draft: Draft) -> Draft:
        """`draft` without the nodes at its end that have no draft token in any row, or that are not worth verifying."""
        self._verified = None
        if not self._prunes:
            return draft
        proposed, tree = draft.tokens.shape[1], draft.topology
        draft = without_empty_end(draft, self.batch.rows.finished)
        if self.worth is not None and draft.tokens.shape[1] and draft.has_draft_tokens_only:
            if isinstance(tree, TreeTensors):
                check_tree(tree, self.batch.rows, self.batch.culprit, wait=True)
            draft = draft.head(self.worth.nodes(draft, self.batch.lengths, self.batch.finished))
        if draft.tokens.shape[1] < proposed:
            self._verified = draft.tokens.shape[1] + 1
        return draft

    def learn(self, outcome: Outcome) -> None:
        """Judges the last step's draft by the step's new tokens, and decides whether the next step has a draft."""
        if self.worth is not None:
            self.worth.follow(outcome.written)
            self.skipped = not self.worth.due()

    def observe(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Shows the strategy which of its draft tokens were accepted."""
        batch, strategy = self.batch, self.batch.request.strategy
        batch.where = "observe"
        if not strategy.observes or (self.skipped and strategy.misses_steps):
            return
        sequences = batch.session.view(max(batch.lengths) + out.nodes.shape[1])[1]
        read = None
        if outcome is not None and self._shows_lists:
            sequences = replace(sequences, known=batch.known(outcome))
            padding = batch.width - batch.row_count
            read = HostStep([*outcome.accepted, *[0] * padding], [*outcome.written, *([] for _ in range(padding))])
        step = out.observed(sequences, read)
        with untouched("observe", strategy, sequences, step):
            strategy.observe(self.state, step if self._verified is None else replace(step, own_nodes=self._verified))

    def _context(self) -> Context:
        """Returns a new :class:`Context` for the strategy, with the batch's current rows."""
        batch, request, target = self.batch, self.batch.request, self.batch.target
        models = request.models
        context = Context(
            model=models.model, tokenizer=models.tokenizer, assistant_model=models.assistant_model,
            strategy=request.resolve, vocabulary_of=models.draft_models.vocabulary_of, plan=request.plan,
            new_tokens=None if batch.shared else request.new_tokens,
            memory=self._memory_of if request.runtime.memory else no_memory,
            texts=batch.engine.texts,
            rows=batch.width, slots=batch.rows.slots, sequences=batch.session.view(max(batch.lengths))[1],
            sampling=batch.rows.sampling, guide=batch.guide, coupled=batch.verifier is None,
            device=target.device, vocab_size=target.vocab_size, decoder_layers=target.decoder_layers, embed=target.embed,
            clock=target.ranks.clock, compile=batch.compiler(batch.engine), head=batch.engine.head,
            first_layers=partial(batch.engine.first_layers, models.model), module=self._module, costs=self._costs,
        )  # fmt: skip
        return replace(context, draft=context_draft(batch, batch, self._opened, context, self.drafters))

    def _module(
        self, module: nn.Module, *, ahead: int, example: tuple[Tensor, ...], on_device: bool = True
    ) -> SlotPasses:
        """Prepares the passes of a drafting network, see :attr:`Context.module`."""
        batch = self.batch
        passes = SlotPasses(
            batch.engine.module(module, example), batch.width, self._slots, ahead, batch.compiler(batch.engine)
        )
        passes.on_device = on_device
        self.modules.append(passes)
        return passes

    @property
    def _slots(self) -> int:
        """The number of slots that a row of the batch may need."""
        return max(self.batch.longest if self.batch.target.static else max(self.batch.lengths), self.batch.rows.slots)

    def _rebatched(self, sources: Sequence[int]) -> Context:
        """Adapts open draft models and modules to the batch's new rows, and returns the strategy's new context.

        sources: see :meth:`Batch.arrange`.
        """
        context = self._context()
        for drafter in list(self.drafters):
            drafter.rebatch(sources, context)
        for module in self.modules:
            module.rebatch(sources, self._slots)
        return context

    def _memory_of(self, key: str, factory: Callable[[], Any], of: Strategy | None = None) -> Any:
        """Returns an object that a strategy keeps between calls, see :attr:`Context.memory`. of: the strategy; None for the call's."""
        request = self.batch.request
        return self.batch.engine.memory(of or request.strategy, key, factory, request.memory_salt)

    def _costs(self, measure: bool = False) -> StepCosts | None:
        """Returns the measured costs of the batch's steps, or None if nothing was measured; see :attr:`Context.costs`."""
        if self.costs is None or self.costs.curve is None or (measure and not self._measured):
            batch = self.batch
            calibration, folder = batch.engine.calibration, batch.request.cost_folder
            context = max(batch.lengths)
            known = calibration.known(folder)
            # If requests join and leave, costs are measured only once, and only for two numbers of rows: 1 and the capacity.
            if measure and not (batch.shared and self._has_measured):
                rows = sorted({1, batch.capacity}) if batch.shared else [batch.width]
                known = calibration.measured(folder, rows, [context], batch.request.runtime.compile)
                self._has_measured = True
            if known is not None:
                # Ratios of observed to expected seconds change from call to call, but equal calls must have equal node budgets. So
                # the ratios are used only if the strategy asks to measure costs.
                ratios = partial(calibration.ratios, batch.width) if measure else None
                former = self.costs or self._former
                self.costs = StepCosts(known, batch.width, context, batch.blocks.size, ratios, former=former)
                self._measured = measure
        return self.costs if self.costs is not None and self.costs.curve is not None else None

    def step_costs(self) -> StepCosts:
        """The costs of the batch's steps: from the measured curve if there is one, else from observed steps."""
        costs = self.costs or self._costs()
        if costs is None:
            batch = self.batch
            line = batch.engine.calibration.line
            costs = self.costs = StepCosts(None, batch.width, max(batch.lengths), batch.blocks.size, line=line)
        return costs

    @property
    def peak_memory(self) -> int:
        """The call's peak memory in bytes. On devices other than CUDA and XPU it is the size of the caches, which never shrink."""
        device = self.batch.target.device
        if (module := accelerator(device)) is not None:
            return module.max_memory_allocated(device)
        own = self.batch.rows.buffers.nbytes + sum(module.nbytes for module in self.modules)
        return own + sum(drafter.nbytes for drafter in self.drafters)
