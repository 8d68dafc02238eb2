"""Resources of a strategy during a call: draft models, modules, memory between calls, and measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...common.devices import accelerator
from ...costs.steps import StepCosts
from ...strategy import Context, Strategy, no_memory
from .batch import Batch
from .drafters.drafter import ModelDrafter
from .drafters.modules import SlotPasses
from .drafters.staged import context_draft


class CallResources:
    """The resources that the strategy of a batch has opened.

    Attributes:
        drafters: the open draft models.
        modules: the open drafting networks that are not language models.
        costs: estimates the costs of a step; None until the strategy or the loop needs an estimate.

    Args:
        stack: the batch's stack. When it is closed, all resources are closed.
    """

    def __init__(self, batch: Batch, stack: ExitStack) -> None:
        self.batch = batch
        self._stack = stack.enter_context(ExitStack())
        self.drafters: list[ModelDrafter] = []
        self.modules: list[SlotPasses] = []
        self.costs: StepCosts | None = None
        self._measured = self._measured_rows = False

    def close(self) -> None:
        """Closes all resources; the strategy may open new resources afterwards."""
        self._stack.close()
        self.drafters.clear()
        self.modules.clear()

    def context(self) -> Context:
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
        return replace(context, draft=context_draft(batch, batch, self._stack, context, self.drafters))

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

    def rebatch(self, sources: Sequence[int]) -> Context:
        """Adapts open draft models and modules to the batch's new rows, and returns the strategy's new context.

        sources: see :meth:`Batch.arrange`.
        """
        context = self.context()
        for drafter in list(self.drafters):
            drafter.rebatch(sources, context)
        for module in self.modules:
            module.rebatch(sources, self._slots)
        return context

    def _memory_of(self, key: str, factory: Callable[[], Any], of: Strategy | None = None) -> Any:
        """Returns an object that a strategy keeps between calls, see :attr:`Context.memory`. of: the strategy, if not the call's."""
        request = self.batch.request
        return self.batch.engine.memory(of or request.strategy, key, factory, request.memory_salt)

    def _costs(self, measure: bool = False) -> StepCosts | None:
        """Returns the measured costs of the batch's steps, or None if nothing was measured; see :attr:`Context.costs`."""
        if self.costs is None or self.costs.curve is None or (measure and not self._measured):
            batch = self.batch
            calibration, folder = batch.engine.calibration, batch.request.cost_folder
            context = max(batch.lengths)
            known = calibration.known(folder)
            # If requests join and leave, only two numbers of rows are measured, and only once: 1 and the capacity.
            if measure and not (batch.shared and self._measured_rows):
                rows = sorted({1, batch.capacity}) if batch.shared else [batch.width]
                known = calibration.measured(folder, rows, [context], batch.request.runtime.compile)
                self._measured_rows = True
            if known is not None:
                # Equal calls must have equal node budgets, so ratios observed in earlier calls are used only if costs are measured.
                ratios = partial(calibration.ratios, batch.width) if measure else None
                self.costs, self._measured = StepCosts(known, batch.width, context, batch.blocks.size, ratios), measure
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
