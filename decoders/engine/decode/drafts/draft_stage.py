"""A strategy that drafts for a draft model, for the length of a call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from ....errors import UnsupportedError
from ....strategy import Context, Draft, Sequences, Step, Strategy, finish_all
from ..call_settings import CallSettings
from ..grammar.guide import Guide
from ..guard import untouched

if TYPE_CHECKING:
    from .drafter import ModelDrafter


class DraftStage:
    """A strategy and its state, told of one draft model's rows as the loop tells strategies of the target's.

    Args:
        strategy: drafts for the draft model.
        context: the draft model in the target's place.
        drafters: where `context` lists the draft models that the strategy opens.
        stack: closed with the call, and the strategy's state with it.

    Raises:
        UnsupportedError: the strategy reads what only the target's passes hand out.
    """

    def __init__(self, strategy: Strategy, context: Context, drafters: list[ModelDrafter], stack: ExitStack) -> None:
        if strategy.reads_layers or (strategy.reads_prompt and not strategy.rests):
            raise UnsupportedError(
                f"{strategy.name} drafts from the target's hidden states or prompt, which are not handed out for a draft model"
            )
        self.strategy, self.drafters = strategy, drafters
        self.state: Any = None
        self._started = False  # it has a state that is not finished
        self._start(context)
        stack.push(lambda kind, error, trace: self._finish(error))

    def rebatch(self, rows: Sequence[int], call: CallSettings, context: Context, guide: Guide | None) -> None:
        """Rows have come or gone.

        Args:
            rows: which row of the batch before each row is, -1 for one that is new.
            call, guide: of the draft model's rows, for the strategy's own draft models.
            context: as in the beginning, of the rows as they are now.
        """
        if not self.strategy.keeps_rows(self.state):
            self._finish()
            self.drafters.clear()
            self._start(context)
            return
        for drafter in list(self.drafters):
            drafter.rebatch(rows, call, context, guide)
        assert context.sequences is not None
        index = torch.tensor(rows, device=context.sequences.length.device)
        with untouched("rebatch", self.strategy, context.sequences):
            self.state = self.strategy.rebatch(self.state, index, context)

    def _start(self, context: Context) -> None:
        with untouched("start", self.strategy, context.sequences):
            self.state = self.strategy.start(context)
        self._started = True

    def _finish(self, cause: BaseException | None = None) -> None:
        if self._started:
            self._started = False
            finish_all([(self.strategy, self.state)], cause)

    def propose(self, sequences: Sequences) -> Draft:
        """What the strategy drafts behind the tokens that the draft model has written so far."""
        with untouched("propose", self.strategy, sequences):
            draft = self.strategy.propose(self.state, sequences)
        for drafter in self.drafters:
            drafter.proposed = len(draft.topology)
        return draft

    def observe(self, step: Step) -> None:
        """Shows the strategy what became of its draft."""
        if not self.strategy.observes:
            return
        with untouched("observe", self.strategy, step.sequences, step):
            self.strategy.observe(self.state, step)

    def static_parts(self) -> tuple:
        """What a recorded round reads of it; see :mod:`~decoders.engine.model.static_inputs`."""
        return type(self.strategy), repr(self.strategy), self.state
