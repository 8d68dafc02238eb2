"""One step of decoding, in the order of the papers. Read this file first: the others in this package are what it calls.

What is timed, counted, stopped and streamed hangs on a step from outside, as its :class:`Watch`. A device that records whole steps
records :func:`step` itself (:mod:`~decoders.engine.decode.call`), and a strategy that drafts for a draft model has its steps
made by it as well (:mod:`~decoders.engine.decode.drafts.staged`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...strategy import Draft
from ...tree import TreeTensors
from ..model.blocks import NodeBlock
from ..model.target import ForwardResult
from .core import StepOutput
from .criteria import Outcome
from .rows import Rows
from .verify import Verdict


def step(batch: Steps, watch: Watch | None = None) -> StepOutput:
    """One step of all rows of `batch`, each of which accepts its own number of draft tokens.

    Args:
        watch: None while a step is recorded: then the host must not read the device.
    """
    watch = watch or UNWATCHED
    draft = batch.propose()
    block = batch.block_of(draft)
    watch.proposed()
    block = batch.mask(draft, block)
    watch.masked()
    # forward_verify_commit, or the one launch that a device has recorded of it
    out = batch.decide(draft, block, batch.rows)
    # Here the host learns what was accepted, and stopping criteria may take some of it back.
    outcome = watch.committed(draft, block, out)
    batch.settle(out, outcome)
    watch.settled()
    batch.observe(out, outcome)
    watch.observed(out, outcome)
    return out


def forward_verify_commit(parts: Parts, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
    """The target's pass over a block, which of its nodes are accepted, and what becomes of the rows."""
    nodes, forwarded = parts.forward(block, rows)
    verdict = parts.verify(draft, block, nodes, forwarded, rows)
    return parts.commit(nodes, block.tree, rows, forwarded, verdict, draft.in_place)


@dataclass(frozen=True)
class Parts:
    """The parts of :func:`forward_verify_commit`, chosen once for the steps of a batch (:mod:`~decoders.engine.decode.rules`).

    Attributes:
        forward: returns the nodes ``[B, N]`` of a block and the target's results for them.
        verify: decides which nodes are accepted.
        commit: moves the accepted path's keys and values into place, if they are not there, and appends its tokens.
    """

    forward: Callable[[NodeBlock, Rows], tuple[Tensor, ForwardResult]]
    verify: Callable[[Draft, NodeBlock, Tensor, ForwardResult, Rows], Verdict]
    commit: Callable[[Tensor, TreeTensors, Rows, ForwardResult, Verdict, bool], StepOutput]


class Steps(Protocol):
    """Rows that can be stepped: a target's (:class:`~decoders.engine.decode.batch.Batch`) or a draft model's."""

    @property
    def rows(self) -> Rows: ...
    @property
    def decide(self) -> Callable[[Draft, NodeBlock, Rows], StepOutput]:
        """:func:`forward_verify_commit`, or what a device has recorded of it."""
        ...

    def propose(self) -> Draft: ...
    def block_of(self, draft: Draft) -> NodeBlock:
        """The draft, checked and padded to a block."""
        ...

    def mask(self, draft: Draft, block: NodeBlock) -> NodeBlock:
        """`block` with the grammars' masks after each node, and without the draft tokens that they forbid."""
        ...

    def settle(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Moves grammars and recurrent states on to what was committed. outcome: None where the host has not read it."""
        ...

    def observe(self, out: StepOutput, outcome: Outcome | None) -> None: ...


class Watch:
    """Called when each phase of a step is over. This base class does nothing."""

    def proposed(self) -> None: ...
    def masked(self) -> None: ...
    def committed(self, draft: Draft, block: NodeBlock, out: StepOutput) -> Outcome | None:
        """Returns the step's outcome as read by the host, after stopping criteria; what they cut is cut in `out` and the rows, too."""

    def settled(self) -> None: ...
    def observed(self, out: StepOutput, outcome: Outcome | None) -> None: ...


UNWATCHED = Watch()
