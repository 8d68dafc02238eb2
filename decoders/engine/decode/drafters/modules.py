"""Drafting networks that are not language models. They run with our matrix products, slot cache and tree masks, like a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ....common import host_reads
from ....common.transformers_compat import cache_keyword, set_attention
from ....drafters import ModulePasses
from ....errors import UnsupportedError
from ....tree import Topology, TreeTensors
from ...model import attention
from ...model.blocks import causal_block, ending
from ...model.buckets import slots_for, view_bucket
from ...model.cache import CacheBuffers, LayerSpec
from ...model.compiled.regions import copied_whole, fixed
from ...model.kernels import attention as kernel
from ...model.kernels import chosen
from ...model.slot_cache import SlotCache
from ...model.state_probe import LayoutProbe
from ...model.weights.few_rows import multiply_few_rows
from ...model.weights.fused import SharedInputs
from ...model.weights.fused_layers import fuse_layers
from ...model.weights.same_bits import replace_norms
from ...model.weights.twin import share_weights


class ModuleTwin:
    """A copy of a module that shares the module's weights, with our matrix products and our attention.

    Args:
        example: the module's inputs for one node, ``[1, 1, …]`` each.
        attends: name of the target's attention implementation.

    Attributes:
        layout: the shapes of keys and values that the module's attention layers store.
        attends: "cpu" if the target uses the attention kernel for CPUs and this module can use it, too; else "sdpa".

    Raises:
        UnsupportedError: the module is on another device than the target, or bypasses the cache.
    """

    attends: Literal["sdpa", "cpu"] = "sdpa"

    def __init__(
        self, module: nn.Module, example: tuple[Tensor, ...], device: torch.device, attends: str = "sdpa"
    ) -> None:
        name = type(module).__name__
        places = {parameter.device for parameter in module.parameters()}
        if places - {device}:
            raise UnsupportedError(
                f"{name} is on {', '.join(sorted(map(str, places)))}, the target on {device}: move {name} there"
            )
        self.module, self.device, self.name = share_weights(module), device, name
        self.cache_keyword = cache_keyword(self.module)
        self._configs = [*attention.module_configs(self.module).values()]
        self._attend_by(attention.NAME)
        first = next(iter(self._configs), None)
        self.kinds, kind_of_layer = (
            attention.layer_kinds(first) if first is not None else ((attention.LayerKind(),), (0,))
        )
        attention.tell_kinds(self.module, self.kinds, kind_of_layer)
        self.dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
        shape = attention.Probe()
        with SharedInputs(self.module) as shared:
            self.layout = self._probe(example, shape)
        multiply_few_rows(self.module, shared.groups())
        replace_norms(self.module)
        fuse_layers(self.module)
        if attends == chosen.preferred(device) == "cpu" and not chosen.unfit(
            "cpu", self.layout, len(shape.groups), device
        ):
            self._take_kernel(example)
        self._functions: dict[tuple, Callable] = {}

    def function(self, options: tuple[tuple[str, Any], ...]) -> Callable:
        """The module's pass as a plain tensor function, with `options` as keywords; the same object for equal `options`."""
        if options not in self._functions:
            self._functions[options] = self._pass(options)
        return self._functions[options]

    def _pass(self, options: tuple[tuple[str, Any], ...] = ()) -> Callable:
        module, kinds, dtype, keywords = self.module, self.kinds, self.dtype, dict(options)
        name, by_kernel = self.cache_keyword, self.attends == "cpu"

        def module_pass(
            base: Tensor, offsets: Tensor, visible: Tensor, buffers: CacheBuffers, view: Tensor, *inputs: Tensor
        ) -> Any:
            n = visible.shape[1]
            index = torch.arange(offsets.shape[1], device=base.device)[None]
            slots = base[:, None] + ending(index, n)
            if by_kernel:
                mask = kernel.pack_mask(base, offsets, visible)
            else:
                mask = attention.build_mask(kinds, base, offsets, visible, view.shape[0], dtype)
            positions = (base[:, None] + ending(offsets, n)).clamp(min=0)
            cache = {name: SlotCache(buffers, slots, view.shape[0])}
            return module(*inputs, attention_mask=mask, position_ids=positions, **cache, **keywords)

        return module_pass

    def _attend_by(self, name: str) -> None:
        for config in self._configs:
            set_attention(config, name)

    @torch.no_grad()
    def _take_kernel(self, example: tuple[Tensor, ...]) -> None:
        """Switches to the attention kernel for CPUs, if it agrees with PyTorch's attention on a small tree."""
        tree, view = Topology.branches(2, 1).tensors(1, self.device), torch.arange(64, device=self.device)
        draws, results = torch.Generator().manual_seed(0), []
        inputs = [each.expand(1, 3, *each.shape[2:]).clone() for each in example]
        for each in inputs:
            if each.is_floating_point():
                each.normal_(generator=draws)
        try:
            both: tuple[tuple[str, Literal["sdpa", "cpu"]], ...] = ((attention.NAME, "sdpa"), (kernel.CPU_NAME, "cpu"))
            for name, self.attends in both:
                self._attend_by(name)
                rows = CacheBuffers.allocate(self.layout, 1, 128)
                results.append(self._pass()(tree.offsets[:, 0], tree.offsets, tree.visible, rows, view, *inputs))
            tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
            torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
        except Exception:  # the module's own code may raise any exception when it gets the kernel's packed mask
            self.attends = "sdpa"
            self._attend_by(attention.NAME)

    def _probe(self, example: tuple[Tensor, ...], shape: attention.Probe) -> list[LayerSpec]:
        probe = LayoutProbe()
        self._run(example, probe, shape)
        if sorted(probe.layouts) != list(range(len(probe.layouts))) or not probe.layouts:
            raise UnsupportedError(
                f"{self.name} stored keys and values for layers {sorted(probe.layouts)}: number its attention layers from 0 on, and "
                f"call {self.cache_keyword}.update in each"
            )
        return [probe.layouts[layer] for layer in range(len(probe.layouts))]

    @torch.no_grad()
    def _run(self, example: tuple[Tensor, ...], probe: LayoutProbe, shape: attention.MaskShape) -> None:
        """Runs the module on one node. probe: takes the place of the cache; shape: shape of the attention masks."""
        place = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        mask = torch.zeros(1, len(self.kinds), 1, 1, dtype=self.dtype, device=self.device)
        attention.tell_shape(mask, shape)
        self.module(*example, attention_mask=mask, position_ids=place, **{self.cache_keyword: probe})


