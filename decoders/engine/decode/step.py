"""One step of decoding, in the order of the papers. Read this file first: the rest of the room is what it calls.

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
        watch: None where the host must not look: while a step is recorded.
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
    batch.observe(out)
    watch.observed(out, outcome)
    return out


def forward_verify_commit(parts: Parts, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
    """The target's pass over a block, which of its nodes are accepted, and what becomes of the rows."""
    nodes, forwarded = parts.forward(block, rows)
    verdict = parts.verify(draft, block, nodes, forwarded, rows)
    return parts.commit(nodes, block.tree, rows, forwarded, verdict)


@dataclass(frozen=True)
class Parts:
    """What :func:`forward_verify_commit` is made of, chosen once for the steps of a batch (:mod:`~decoders.engine.decode.rules`).

    Attributes:
        forward: gives the nodes ``[B, N]`` of a block and the target's results for them.
        verify: says which nodes are accepted.
        commit: moves their keys and values into place and appends their tokens.
    """

    forward: Callable[[NodeBlock, Rows], tuple[Tensor, ForwardResult]]
    verify: Callable[[Draft, NodeBlock, Tensor, ForwardResult, Rows], Verdict]
    commit: Callable[[Tensor, TreeTensors, Rows, ForwardResult, Verdict], StepOutput]


class Steps(Protocol):
    """What makes steps: the rows of a target (:class:`~decoders.engine.decode.batch.Batch`) or those of a draft model."""

    @property
    def rows(self) -> Rows: ...
    @property
    def decide(self) -> Callable[[Draft, NodeBlock, Rows], StepOutput]:
        """:func:`forward_verify_commit`, or what a device has recorded of it."""
        ...

    def propose(self) -> Draft: ...
    def block_of(self, draft: Draft) -> NodeBlock:
        """A checked draft as the core wants it."""
        ...

    def mask(self, draft: Draft, block: NodeBlock) -> NodeBlock:
        """`block` with what the grammars allow after each node, and without the draft tokens that they forbid."""
        ...

    def settle(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Grammars, and states that cannot be cut back, follow what was committed. outcome: as the host knows it, if it does."""
        ...

    def observe(self, out: StepOutput) -> None: ...


class Watch:
    """Is told when a phase of a step is over. This one does nothing."""

    def proposed(self) -> None: ...
    def masked(self) -> None: ...
    def committed(self, draft: Draft, block: NodeBlock, out: StepOutput) -> Outcome | None:
        """Returns what the host knows of the step, after stopping criteria had their say; `out` and the rows are changed alike."""

    def settled(self) -> None: ...
    def observed(self, out: StepOutput, outcome: Outcome | None) -> None: ...


UNWATCHED = Watch()
