"""One step in the form that a call needs: decided inside the core, by a verifier, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import DraftError, UnsupportedError
from ..report import Report
from ..strategy import Draft
from ..tree import Topology
from ..verifiers.verifier import Verifier
from .blocks import NodeBlock
from .core import StepOutput
from .engine import Engine
from .host_processors import Prefixes, choose_along_path
from .rows import Rows
from .tiers import ForwardPass

if TYPE_CHECKING:
    from .request import Request

#: (draft, block, rows) → what became of them; the block holds the draft's tokens and tree as the target runs them.
StepFunction = Callable[[Draft, NodeBlock, Rows], StepOutput]


def make_step(
    engine: Engine, passes: ForwardPass, request: Request, verifier: Verifier | None, prefixes: Prefixes, report: Report
) -> StepFunction:
    """The step of one call. passes: of the target. verifier: None where the built-in rule decides."""
    core = engine.core(request.plan, passes)
    if request.processors is None and verifier is None:
        step = engine.whole(core, "step", request.compile, report)
        return lambda draft, block, rows: step(block, rows)
    forward = engine.whole(core, "forward", request.compile, report)
    if verifier is not None:
        judge = engine.whole(core, "judge", request.compile, report)
        return judged(forward, judge, verifier, request.strategy.name)

    def on_host(draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        nodes, forwarded = forward(block, rows)
        assert request.processors is not None
        logits = forwarded.logits if block.masks is None else block.masks.allow(forwarded.logits)
        tree = block.tree
        chosen, scores, most = choose_along_path(nodes, tree, logits, rows, prefixes, request.processors, request.plan)
        return core.commit(nodes, chosen, tree, rows, forwarded, scores if request.keep_scores else None, most)

    return on_host


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
        return judge(nodes, forwarded, block.tree, rows, block.masks, drawn_from, verifier, siblings)

    return step
