"""The core, the part of a step that runs on the device: forward pass over a block of nodes, verification, commit. It runs uncompiled
until compiling or recording pays. On a device that records (CUDA graphs), a replay runs the whole core, or only the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...sampling.processors import Masks, SamplingPlan
from ...strategy import Draft, HostStep, Sequences, Step
from ...tree import TreeTensors
from ..model.blocks import ForwardResult, NodeBlock, PassInput, after_text
from ..model.cache import move_slots
from ..model.compiled.forward_pass import ForwardPass
from ..model.recordings import Recordings
from .rows import Rows
from .verify import StepFunctions, Verified, append, follow_matches


@dataclass(frozen=True)
class StepOutput:
    """The results of a step, on the device.

    Attributes:
        nodes: see :class:`decoders.strategy.Step`.
        chosen: see :class:`~decoders.engine.decode.verify.Verified`.
        path: see :class:`~decoders.engine.decode.verify.Acceptance`.
        new: ``[B, N]`` int64, the step's new tokens of each row, in order.
        summary: ``[4, B]`` int64: per row, the number of new tokens, of accepted draft tokens and of verified draft tokens, and whether
            the row has ended.
        logits: ``[B, N, V]``, the target's logits after each node.
        scores: ``[B, N, V]``, the processed scores; None unless the plan keeps them.
        hidden: ``[B, N, H]``, the input of the output head.
        layers: ``[B, N, T, H]``, hidden states of the T layers that the strategy reads; None if the strategy reads none.
        for_host: all values that the host reads, in one 1-D tensor; None unless the output is :meth:`packed`.
    """

    nodes: Tensor
    chosen: Tensor
    path: Tensor
    new: Tensor
    summary: Tensor
    logits: Tensor
    scores: Tensor | None
    hidden: Tensor
    layers: Tensor | None = None
    for_host: Tensor | None = None

    def of_rows(self, begin: int, end: int) -> StepOutput:
        """The results of the rows from `begin` up to, not including, `end`, as views."""
        rows, scores, layers = slice(begin, end), self.scores, self.layers
        return StepOutput(
            self.nodes[rows], self.chosen[rows], self.path[rows], self.new[rows], self.summary[:, rows], self.logits[rows],
            scores[rows] if scores is not None else None, self.hidden[rows],
            layers[rows] if layers is not None else None,
        )  # fmt: skip

    def observed(self, sequences: Sequences, known: HostStep | None = None) -> Step:
        """The step that a strategy's `observe` gets. sequences: the rows with the step's tokens; known: the values read by the host."""
        emitted, accepted, _, _ = self.summary.unbind(0)
        return Step(
            self.nodes, self.chosen, self.path, accepted, emitted, self.logits, self.hidden, sequences, layers=self.layers,
            known=known,
        )  # fmt: skip

    def packed(self) -> StepOutput:
        """Returns this output with all values for the host in one tensor (:attr:`for_host`), so that one transfer copies them."""
        parts = self.summary, self.new, self.path
        for_host = torch.cat([part.flatten() for part in parts])
        split = for_host.split([part.numel() for part in parts])
        summary, new, path = (own.view(part.shape) for own, part in zip(split, parts, strict=True))
        return replace(self, summary=summary, new=new, path=path, for_host=for_host)

    def read(self, lists: Callable[..., tuple[list, ...]], paths: bool = False) -> tuple[list, list, list]:
        """Returns :attr:`summary`, :attr:`new` and :attr:`path` as lists; without `paths`, the last list may be empty. lists: converts
        tensors to lists.
        """
        if self.for_host is None:
            summary, new, *path = lists(self.summary, self.new, *([self.path] if paths else []))
            return summary, new, path[0] if path else []
        return self.unpacked(lists(self.for_host)[0])

    def unpacked(self, values: list[int]) -> tuple[list, list, list]:
        """The lists that :meth:`read` returns, from the values of :attr:`for_host`."""
        rows, width = self.new.shape
        lines = [values[begin : begin + rows] for begin in range(0, 4 * rows, rows)]
        rest = [values[begin : begin + width] for begin in range(4 * rows, len(values), width)]
        return lines, rest[:rows], rest[rows:]


class Rule(Protocol):
    """Decides which nodes of a block are accepted (:mod:`~decoders.engine.decode.rules`)."""

    @property
    def on_device(self) -> bool:
        """Whether the rule never needs the host, so that a device can record it together with the pass."""
        ...

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        """Decides which nodes of `block` are accepted.

        Args:
            draft: the draft in the block; None if a draft model, not the target, verifies the block.
            nodes: ``[B, N]`` int64, the tokens of the block's nodes.
            forwarded: the results of the forward pass over `nodes`.
        """
        ...


class Core:
    """The device's part of a step: the model's pass over a block, the rule's verification, and the commit of the accepted tokens.

    Attributes:
        forward_pass: the forward pass of the model.
        functions: the :class:`StepFunctions` of the forward pass.
        rule: decides which nodes are accepted.
        plan: the operations on the logits.
    """

    def __init__(self, forward_pass: ForwardPass, plan: SamplingPlan, rule: Rule) -> None:
        self.forward_pass, self.target, self.plan, self.rule = forward_pass, forward_pass.target, plan, rule
        self.functions = StepFunctions.of(forward_pass)

    def forward_verify_commit(self, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        """Runs the target's pass over a block, verifies its nodes, and updates the rows."""
        nodes, given = input_of(block, rows)
        forwarded = self.forward_pass(given)
        verified = self.rule.verify(draft, block, nodes, forwarded, rows)
        return self.commit(nodes, block.tree, rows, forwarded, verified, draft.in_place)

    def commit(
        self, nodes: Tensor, tree: TreeTensors, rows: Rows, result: ForwardResult, verified: Verified, in_place: bool = False
    ) -> StepOutput:  # fmt: skip
        """Appends the accepted path's tokens to the rows. Moves the path's keys and values to the slots after the text, unless they are
        there already (`in_place`).

        Recurrent states are not advanced here, because stopping criteria may still cut the rows.
        """
        # The shape is the same whether rows share their stop tokens or not, so that one compiled function serves both cases.
        stop_tokens = rows.sampling.stop_tokens.expand(len(nodes), -1).contiguous()
        rewritten = (rows.tokens, rows.length, rows.limit, rows.finished, stop_tokens)
        chosen = verified.chosen
        if verified.acceptance is None and verified.most is None:
            path, new, summary = self.functions.settle(self.forward_pass.tiers, nodes, chosen, tree, *rewritten)
        else:
            acceptance = verified.acceptance or follow_matches(nodes, chosen, tree)
            path = acceptance.path
            new, summary = append(nodes, chosen, tree, acceptance, *rewritten, verified.most)
        if not in_place:
            move_slots(rows.buffers, rows.length - summary[0] - 1, path)
        return StepOutput(
            nodes, chosen, path, new, summary, result.logits, verified.scores, result.hidden, result.layers
        )


