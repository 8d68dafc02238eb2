"""What a strategy may use during a call: draft models, modules of its own, what it keeps between calls, measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...costs.steps import StepCosts
from ...strategy import Context, Strategy, no_memory
from .call_settings import CallSettings
from .drafts.drafter import ModelDrafter
from .drafts.modules import SlotPasses
from .drafts.staged import context_draft
from .roster import Roster


class CallResources:
    """Opens what the strategy of a call asks for, and says what it has opened.

    Attributes:
        drafters: draft models.
        modules: drafters that are no language models.
        costs: of a step, once the strategy or :meth:`step_costs` was asked for them.

    Args:
        stack: closes what is opened here.
    """

    def __init__(self, call: Roster, stack: ExitStack) -> None:
        self.call = call
        self._stack = stack.enter_context(ExitStack())
        self.drafters: list[ModelDrafter] = []
        self.modules: list[SlotPasses] = []
        self.costs: StepCosts | None = None
        self._measured = self._measured_rows = False

    def close(self) -> None:
        """Gives back what the strategy has opened; it may open more afterwards."""
        self._stack.close()
        self.drafters.clear()
        self.modules.clear()

    @property
    def settings(self) -> CallSettings:
        """What holds for all models that take part."""
        call, request, rows = self.call, self.call.request, self.call.rows
        return CallSettings(
            request=request, engine=call.engine, session=call.session, read_rest=call.read_rest, longest=call.longest,
            plan=replace(request.plan, keep_scores=call.verifier is not None and request.plan.sample), sampling=rows.sampling,
            block_size=call.blocks.size, report=call.report, stack=self._stack, capacity=call.capacity,
            shared=call.shared,
        )  # fmt: skip

    def context(self) -> Context:
        """What the strategy may prepare itself from: the only place where a call's :class:`Context` is made."""
        call, request, target, settings = self.call, self.call.request, self.call.target, self.settings
        context = Context(
            model=request.model, tokenizer=request.tokenizer, assistant_model=request.assistant_model,
            strategy=request.resolve, vocabulary_of=request.draft_models.vocabulary_of, plan=request.plan,
            new_tokens=None if call.shared else request.new_tokens,
            memory=self._memory_of if request.runtime.memory else no_memory,
            rows=call.width, slots=call.rows.slots, sequences=call.session.view(max(call.lengths))[1],
            sampling=call.rows.sampling, guide=call.guide, coupled=call.verifier is None,
            device=target.device, vocab_size=target.vocab_size, decoder_layers=target.decoder_layers, embed=target.embed,
            clock=target.ranks.clock, compile=settings.compiler(call.engine), head=call.engine.head,
            first_layers=partial(call.engine.first_layers, request.model), module=self._module, costs=self._costs,
        )  # fmt: skip
        return replace(context, draft=context_draft(settings, context, call.guide, self.drafters))

    def _module(
        self, module: nn.Module, *, ahead: int, example: tuple[Tensor, ...], on_device: bool = True
    ) -> SlotPasses:
        """See :attr:`Context.module`."""
        call = self.call
        compile = partial(call.engine.function, compile=call.request.runtime.compile, report=call.report)
        twin = call.engine.module(module, example)
        self.modules.append(SlotPasses(twin, call.width, self._slots, ahead, compile))
        self.modules[-1].on_device = on_device
        return self.modules[-1]

    @property
    def _slots(self) -> int:
        """Room for a row of the call."""
        return max(self.call.longest if self.call.target.static else max(self.call.lengths), self.call.rows.slots)

    def rebatch(self, sources: Sequence[int]) -> Context:
        """Tells what is open which rows there are now, and gives the strategy's new context.

        Args:
            sources: which row of the batch before each row is, -1 for one that is new.
        """
        context = self.context()
        for drafter in list(self.drafters):
            drafter.rebatch(sources, self.settings, context, self.call.guide)
        for module in self.modules:
            module.rebatch(sources, self._slots)
        return context

    def _memory_of(self, key: str, factory: Callable[[], Any], of: Strategy | None = None) -> Any:
        """See :attr:`Context.memory`."""
        request = self.call.request
        return self.call.engine.memory(of or request.strategy, key, factory, request.memory_salt)

    def _costs(self, measure: bool = False) -> StepCosts | None:
        """See :attr:`Context.costs`."""
        if self.costs is None or self.costs.curve is None or (measure and not self._measured):
            call = self.call
            calibration, folder = call.engine.calibration, call.request.cost_folder
            context = max(call.lengths)
            known = calibration.known(folder)
            # Where rows join and leave, measuring every number of them would take too long: what lies between is in proportion.
            if measure and not (call.shared and self._measured_rows):
                rows = sorted({1, call.capacity}) if call.shared else [call.width]
                known = calibration.measured(folder, rows, [context], call.request.runtime.compile)
                self._measured_rows = True
            if known is not None:
                # Budgets of equal calls are equal: only who watches the clock learns from other calls.
                ratios = calibration.ratios(call.width) if measure else None
                self.costs, self._measured = StepCosts(known, call.width, context, call.blocks.size, ratios), measure
        return self.costs if self.costs is not None and self.costs.curve is not None else None

    def step_costs(self) -> StepCosts:
        """What steps of the batch cost: by the curve, or by the steps that were seen if nothing was measured."""
        costs = self.costs or self._costs()
        if costs is None:
            call = self.call
            line = call.engine.calibration.line
            costs = self.costs = StepCosts(None, call.width, max(call.lengths), call.blocks.size, line=line)
        return costs

    @property
    def peak_memory(self) -> int:
        """Bytes that the call has taken at most; beside a CPU those of the caches, which only grow."""
        device = self.call.target.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        own = self.call.rows.buffers.nbytes + sum(module.nbytes for module in self.modules)
        return own + sum(drafter.nbytes for drafter in self.drafters)