class SlotPasses(ModulePasses):
    """A module's passes in one call.

    Args:
        rows, slots: the module's cache has this many rows, with `slots` + `ahead` slots each.
        ahead: greatest number of nodes that a step writes after a row's text.
        compile: ``Context.compile``.

    Attributes:
        on_device: whether the passes never wait for the device, so that steps can be recorded.
    """

    on_device = True

    def __init__(
        self, twin: ModuleTwin, rows: int, slots: int, ahead: int, compile: Callable[[Callable], Callable]
    ) -> None:
        self.twin, self.rows, self.ahead, self.compile, self.passes = twin, rows, ahead, compile, 0
        self.static = host_reads.static_shapes(twin.device)
        self._functions: dict[tuple, Callable] = {}
        self.buffers = CacheBuffers.allocate(twin.layout, rows, slots_for(slots + ahead, self.static))
        self._settle()

    def _settle(self) -> None:
        fixed(*((buffer, (1, 3)) for buffer in self.buffers.tensors))
        self._range = torch.arange(self.buffers.slots, device=self.twin.device)

    def reserve(self, slots: int) -> None:
        """Enlarges the cache if a block that ends at slot `slots` needs it; stored keys and values stay."""
        if slots_for(slots, self.static) > self.buffers.slots:
            self.buffers = self.buffers.enlarged(slots_for(2 * slots, self.static))
            self._settle()

    def rebatch(self, sources: Sequence[int], slots: int) -> None:
        """Moves the rows' keys and values after rows have joined or left.

        Args:
            sources: the former index of each row, -1 for a new row.
            slots: number of slots that each row needs.
        """
        if len(sources) != self.rows or any(source not in (row, -1) for row, source in enumerate(sources)):
            index = torch.tensor([max(source, 0) for source in sources], device=self.twin.device)
            self.buffers, self.rows = self.buffers.gathered(index), len(sources)
            self._settle()
        self.reserve(slots + self.ahead)

    @property
    def nbytes(self) -> int:
        return self.buffers.nbytes

    def static_parts(self) -> dict[str, Any]:
        """The objects that a recorded step reads and writes; see :mod:`~decoders.engine.model.static_inputs`."""
        return dict(module=self.twin.module, buffers=self.buffers, range=self._range)

    def __call__(self, base: Tensor, *inputs: Tensor, tree: TreeTensors | None = None, **options: Any) -> Any:
        count = inputs[0].shape[1]
        tree = causal_block(self.rows, count, base.device) if tree is None else tree
        view = self._range
        if host_reads.host_reads(base):  # on other devices reading `base` would be a sync
            end = int(base.max()) + tree.offsets.shape[1]
            self.reserve(end)
            view = self._range[: view_bucket(max(end, 1))]
        key = tuple(sorted(options.items()))
        if key not in self._functions:
            self._functions[key] = self.compile(self.twin.function(key))
        visible = copied_whole(tree.visible[:, -count:])
        self.passes += 1
        return self._functions[key](base, copied_whole(tree.offsets), visible, self.buffers, view, *inputs)