class RecordedCore(Core):
    """A core on a device that records CUDA graphs. For blocks of a recorded size it replays the whole core, or only the forward pass if
    the rule needs the host.

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
        """Returns ``function(block, rows)``, by a replay if recorded. key: what `function` depends on besides model and arguments."""
        if block.text.length or block.piece is not None or block.root is not None:
            return function(block, rows)

        def run(draft_tokens: Tensor, tree: TreeTensors, masks: Masks | None) -> Any:
            return function(NodeBlock(draft_tokens, tree, block.view, masks), rows)

        key = *key, rows.place, len(block.view)
        given = block.draft_tokens, block.tree, block.masks
        return self.forward_pass.replayed(self.recordings, key, run, given, len(rows.length), self.plan, copy=self.copy)


def core_of(
    forward_pass: ForwardPass, plan: SamplingPlan, rule: Rule, recordings: Recordings | None, *, copy: bool
) -> Core:  # fmt: skip
    """Creates a :class:`RecordedCore` with `recordings` and `copy`; a :class:`Core` if there are no `recordings`."""
    if recordings is None:
        return Core(forward_pass, plan, rule)
    return RecordedCore(forward_pass, plan, rule, recordings, copy=copy)


def input_of(block: NodeBlock, rows: Rows) -> tuple[Tensor, PassInput]:
    """The tokens of the block's nodes ``[B, N]``, and the input of the pass over these nodes and the text before the root."""
    base = rows.length - 1
    nodes = torch.cat([rows.tokens.gather(1, base[:, None]), block.draft_tokens], dim=1)
    tokens, begin, tree = nodes, base, block.tree
    if count := block.text.length:
        begin = base - count
        positions = begin[:, None] + torch.arange(count, device=base.device)
        tokens = torch.cat([rows.tokens.gather(1, positions.clamp(min=0)), nodes], dim=1)
        tree = after_text(count, tree)
    return nodes, PassInput(tokens, begin, tree, rows.buffers, block.view, block.text, block.piece, block.root)


@dataclass(frozen=True)
class CoupledRule:
    """The built-in rule: draws the target's token after every node, and accepts draft tokens that match it."""

    forward_pass: ForwardPass
    plan: SamplingPlan
    on_device: ClassVar[bool] = True

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        """Returns the target's token after each node; :meth:`Core.commit` then finds the path whose tokens match."""
        positions = rows.length[:, None] - rows.prompt_length[:, None] + block.tree.offsets
        prefixes = rows.prefixes(nodes, block.tree, block.view) if self.plan.reads_text else None
        draw, tiers = StepFunctions.of(self.forward_pass).draw, self.forward_pass.tiers
        return Verified(*draw(tiers, forwarded.logits, self.plan, rows.sampling, positions, block.masks, prefixes))
