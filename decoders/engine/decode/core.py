"""What a step computes: forward over a block of nodes, verify, commit; uncompiled at once, compiled or replayed once that pays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...sampling.prefixes import Prefixes
from ...sampling.processors import Masks, SamplingInputs, SamplingPlan
from ...strategy import Draft, HostStep, Sequences, Step
from ...tree import Topology, TreeTensors
from ..model.blocks import NodeBlock, PassInput, after_text
from ..model.cache import move_slots
from ..model.compiled.forward_pass import ForwardPass
from ..model.compiled.functions import CompiledFunction, TieredFunction, kind_of
from ..model.compiled.regions import EXAMPLE_SLOTS, copied_whole
from ..model.compiled.tiers import Beside, Tiers
from ..model.recordings import Recordings
from ..model.target import ForwardResult, Target
from .rows import Rows
from .verify import Verified, append, draw_tokens, follow_matches, settle


@dataclass(frozen=True)
class StepOutput:
    """Device results of a step.

    Attributes:
        nodes: as in :class:`decoders.strategy.Step`.
        chosen: as in :class:`~decoders.engine.decode.verify.Verified`.
        path: as there.
        new: ``[B, N]`` int64, tokens in order of commitment.
        summary: ``[4, B]`` int64 for the host: tokens emitted, draft tokens accepted, draft tokens made, finished.
        logits: ``[B, N, V]``.
        scores: the processed ones if the plan keeps them.
        hidden: ``[B, N, H]``.
        layers: ``[B, N, T, H]``, if any were asked for.
        for_host: of :meth:`packed`.
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
        """Views of the entries of some rows."""
        rows, scores, layers = slice(begin, end), self.scores, self.layers
        return StepOutput(
            self.nodes[rows], self.chosen[rows], self.path[rows], self.new[rows], self.summary[:, rows], self.logits[rows],
            scores[rows] if scores is not None else None, self.hidden[rows],
            layers[rows] if layers is not None else None,
        )  # fmt: skip

    def observed(self, sequences: Sequences, known: HostStep | None = None) -> Step:
        """This step as its strategy sees it; `sequences` hold what it committed. known: what the host has read of it."""
        emitted, accepted, _, _ = self.summary.unbind(0)
        return Step(
            self.nodes, self.chosen, self.path, accepted, emitted, self.logits, self.hidden, sequences, layers=self.layers,
            known=known,
        )  # fmt: skip

    def packed(self) -> StepOutput:
        """The same output with everything that the host reads in one tensor, so that one copy fetches it."""
        parts = self.summary, self.new, self.path
        for_host = torch.cat([part.flatten() for part in parts])
        split = for_host.split([part.numel() for part in parts])
        summary, new, path = (own.view(part.shape) for own, part in zip(split, parts, strict=True))
        return replace(self, summary=summary, new=new, path=path, for_host=for_host)

    def read(self, lists: Callable[..., tuple[list, ...]], paths: bool = False) -> tuple[list, list, list]:
        """:attr:`summary`, :attr:`new` and :attr:`path` as lists.

        Args:
            lists: returns the values of tensors.
            paths: whether the caller needs the paths.
        """
        if self.for_host is None:
            summary, new, *path = lists(self.summary, self.new, *([self.path] if paths else []))
            return summary, new, path[0] if path else []
        return self.unpacked(lists(self.for_host)[0])

    def unpacked(self, values: list[int]) -> tuple[list, list, list]:
        """The same from the values of :attr:`for_host`."""
        rows, width = self.new.shape
        lines = [values[begin : begin + rows] for begin in range(0, 4 * rows, rows)]
        rest = [values[begin : begin + width] for begin in range(4 * rows, len(values), width)]
        return lines, rest[:rows], rest[rows:]


class Rule(Protocol):
    """Decides which nodes of a block are accepted (:mod:`~decoders.engine.decode.rules`)."""

    @property
    def on_device(self) -> bool:
        """Whether the rule never needs the host, so that a device records it together with the pass."""
        ...

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        """What is accepted of the `draft` that `block` was made of; None for a draft of a draft model.

        Args:
            nodes: ``[B, N]``, the block's.
            forwarded: the target's results for them.
        """
        ...


