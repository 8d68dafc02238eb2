"""A draft model with a strategy that drafts for it. The draft model verifies the drafts of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ....drafters import Advance, Drafter
from ....errors import UnsupportedError
from ....report.surroundings import Stopwatch
from ....sampling.processors import Masks
from ....strategy import Context, Strategy, check_draft, finish_all, no_costs, no_memory
from ...model.blocks import NodeBlock
from ..batch import Batch
from ..hook_checks import untouched
from ..kind import ByAttributes
from .drafter import ModelDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedDrafter(ModelDrafter):
    """A draft model with a strategy that drafts for it. The constructor prefills the prompts.

    Args:
        strategy: drafts for the draft model. All other arguments: see :class:`ModelDrafter`.

    Raises:
        UnsupportedError: the strategy reads hidden states or prompts, which only the target's passes return.
    """

    def __init__(
        self, batch: Batch, above: Batch | ModelDrafter, stack: ExitStack, context: Context, model: PreTrainedModel | str,
        ahead: int, children: int, strategy: Strategy,
    ) -> None:  # fmt: skip
        super().__init__(batch, above, stack, context, model, ahead, children)
        if strategy.reads_layers or (strategy.reads_prompt and not strategy.rests):
            raise UnsupportedError(
                f"{strategy.name} cannot draft for a draft model: it needs the target's hidden states or prompt. Take another `stage`"
            )
        self.strategy, self.state, self.counts.drafter = strategy, None, strategy.name
        self._start(context)
        stack.push(lambda kind, error, trace: self._finish(error))

    @property
    def on_device(self) -> bool:
        return self.strategy.on_device and super().on_device

    def advance(self) -> Advance:
        """Runs a step in which this model verifies its strategy's draft, without reading the accepted tokens from the device."""
        stopwatch, strategy, guide = Stopwatch(self.batch.report.timings), self.strategy, self.guide
        sequences = self.covering(0)[1]
        with untouched("propose", strategy, sequences):
            draft = strategy.propose(self.state, sequences)
        check_draft(draft, strategy.name, len(sequences.length))
        for drafter in self.inner:
            drafter.proposed = len(draft.topology)
        draft_tokens, tree = self.blocks.of(draft)
        view, sequences = self.covering(draft_tokens.shape[1] + 1)
        masks: Masks | None = None
        if guide is not None:
            shape = NodeBlock(draft_tokens, tree, view).shape_of(draft, guide.on_device)
            draft_tokens, masks = guide.block(draft_tokens, shape, draft.levels)
            masks = Masks(masks.allowed)  # without replacements: the draft model's vocabulary may lack these tokens
        self.counts.stage_seconds += stopwatch.next()
        pending = self.counts.range(self.reach)
        out, expansion = self.run("advance", view, draft_tokens, tree, pending, masks)
        stopwatch.next()  # leaves out the seconds of `run`, which are in `forward_seconds`
        if guide is not None:
            guide.accept(out)
        self.counts.accepted(out.summary)
        if strategy.observes:
            shown = out.observed(sequences)
            with untouched("observe", strategy, sequences, shown):
                strategy.observe(self.state, shown)
        self.counts.stage_seconds += stopwatch.next()
        return Advance(out.path, out.summary[0], expansion)

    def rebatch(self, rows: Sequence[int], context: Context) -> None:
        super().rebatch(rows, context)
        if not self.strategy.keeps_rows(self.state):
            self._finish()
            self.inner.clear()
            self._start(context)
            return
        inner = self._context(context)
        for drafter in list(self.inner):
            drafter.rebatch(rows, inner)
        assert inner.sequences is not None
        index = torch.tensor(rows, device=inner.sequences.length.device)
        with untouched("rebatch", self.strategy, inner.sequences):
            self.state = self.strategy.rebatch(self.state, index, inner)

    def static_parts(self) -> dict[str, Any]:
        return super().static_parts() | dict(stage=(ByAttributes(self.strategy), self.state))

    def _start(self, outer: Context) -> None:
        context = self._context(outer)
        with untouched("start", self.strategy, context.sequences):
            self.state = self.strategy.start(context)
        self._started = True

    def _finish(self, cause: BaseException | None = None) -> None:
        if self._started:
            self._started = False
            finish_all([(self.strategy, self.state)], cause)

    def _context(self, outer: Context) -> Context:
        """The context of the strategy that drafts for this model: in it, this model is the target."""
        context = replace(
            outer, slots=self.rows.slots, vocab_size=self.vocab_size, level=self.counts.level,
            compile=self.batch.compiler(self.engine), sequences=self.session.view(self.reach)[1], guide=self.guide,
            costs=no_costs, memory=no_memory, texts=None, decoder_layers=0,
        )  # fmt: skip
        return replace(context, draft=context_draft(self.batch, self, self.stack, context, self.inner))


def context_draft(
    batch: Batch, above: Batch | ModelDrafter, stack: ExitStack, context: Context, opened: list[ModelDrafter]
) -> Callable[..., Drafter]:
    """Returns ``Context.draft``, which opens a drafter and adds it to `opened`, for the strategy that gets `context`. above: the model
    that verifies the strategy's drafts.
    """

    def draft(
        model: PreTrainedModel | str, *, ahead: int, children: int = 1, stage: Strategy | None = None, seldom: bool = False,
    ) -> Drafter:  # fmt: skip
        if stage is None:
            opened.append(ModelDrafter(batch, above, stack, context, model, ahead, children, seldom))
        else:
            opened.append(StagedDrafter(batch, above, stack, context, model, ahead, children, stage))
        return opened[-1]

    return draft
