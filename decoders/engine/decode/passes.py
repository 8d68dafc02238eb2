"""A model's forward pass, and what a step does with its logits, in one tier: uncompiled at once, compiled as soon as that pays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...sampling.processors import Masks, SamplingInputs, SamplingPlan
from ...tree import Topology, TreeTensors
from ..model.compiled.forward_pass import ForwardPass
from ..model.compiled.functions import CompiledFunction, TieredFunction, kind_of
from ..model.compiled.regions import EXAMPLE_SLOTS, copied_whole
from ..model.target import Target
from .verify import draw_tokens, settle


class StepPass(ForwardPass):
    """The forward pass of one model, with the draw of tokens and the acceptance of a path."""

    def forget(self) -> None:
        super().forget()
        self._settle = CompiledFunction(settle)
        self._draws: dict[SamplingPlan, TieredFunction] = {}

    def settle(
        self, nodes: Tensor, chosen: Tensor, tree: TreeTensors, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:func:`decoders.engine.decode.verify.settle` in the tier of the passes."""
        if self.runs_compiled(len(nodes) > 1):
            return self._settle(nodes, chosen, _laid_out(tree), *arguments)
        return settle(nodes, chosen, tree, *arguments)

    def compiling_beside(self) -> Callable[[int, int], object]:
        compiled, target = self._settle, self.target
        return lambda rows, count: compiled(*_settle_examples(target, rows, count))

    def draw(
        self, logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """:func:`decoders.engine.decode.verify.draw_tokens`.

        On the CPU it is faster than what the compiler makes of it; elsewhere it is many small kernels, and compiled where the
        passes are.
        """
        arguments = logits, plan, inputs, positions, masks
        if not self.target.static or not self.mode:
            return draw_tokens(*arguments)
        if plan not in self._draws:
            self._draws[plan] = TieredFunction(draw_tokens, CompiledFunction(draw_tokens), self.worth_compiling)
        draw, kind = self._draws[plan], kind_of(arguments)
        if self.mode is True:
            return draw.now(kind, arguments, self.report.waited)
        return draw(*arguments) if self.allows((plan, kind)) else draw.uncompiled(kind, *arguments)

    def draws_ready(self, plan: SamplingPlan | None = None) -> frozenset[Hashable]:
        chosen = [(own, draw) for own, draw in self._draws.items() if plan is None or own == plan]
        return frozenset((own, kind) for own, draw in chosen for kind in draw.ready)


def _laid_out(tree: TreeTensors) -> TreeTensors:
    """`tree` as the compiled :func:`settle` takes it, which does not read visibility."""
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
