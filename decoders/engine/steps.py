"""One step in the form that a call needs: decided inside the graph, by a verifier, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..report import Report
from ..strategy import Draft
from ..tree import Topology, TreeTensors
from ..verifier import Verifier
from .core import Core, Rows, StepOutput
from .engine import Engine
from .host import Prefixes, choose_along_path
from .sampling import Masks

if TYPE_CHECKING:
    from .loop import Request

#: (draft, guesses, tree, rows, view, masks) → what became of them; guesses and tree are the draft's as a block, masks
#: what a grammar allows after each of its nodes.
StepFunction = Callable[[Draft, Tensor, TreeTensors, Rows, Tensor, Masks | None], StepOutput]


def make_step(
    engine: Engine, request: Request, verifier: Verifier | None, prefixes: Prefixes, report: Report
) -> StepFunction:
    """The step of one call, compiled unless the call wants it eager. verifier: None where the built-in rule decides."""
    core, batch = Core(engine.target, request.plan), len(request.prompts)
    fused = request.processors is None and verifier is None
    method = "step" if fused else "forward"
    run, report.compiled = getattr(core, method), False
    if request.compile:
        run, report.compiled = engine.compiled(core, method, batch, report)
    if fused:
        return lambda draft, guesses, tree, rows, view, masks: run(guesses, tree, rows, view, masks)
    if verifier is not None:
        judge = engine.judge_function(core, verifier, report) if report.compiled else core.judge
        return judged(run, judge, verifier, request.strategy.name)

    def on_host(
        draft: Draft, guesses: Tensor, tree: TreeTensors, rows: Rows, view: Tensor, masks: Masks | None
    ) -> StepOutput:
        nodes, forwarded = run(guesses, tree, rows, view)
        assert request.processors is not None
        logits = forwarded.logits if masks is None else masks.allow(forwarded.logits)
        chosen, scores, most = choose_along_path(nodes, tree, logits, rows, prefixes, request.processors, request.plan)
        return core.commit(nodes, chosen, tree, rows, forwarded, scores if request.keep_scores else None, most)

    return on_host


def judged(forward: Callable, judge: Callable, verifier: Verifier, strategy: str) -> StepFunction:
    """A step whose outcome `verifier` decides, by :meth:`Core.judge`."""

    def step(
        draft: Draft, guesses: Tensor, tree: TreeTensors, rows: Rows, view: Tensor, masks: Masks | None
    ) -> StepOutput:
        shape, drawn_from = draft.topology, draft.scores
        if not verifier.trees and shape != Topology.chain(draft.tokens.shape[1]):
            raise UnsupportedError(
                f"verifier {verifier.name!r} judges chains, and {strategy!r} proposes a tree: take "
                "verifier='tree_rejection', or 'coupled'"
            )
        padding = guesses.shape[1] - draft.tokens.shape[1]
        if drawn_from is not None and padding:
            drawn_from = torch.nn.functional.pad(drawn_from, (0, 0, 0, padding))
        siblings = shape.max_siblings if isinstance(shape, Topology) else None
        nodes, forwarded = forward(guesses, tree, rows, view)
        return judge(nodes, forwarded, tree, rows, masks, drawn_from, verifier, siblings)

    return step
