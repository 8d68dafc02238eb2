"""The core of a step on a device that records (CUDA graphs): a replay runs the whole core, or only the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...sampling.processors import Masks, SamplingPlan
from ...strategy import Draft
from ...tree import TreeTensors
from ..model.blocks import NodeBlock
from ..model.compiled.forward_pass import ForwardPass
from ..model.recordings import Recordings
from ..model.target import ForwardResult
from .core import Core, Rule, StepOutput, input_of
from .rows import Rows


def core_of(
    forward_pass: ForwardPass, plan: SamplingPlan, rule: Rule, recordings: Recordings | None, *, copy: bool
) -> Core:  # fmt: skip
    """Creates a :class:`RecordedCore` with `recordings` and `copy`; a :class:`Core` if there are no `recordings`."""
    if recordings is None:
        return Core(forward_pass, plan, rule)
    return RecordedCore(forward_pass, plan, rule, recordings, copy=copy)


class RecordedCore(Core):
    """A core on a device that records. For blocks of a recorded size it replays the core, or only the pass if the rule needs the host.

    Args:
        recordings: the recordings of the rows' session.
        copy: whether to copy the results, so that the next replay does not overwrite them.
    """

    def __init__(
        self, forward_pass: ForwardPass, plan: SamplingPlan, rule: Rule, recordings: Recordings, *, copy: bool
    ) -> None:
        super().__init__(forward_pass, plan, rule)
        self.recordings, self.copy = recordings, copy

    def forward_verify_commit(self, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        """Like :meth:`Core.forward_verify_commit`, but returns a packed output: all values that the host reads are in one tensor."""
        if self.rule.on_device:
            plain = super().forward_verify_commit
            key = "step", self.plan, self.target.layers, draft.in_place
            return self._replayed(key, lambda block, rows: plain(draft, block, rows).packed(), block, rows)
        nodes, forwarded = self._replayed(
            ("forward", self.target.layers), self._forward, replace(block, masks=None), rows
        )
        verified = self.rule.verify(draft, block, nodes, forwarded, rows)
        return self.commit(nodes, block.tree, rows, forwarded, verified, draft.in_place).packed()

    def _forward(self, block: NodeBlock, rows: Rows) -> tuple[Tensor, ForwardResult]:
        nodes, given = input_of(block, rows)
        return nodes, self.forward_pass(given)

    def _replayed(
        self, key: tuple, function: Callable[[NodeBlock, Rows], Any], block: NodeBlock, rows: Rows
    ) -> Any:  # fmt: skip
        """Returns ``function(block, rows)``, replayed if recorded. key: what `function` depends on besides model and arguments."""
        if block.text.length or block.piece is not None or block.root is not None:
            return function(block, rows)

        def run(draft_tokens: Tensor, tree: TreeTensors, masks: Masks | None) -> Any:
            return function(NodeBlock(draft_tokens, tree, block.view, masks), rows)

        key = *key, rows.place, len(block.view)
        given = block.draft_tokens, block.tree, block.masks
        return self.forward_pass.replayed(self.recordings, key, run, given, len(rows.length), self.plan, copy=self.copy)