class Core:
    """The device's part of a step: a model's pass over a block, a rule that verifies it, and the commitment of the accepted tokens.

    Attributes:
        forward_pass: the model's.
        functions: of the model's steps.
        rule: verifies.
        plan: the operations on the logits.
    """

    def __init__(self, forward_pass: ForwardPass, plan: SamplingPlan, rule: Rule) -> None:
        self.forward_pass, self.target, self.plan, self.rule = forward_pass, forward_pass.target, plan, rule
        self.functions = StepFunctions.of(forward_pass)

    @staticmethod
    def of(
        forward_pass: ForwardPass, plan: SamplingPlan, rule: Rule, recordings: Recordings | None, *, copy: bool
    ) -> Core:  # fmt: skip
        """A core, or a :class:`RecordedCore` where there are `recordings`. copy: as of that."""
        if recordings is None:
            return Core(forward_pass, plan, rule)
        return RecordedCore(forward_pass, plan, rule, recordings, copy=copy)

    def forward_verify_commit(self, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        """The target's pass over a block, the verification of its nodes, and the update of the rows."""
        nodes, given = input_of(block, rows)
        forwarded = self.forward_pass(given)
        verified = self.rule.verify(draft, block, nodes, forwarded, rows)
        return self.commit(nodes, block.tree, rows, forwarded, verified, draft.in_place)

    def commit(
        self, nodes: Tensor, tree: TreeTensors, rows: Rows, result: ForwardResult, verified: Verified, in_place: bool = False
    ) -> StepOutput:  # fmt: skip
        """Moves the accepted path's keys and values, unless every path is `in_place`, and appends its tokens.

        Recurrent states stay where they were, as stopping criteria may still cut the rows.
        """
        # One shape, whether rows share their stop tokens or not: compiled code serves both.
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
    """A core on a device that records: for blocks of a recorded size it replays everything, or the pass if the rule needs the host.

    Args:
        recordings: of the session of the rows.
        copy: whether results are to outlive the next replay.
    """

    def __init__(
        self, forward_pass: ForwardPass, plan: SamplingPlan, rule: Rule, recordings: Recordings, *, copy: bool
    ) -> None:
        super().__init__(forward_pass, plan, rule)
        self.recordings, self.copy = recordings, copy

    def forward_verify_commit(self, draft: Draft, block: NodeBlock, rows: Rows) -> StepOutput:
        """As :meth:`Core.forward_verify_commit`, with everything that the host reads in one tensor."""
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
        """``function(block, rows)``, or a replay of it. key: what it depends on besides the model and its arguments."""
        if block.text.length or block.piece is not None or block.root is not None:
            return function(block, rows)

        def run(draft_tokens: Tensor, tree: TreeTensors, masks: Masks | None) -> Any:
            return function(NodeBlock(draft_tokens, tree, block.view, masks), rows)

        key = *key, rows.place, len(block.view)
        given = block.draft_tokens, block.tree, block.masks
        return self.forward_pass.replayed(self.recordings, key, run, given, len(rows.length), self.plan, copy=self.copy)


def input_of(block: NodeBlock, rows: Rows) -> tuple[Tensor, PassInput]:
    """The block's nodes ``[B, N]``, and the input of the pass over them and the text in front of them."""
    base = rows.length - 1
    nodes = torch.cat([rows.tokens.gather(1, base[:, None]), block.draft_tokens], dim=1)
    tokens, begin, tree = nodes, base, block.tree
    if count := block.text.length:
        begin = base - count
        positions = begin[:, None] + torch.arange(count, device=base.device)
        tokens = torch.cat([rows.tokens.gather(1, positions.clamp(min=0)), nodes], dim=1)
        tree = after_text(count, tree)
    return nodes, PassInput(tokens, begin, tree, rows.buffers, block.view, block.text, block.piece, block.root)


class StepFunctions(Beside):
    """The draw of tokens and the acceptance of a path, each compiled or not, as the tiers of a pass say."""

    def __init__(self) -> None:
        self.forget()

    @staticmethod
    def of(forward_pass: ForwardPass) -> StepFunctions:
        """Those of a forward pass, made once."""
        tiers = forward_pass.tiers
        if not isinstance(tiers.beside, StepFunctions):
            tiers.beside = StepFunctions()
        return tiers.beside

    def forget(self) -> None:
        self._settle = CompiledFunction(settle)
        self._draws: dict[SamplingPlan, TieredFunction] = {}

    def settle(
        self, tiers: Tiers, nodes: Tensor, chosen: Tensor, tree: TreeTensors, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:func:`decoders.engine.decode.verify.settle` in the tier of the passes."""
        if tiers.runs_compiled(len(nodes) > 1):
            return self._settle(nodes, chosen, _laid_out(tree), *arguments)
        return settle(nodes, chosen, tree, *arguments)

    def compiling(self, target: Target) -> Callable[[int, int], object]:
        compiled = self._settle
        return lambda rows, count: compiled(*_settle_examples(target, rows, count))

    def draw(
        self, tiers: Tiers, logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor,
        masks: Masks | None = None, prefixes: Prefixes | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """:func:`decoders.engine.decode.verify.draw_tokens`.

        On the CPU it is faster than what the compiler makes of it; elsewhere it is many small kernels, and compiled where the
        passes are.
        """
        arguments = logits, plan, inputs, positions, masks, prefixes
        if not tiers.target.static or not tiers.mode:
            return draw_tokens(*arguments)
        if plan not in self._draws:
            self._draws[plan] = TieredFunction(draw_tokens, CompiledFunction(draw_tokens), tiers.worth_compiling)
        draw, kind = self._draws[plan], kind_of(arguments)
        if tiers.mode is True:
            return draw.now(kind, arguments, tiers.report.waited)
        return draw(*arguments) if tiers.allows((plan, kind)) else draw.uncompiled(kind, *arguments)

    def ready(self, plan: SamplingPlan | None = None) -> frozenset[Hashable]:
        chosen = [(own, draw) for own, draw in self._draws.items() if plan is None or own == plan]
        return frozenset((own, kind) for own, draw in chosen for kind in draw.ready)


@dataclass(frozen=True)
class CoupledRule:
    """Draws the target's token after every node, and accepts draft tokens that match. The built-in rule."""

    forward_pass: ForwardPass
    plan: SamplingPlan
    on_device: ClassVar[bool] = True

    def verify(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verified:
        """The target's token after each node; what matches it is found when it is committed."""
        positions = rows.length[:, None] - rows.prompt_length[:, None] + block.tree.offsets
        prefixes = rows.prefixes(nodes, block.tree, block.view) if self.plan.reads_text else None
        draw, tiers = StepFunctions.of(self.forward_pass).draw, self.forward_pass.tiers
        return Verified(*draw(tiers, forwarded.logits, self.plan, rows.sampling, positions, block.masks, prefixes))


def _laid_out(tree: TreeTensors) -> TreeTensors:
    """`tree` for the compiled :func:`settle`, which does not read visibility."""
    ancestors = copied_whole(tree.ancestors)
    return TreeTensors(copied_whole(tree.parents), copied_whole(tree.offsets), ancestors, ancestors)


def _settle_examples(target: Target, rows: int, count: int) -> tuple:
    """Arguments of :func:`settle` to compile for, as :func:`~decoders.engine.model.compiled.regions.examples` has them."""
    device, tree = target.device, Topology.chain(count + 1 if count > 1 else 0).tensors(rows, target.device)
    block = torch.zeros(rows, len(tree), dtype=torch.int64, device=device)
    lengths, stops = torch.full((rows,), 20, device=device), torch.full((rows, 8), -1, device=device)
    tokens = torch.zeros(rows, EXAMPLE_SLOTS, dtype=torch.int64, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    return block, block.clone(), _laid_out(tree), tokens, lengths, lengths + 39, finished, stops
