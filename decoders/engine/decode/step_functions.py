"""The functions of a step that are compiled together with its pass: drawing tokens, and accepting a path."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...sampling.prefixes import Prefixes
from ...sampling.processors import Masks, SamplingInputs, SamplingPlan
from ...tree import Topology, TreeTensors
from ..model.compiled.forward_pass import ForwardPass
from ..model.compiled.functions import CompiledFunction, TieredFunction, kind_of
from ..model.compiled.regions import EXAMPLE_SLOTS, copied_whole
from ..model.compiled.tiers import Beside, Tiers
from ..model.target import Target
from .verify import draw_tokens, settle


class StepFunctions(Beside):
    """The functions that draw tokens and accept a path. The :class:`Tiers` of a forward pass decide which of them run compiled."""

    def __init__(self) -> None:
        self.forget()

    @staticmethod
    def of(forward_pass: ForwardPass) -> StepFunctions:
        """The functions for the steps of `forward_pass`; created once and stored in its tiers."""
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
        """Accepts and appends the matching path (:func:`decoders.engine.decode.verify.settle`). Runs compiled if the passes do."""
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
        """Draws the target's token after each node (:func:`decoders.engine.decode.verify.draw_tokens`).

        On the CPU the function runs uncompiled, which is faster. On other devices uncompiled code launches many small kernels, so the
        function runs compiled if the passes do.
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


def _laid_out(tree: TreeTensors) -> TreeTensors:
    """A copy of `tree` for the compiled :func:`settle`, with the ancestors in place of visibility, which :func:`settle` never reads."""
    ancestors = copied_whole(tree.ancestors)
    return TreeTensors(copied_whole(tree.parents), copied_whole(tree.offsets), ancestors, ancestors)


def _settle_examples(target: Target, rows: int, count: int) -> tuple:
    """Example arguments for compiling :func:`settle`, with the sizes of :func:`~decoders.engine.model.compiled.regions.examples`."""
    device, tree = target.device, Topology.chain(count + 1 if count > 1 else 0).tensors(rows, target.device)
    block = torch.zeros(rows, len(tree), dtype=torch.int64, device=device)
    lengths, stops = torch.full((rows,), 20, device=device), torch.full((rows, 8), -1, device=device)
    tokens = torch.zeros(rows, EXAMPLE_SLOTS, dtype=torch.int64, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    return block, block.clone(), _laid_out(tree), tokens, lengths, lengths + 39, finished, stops
