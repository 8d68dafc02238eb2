"""One step in the form that a call needs: decided inside the core, by a verifier, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import DraftError, UnsupportedError
from ...strategy import Draft
from ...tree import Topology, TreeTensors
from ...verifiers.verifier import Verifier
from ..model.blocks import NodeBlock
from ..model.recordings import Recordings
from ..model.target import ForwardResult
from .core import StepOutput
from .engine import Engine
from .host_processors import NOT_REACHED, choose_along_path
from .passes import StepPass
from .rows import Rows

if TYPE_CHECKING:
    from .request import Request
    from .request_output import RequestOutput

#: (draft, block, rows) → what became of them; the block holds the draft's tokens and tree as the target runs them.
StepFunction = Callable[[Draft, NodeBlock, Rows], StepOutput]


def make_step(
    engine: Engine, forward_pass: StepPass, request: Request, verifier: Verifier | None,
    members: Sequence[tuple[RequestOutput, int]], recordings: Recordings | None,
) -> StepFunction:  # fmt: skip
    """The step of one call: its core, or where something decides on the host its forward pass, is replayed once it is recorded.

    Args:
        forward_pass: of the target.
        verifier: None where the built-in rule decides.
        members: the requests whose rows are decoded, and the first row of each; read in every step.
        recordings: of the session of the rows; None where nothing can be recorded.
    """
    core = engine.core(request.plan, forward_pass)

    copy = request.strategy.observes  # and may keep what it is shown
    if request.processors is None and verifier is None:
        return lambda draft, block, rows: core.replayed("step", block, rows, recordings, copy=copy)

    def forward(block: NodeBlock, rows: Rows) -> tuple[Tensor, ForwardResult]:
        return core.replayed("forward", replace(block, masks=None), rows, recordings, copy=copy)

    if verifier is not None:
        return judged(forward, core.judge, verifier, request.strategy.name)

    def on_host(draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        nodes, forwarded = forward(block, rows)
        logits = forwarded.logits if block.masks is None else block.masks.allow(forwarded.logits)
        tree = block.tree
        chosen, scores, most = choose_of_all(nodes, tree, logits, rows, members, request)
        return core.commit(nodes, chosen, tree, rows, forwarded, scores if request.keep_scores else None, most)

    return on_host


def choose_of_all(
    nodes: Tensor,
    tree: TreeTensors,
    logits: Tensor,
    rows: Rows,
    members: Sequence[tuple[RequestOutput, int]],
    request: Request,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`choose_along_path` of every request by itself, in the form of the whole batch.

    A request whose processors raise writes nothing, and the error is its own where several share the step.
    """
    if len(members) == 1 and members[0][0].request is request:
        member = members[0][0]
        assert request.processors is not None
        return choose_along_path(nodes, tree, logits, rows, member.padded_rows, request.processors, request.plan)
    chosen = torch.full(nodes.shape, NOT_REACHED, dtype=torch.int64, device=nodes.device)
    scores, most = torch.zeros_like(logits), torch.zeros_like(rows.length)
    for member, first in members:
        own, processors = slice(first, first + member.rows), member.request.processors
        if all(member.finished) or processors is None:
            continue
        try:
            chosen[own], scores[own], most[own] = choose_along_path(
                nodes[own], tree.of_rows(own.start, own.stop), logits[own], rows.of_rows(own.start, own.stop), member.padded_rows,
                processors, request.plan,
            )  # fmt: skip
        except Exception as error:
            member.error = error
    return chosen, scores, most


def judged(forward: Callable, judge: Callable, verifier: Verifier, strategy: str) -> StepFunction:
    """A step whose outcome `verifier` decides, by :meth:`Core.judge`."""

    def step(draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        shape, drawn_from = draft.topology, draft.scores
        if not verifier.trees and shape != Topology.chain(draft.tokens.shape[1]):
            raise UnsupportedError(
                f"verifier {verifier.name!r} judges chains, and {strategy!r} proposes a tree: take "
                "verifier='tree_rejection', or 'coupled'"
            )
        padding = block.draft_tokens.shape[1] - draft.tokens.shape[1]
        if drawn_from is not None and padding:
            drawn_from = torch.nn.functional.pad(drawn_from, (0, 0, 0, padding))
        siblings = shape.max_siblings if isinstance(shape, Topology) else None
        nodes, forwarded = forward(block, rows)
        if drawn_from is not None and drawn_from.shape[-1] != forwarded.logits.shape[-1]:
            raise DraftError(
                f"propose of {strategy!r}: scores are over {drawn_from.shape[-1]} tokens, the vocabulary has "
                f"{forwarded.logits.shape[-1]}"
            )
        try:
            return judge(nodes, forwarded, block.tree, rows, block.masks, drawn_from, verifier, siblings)
        except Exception as error:
            error.add_note(f"decoders: verifier {verifier.name!r} ({type(verifier).__module__})")
            raise

    return step
