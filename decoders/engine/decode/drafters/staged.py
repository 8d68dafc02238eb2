"""A draft model with a strategy that drafts for it. The loop's own step verifies these drafts, with the draft model as its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ....drafters import Advance, Drafter, Expansion
from ....errors import UnsupportedError
from ....sampling.processors import Masks
from ....strategy import Context, Draft, Sequences, Strategy, check_draft, finish_all, no_costs, no_memory
from ...model.blocks import NodeBlock
from ..batch import Batch
from ..core import StepOutput
from ..hook_checks import untouched
from ..kind import Made
from ..rows import Rows
from ..step import Clock, Stopwatch, step
from ..verify import Outcome
from .drafter import ModelDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedDrafter(ModelDrafter):
    """A draft model with a strategy that drafts for it. Creating it prefills the prompts.

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
                f"{strategy.name} drafts from the target's hidden states or prompt, which are not handed out for a draft model"
            )
        self.strategy, self.stage, self.counts.drafter = strategy, DraftStage(self, strategy), strategy.name
        self._start(context)
        stack.push(lambda kind, error, trace: self._finish(error))

    @property
    def on_device(self) -> bool:
        return self.strategy.on_device and super().on_device

    def advance(self) -> Advance:
        out = step(self.stage, self.stage, StageClock(self))
        assert self.stage.expansion is not None
        return Advance(out.path, out.summary[0], self.stage.expansion)

    def rebatch(self, rows: Sequence[int], context: Context) -> None:
        super().rebatch(rows, context)
        if not self.strategy.keeps_rows(self.stage.state):
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
            self.stage.state = self.strategy.rebatch(self.stage.state, index, inner)

    def static_parts(self) -> dict[str, Any]:
        return super().static_parts() | dict(stage=(Made(self.strategy), self.stage.state))

    def _start(self, outer: Context) -> None:
        context = self._context(outer)
        with untouched("start", self.strategy, context.sequences):
            self.stage.state = self.strategy.start(context)
        self.stage.started = True

    def _finish(self, cause: BaseException | None = None) -> None:
        if self.stage.started:
            self.stage.started = False
            finish_all([(self.strategy, self.stage.state)], cause)

    def _context(self, outer: Context) -> Context:
        """The context of the strategy that drafts for this model: in it, this model is the target."""
        context = replace(
            outer, slots=self.rows.slots, vocab_size=self.vocab_size, level=self.counts.level,
            compile=self.batch.compiler(self.engine), sequences=self.session.view(self.reach)[1], guide=self.guide,
            costs=no_costs, memory=no_memory, texts=None, decoder_layers=0,
        )  # fmt: skip
        return replace(context, draft=context_draft(self.batch, self, self.stack, context, self.inner))


class DraftStage:
    """The proposer, and also the batch, that :func:`~decoders.engine.decode.step.step` gets if a draft model verifies.

    Attributes:
        state: the strategy's state.
        started: whether the strategy has been started and not finished yet.
        expansion: continuations of the nodes of the last block.
    """

    def __init__(self, drafter: StagedDrafter, strategy: Strategy) -> None:
        self.drafter, self.strategy = drafter, strategy
        self.state: Any = None
        self.started = False
        self.expansion: Expansion | None = None
        self._sequences: Sequences | None = None

    @property
    def rows(self) -> Rows:
        return self.drafter.rows

    def propose(self) -> Draft:
        """The strategy's draft, which continues the tokens that the draft model has drafted so far."""
        sequences = self.drafter.covering(0)[1]
        with untouched("propose", self.strategy, sequences):
            draft = self.strategy.propose(self.state, sequences)
        check_draft(draft, self.strategy.name, len(sequences.length))
        for drafter in self.drafter.inner:
            drafter.proposed = len(draft.topology)
        return draft

    def block_of(self, draft: Draft) -> NodeBlock:
        draft_tokens, tree = self.drafter.blocks.of(draft)
        view, self._sequences = self.drafter.covering(draft_tokens.shape[1] + 1)
        return NodeBlock(draft_tokens, tree, view)

    def mask(self, draft: Draft, block: NodeBlock) -> NodeBlock:
        if self.drafter.guide is None:
            return block
        guide = self.drafter.guide
        draft_tokens, masks = guide.block(block.draft_tokens, block.shape_of(draft, guide.on_device), draft.levels)
        # The masks' replacements are left out: they are tokens of the target, which the draft model's vocabulary may lack.
        return replace(block, draft_tokens=draft_tokens, masks=Masks(masks.allowed))

    @property
    def core(self) -> DraftStage:
        return self

    def forward_verify_commit(self, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        """Runs :meth:`DraftCore.advance` on the pending tokens and the block, and stores the expansion of the block's nodes."""
        pending = self.drafter.counts.range(self.drafter.reach)
        out, self.expansion = self.drafter.run(
            "advance", block.view, block.draft_tokens, block.tree, pending, block.masks
        )
        return out

    def read(self, draft: Draft, block: NodeBlock, out: StepOutput) -> None:
        """Returns None: the tokens that a draft model accepts stay on the device."""

    def stop(self, out: StepOutput, outcome: Outcome) -> None: ...
    def deliver(self, out: StepOutput, outcome: Outcome) -> None: ...

    def settle(self, out: StepOutput, outcome: Outcome | None) -> None:
        if self.drafter.guide is not None:
            self.drafter.guide.accept(out)

    def observe(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Shows the strategy which of its draft tokens were accepted."""
        self.drafter.counts.accepted(out.summary)
        if not self.strategy.observes:
            return
        assert self._sequences is not None
        shown = out.observed(self._sequences)
        with untouched("observe", self.strategy, self._sequences, shown):
            self.strategy.observe(self.state, shown)


class StageClock(Clock):
    """Times the stage's strategy; :meth:`ModelDrafter.run` times the draft model."""

    def __init__(self, drafter: StagedDrafter) -> None:
        self._counts, self._stopwatch = drafter.counts, Stopwatch(drafter.batch.report.timings)

    def masked(self) -> None:
        self._counts.stage_seconds += self._stopwatch.next()

    def read(self, draft: Draft, block: NodeBlock, outcome: Outcome | None) -> None:
        self._stopwatch.next()

    def observed(self) -> None:
        self._counts.stage_seconds += self._stopwatch.next()


def context_draft(
    batch: Batch, above: Batch | ModelDrafter, stack: ExitStack, context: Context, opened: list[ModelDrafter]
) -> Callable[..., Drafter]:
    """Returns ``Context.draft`` for the strategy that gets `context` and drafts for `above`. It adds open drafters to `opened`."""

    def draft(
        model: PreTrainedModel | str, *, ahead: int, children: int = 1, stage: Strategy | None = None, seldom: bool = False,
    ) -> Drafter:  # fmt: skip
        if stage is None:
            opened.append(ModelDrafter(batch, above, stack, context, model, ahead, children, seldom))
        else:
            opened.append(StagedDrafter(batch, above, stack, context, model, ahead, children, stage))
        return opened[-1]

    return draft
