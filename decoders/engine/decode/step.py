"""One step of decoding, in the order of the papers. Read this file first: the other files of this package are called from here.

If whole steps are recorded (as CUDA graphs), :func:`step` is recorded (:mod:`~decoders.engine.decode.call`). :func:`step` also runs the
steps in which a draft model verifies the drafts of another strategy (:mod:`~decoders.engine.decode.drafters.staged`).
"""

from __future__ import annotations

import time
from typing import Protocol

from ...report import Timings
from ...strategy import Draft
from ..model.blocks import NodeBlock
from .core import StepOutput
from .rows import Rows
from .verify import Outcome


def step(proposer: Proposes, batch: Verifies, clock: Clock | None = None, *, recording: bool = False) -> StepOutput:
    """Runs one step of all rows of `batch`: `proposer` drafts, and each row accepts its own number of draft tokens.

    Args:
        clock: its methods are called when the parts of the step are over.
        recording: whether a device records the step. If so, the host reads nothing, and the caller that replays the step
            delivers its tokens.
    """
    clock = clock or UNTIMED
    clock.begun()
    draft = proposer.propose()
    block = batch.block_of(draft)
    clock.proposed()
    block = batch.mask(draft, block)
    clock.masked()
    # The target's pass, the verification of the nodes, and the update of the rows.
    out = batch.core.forward_verify_commit(draft, block, batch.rows)
    # The host reads which tokens were accepted; after that, stopping criteria may cut these tokens.
    outcome = None if recording else batch.read(draft, block, out)
    clock.read(draft, block, outcome)
    if outcome is not None:
        batch.stop(out, outcome)
    clock.stopped()
    batch.settle(out, outcome)
    clock.settled()
    proposer.observe(out, outcome)
    clock.observed()
    if outcome is not None:
        batch.deliver(out, outcome)
    clock.delivered()
    return out


class Proposes(Protocol):
    """Drafts tokens for rows, and observes which of them were accepted (:class:`~decoders.engine.decode.proposer.Proposer`)."""

    def propose(self) -> Draft: ...
    def observe(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Tells the strategy which draft tokens were accepted. outcome: the step's results; None if the host has not read them."""
        ...


class Computes(Protocol):
    """The device's part of a step (:class:`~decoders.engine.decode.core.Core`)."""

    def forward_verify_commit(self, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        """Runs the pass over a block, verifies its nodes, and updates the rows."""
        ...


class Verifies(Protocol):
    """Rows for which a target (:class:`~decoders.engine.decode.batch.Batch`) or a draft model verifies drafts."""

    @property
    def rows(self) -> Rows: ...
    @property
    def core(self) -> Computes: ...

    def block_of(self, draft: Draft) -> NodeBlock:
        """Returns the draft, padded to a block."""
        ...

    def mask(self, draft: Draft, block: NodeBlock) -> NodeBlock:
        """`block` with the grammars' masks after each node, and without the draft tokens that the grammars forbid."""
        ...

    def read(self, draft: Draft, block: NodeBlock, out: StepOutput) -> Outcome | None:
        """Returns which tokens were accepted, read by the host; None if the host does not read them."""
        ...

    def stop(self, out: StepOutput, outcome: Outcome) -> None:
        """Cuts the new tokens in `outcome`, `out` and the rows after the token at which a stopping criterion ends a row."""
        ...

    def settle(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Advances grammars and recurrent states over the committed tokens."""
        ...

    def deliver(self, out: StepOutput, outcome: Outcome) -> None:
        """Adds the new tokens to the requests' outputs."""
        ...


class Clock:
    """Its methods are called at the beginning of a step and at the end of each part of the step. This base class does nothing."""

    def begun(self) -> None: ...
    def proposed(self) -> None: ...
    def masked(self) -> None: ...
    def read(self, draft: Draft, block: NodeBlock, outcome: Outcome | None) -> None: ...
    def stopped(self) -> None: ...
    def settled(self) -> None: ...
    def observed(self) -> None: ...
    def delivered(self) -> None: ...


UNTIMED = Clock()


class Stopwatch:
    """A stopwatch that leaves out seconds of compilation, because `Timings.compile` already includes them."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._begun, self._compiled = time.perf_counter(), timings.compile

    def next(self) -> float:
        """Returns the seconds since the last call of this method, at first since the stopwatch was created."""
        begun, compiled = self._begun, self._compiled
        self._begun, self._compiled = time.perf_counter(), self._timings.compile
        return self._begun - begun - (self._compiled - compiled)
