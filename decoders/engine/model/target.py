"""The target model as the loop sees it: a pass runs nodes (a root and draft tokens), returns logits and writes the KV cache."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...common import devices, host_reads
from ...common.announce import announced
from ...common.transformers_compat import cache_keyword, decoder_layers
from ...errors import ContextLengthError, UnsupportedError
from ...settings import Attention
from ...tree import TreeTensors
from . import attention, buckets, experts, own_masks, recurrent, rope
from .blocks import ForwardResult, LeadingText, PassInput, causal_block, ending
from .cache import CacheBuffers
from .facts import Attending, Checks, Lengths, ModelTokens, Products
from .features import Taps
from .kernels import attention as kernel
from .kernels.chosen import kernel_for
from .layout import backbone_of, context_length, probe_layout, refuse_unfit
from .output_head import OutputHead
from .ranks import Ranks
from .slot_cache import SlotCache, StatePass
from .state_probe import adopt
from .torch_compat import rounds_float32
from .weights.few_rows import multiply_few_rows
from .weights.fused_blocks import fuse_blocks, is_whole
from .weights.fused_layers import fuse_layers
from .weights.quantization import Precision, quantize, rounds_activations, take_packed
from .weights.same_bits import align_activations, replace_norms
from .weights.state import WeightState
from .weights.twin import share_weights

#: Greatest number of prompt tokens per row and pass by default.
PREFILL_CHUNK = 512


class Target:
    """A causal language model for the loop: our copy of the user's model, with the user's weights.

    :func:`~decoders.engine.model.self_check.target_of` creates a target and checks it.

    The copy has its own modules and config but shares every parameter with `model`. So our attention function does not affect a plain
    ``model.generate`` that another thread may be running.

    Attributes:
        static: whether steps are recorded per size, so that sizes are rounded up to buckets.
        precision: the precision in which matrices and the KV cache are stored; by default the model's own.
        vocabulary: the tokens that the model accepts and predicts.
        attending: how attention is computed.
        products: how matrices are multiplied.
        lengths: how results depend on the length of a text.
        checks: the results of the checks made when the target was created.
        weights: identifies the weights from which cached keys and values, and quantized matrices, were computed.
        rounds: whether intermediate values are rounded: activations, keys or values are quantized, or float32 products use
            TensorFloat-32. Rounding may enlarge a difference in the last bit.
        recurrent: indices of the layers that keep a state per row (:mod:`.recurrent`). A model with recurrent layers runs uncompiled.
        continues: whether all recurrent layers can continue a text with several tokens at once.
        taps: the hooks that store outputs of a pass besides logits.
        multiple: the sizes of blocks and chunks of text are multiples of this number. It exceeds 1 in low precision on a CPU with
            PyTorch's attention. The last bits of logits then depend on the slots of a path, so tokens accepted on a branch run again
            in the slots ``base + depth``.
        ranks: the processes that share the weights.

    Raises:
        UnsupportedError: the loop does not support the model's architecture.
        Exception: a kernel failed to run.
    """

    def __init__(self, model: PreTrainedModel, attends: Attention = "auto", precision: Precision = Precision()) -> None:
        refuse_unfit(model)
        precision.check(model.device)
        self.precision, self.ranks, self.checks = precision, Ranks.of(model), Checks()
        if self.ranks.several and precision.weights is not None:
            raise UnsupportedError(
                f"weights={precision.weights!r}: {self.ranks.size} processes share the weights of {type(model).__name__}, and parts of "
                "matrices cannot be quantized. Leave weights='keep'; kv_cache='int8' works"
            )
        self.static = host_reads.static_shapes(model.device)
        kinds, kind_of_layer = attention.layer_kinds(model.config)
        self.model = share_weights(model)
        experts.take_over(self.model)
        rope_tables = rope.take_over(self.model)
        self.attending = Attending("sdpa", kinds, kind_of_layer)
        self._attend_by("sdpa")
        self.tell_kinds(own_masks.take_over(self.model, kinds))
        self.vocabulary = ModelTokens.of(model)
        self.backbone = backbone_of(self.model)
        self.taps = Taps(self.model)
        packed = take_packed(self.model)
        layout = probe_layout(self.model, len(self.attending.kinds))
        groups = layout.shared_inputs
        head = self.model.get_output_embeddings()
        with announced(
            f"copying matrices for weights={precision.weights!r}" if precision.weights else "taking matrices over"
        ):
            quantized = quantize(self.model, precision.weights, head, groups=groups, given=packed)
        self.products = Products(groups, quantized, multiply_few_rows(self.model, groups, precision.exact_products))
        if precision.exact_products:
            replace_norms(self.model)
        fuse_layers(self.model)
        self.weights = WeightState.of(model)
        self.layout, self.lengths = layout.layers, Lengths(context_length(model), rope_tables, layout.counted)
        self.recurrent = tuple(entry.layer for entry in layout.recurrent)
        self.continues = adopt(layout.recurrent)
        self.static = self.static and not self.recurrent
        if precision.cache is not None:
            self.layout = [replace(spec, quantized=True) for spec in self.layout]
        group = layout.groups[0] if len(set(layout.groups)) == 1 else 1
        self._cache_keyword = cache_keyword(self.model)
        self.taps.head.forget()
        self.dtype = self.layout[0].dtype
        self.device = self.layout[0].device
        self.rounds = precision.rounds or rounds_activations(model) or rounds_float32(self.device)
        ours = kernel_for(attends, self.layout, len(layout.groups), type(self.model).__name__)
        if ours is not None:
            self._attend_by(ours)
        in_levels = self.attends == "cpu" and layout.as_stored
        own = len(layout.groups) < sum(spec.key_heads > 0 for spec in self.layout)
        self.attending = replace(self.attending, group=group, in_levels=in_levels, own=own)
        if ours is not None and (self.products.few_rows or quantized.layers) and not self.recurrent:
            fuse_blocks(decoder_layers(self.model), ours, self._read_few)
        multiple = buckets.row_multiple(self.dtype, self.device, self.rounds)
        if multiple > 1 and not self.recurrent:
            align_activations(self.model)
        # Only PyTorch's attention needs multiples. Models with recurrent layers cannot have them: blocks would be filled up with
        # committed tokens, which recurrent layers cannot run again.
        self.multiple = 1 if self.recurrent or self.attends == "cpu" else multiple

    def _few_tokens(self) -> PassInput:
        """The input of a pass for checks: four tokens in one row, and a new cache, which is not quantized."""
        tokens = torch.tensor([[3, 5, 7, 11]], device=self.device) % self.vocabulary.embeddings
        start, tree = torch.zeros(1, dtype=torch.int64, device=self.device), causal_block(1, 4, self.device)
        buffers = CacheBuffers.allocate([replace(spec, quantized=False) for spec in self.layout], 1, 16)
        return PassInput(tokens, start, tree, buffers, torch.arange(8, device=self.device))

    def _read_few(self, watch: Callable[[SlotCache], None]) -> None:
        """Runs a pass over a few tokens. watch: called with the pass's cache, which is not quantized, before the pass runs."""
        given = self._few_tokens()
        inputs = self.inputs(given.nodes, given.base, given.tree, given.buffers, given.view)
        watch(inputs[self._cache_keyword])
        self.model(**inputs)
        self.taps.head.forget()

    def check_lengths(self, longest: int, rows: int) -> None:
        """Raises ContextLengthError if the loop's results for `rows` texts of up to `longest` tokens would differ from the model's."""
        name, most = type(self.model).__name__, self.checks.longest
        if most is not None and longest > most:
            raise ContextLengthError(
                f"{name} does not apply the sliding window of its config, so the loop can decode at most that window, {most} "
                f"tokens, not {longest}: ask for fewer, or call generate without strategy=."
            )
        if self.lengths.counted is not None:
            self.lengths.counted.check(name, longest, rows)

    def rope_table_of(self, length: int) -> int:
        """Number of the rotary table for texts of `length` tokens (:class:`~decoders.engine.model.rope.RopeTables`); 0 if only one."""
        return 0 if self.lengths.rope_tables is None else self.lengths.rope_tables.of(length)

    def use_rope_table(self, number: int) -> None:
        """Makes the next passes use the rotary table with this number."""
        if self.lengths.rope_tables is not None:
            self.lengths.rope_tables.use(number)

    def tell_kinds(self, kinds: tuple[attention.LayerKind, ...]) -> None:
        """Sets how far back each kind of layer attends."""
        self.attending = replace(self.attending, kinds=kinds)
        attention.tell_kinds(self.model, kinds, self.attending.kind_of_layer)

    def kind_of(self, layer: int) -> attention.LayerKind:
        """The kind of a decoder layer, which says how far back the layer attends."""
        return self.attending.kinds[self.attending.kind_of_layer[layer]]

    def _attend_by(self, attends: Literal["sdpa", "triton", "cpu"]) -> None:
        self.attending = replace(self.attending, by=attends)
        names = {"sdpa": attention.NAME, "triton": kernel.NAME, "cpu": kernel.CPU_NAME}
        attention.attend_by(self.model, names[attends])

    @property
    def attends(self) -> Literal["sdpa", "triton", "cpu"]:
        """Which attention runs: our kernel ("triton" or "cpu") or PyTorch's ("sdpa")."""
        return self.attending.by

    @property
    def vocab_size(self) -> int:
        """Number of logits ``V``."""
        return self.vocabulary.size

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the watched decoder layers: the target's results contain their outputs."""
        return self.taps.layers

    @functools.cached_property
    def uncompiled(self) -> str | None:
        """Why no pass can be compiled; None if passes can be compiled."""
        name = type(self.model).__name__
        for switch in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
            if os.environ.get(switch) == "1":
                return f"the environment has {switch}=1"
        if self.recurrent:
            return f"{name} keeps recurrent states: its blocks run level by level, so every shape of tree would need another graph"
        if not devices.compiles(self.device):
            return f"{name} is on {self.device.type!r}, and passes are compiled for {' and '.join(devices.TRIED)} only"
        return None

    @functools.cached_property
    def runs_whole_layers(self) -> bool:
        """Whether a single operator computes each decoder layer, so that compiling saves little."""
        return self.decoder_layers > 0 and all(map(is_whole, decoder_layers(self.model)))

    @functools.cached_property
    def decoder_layers(self) -> int:
        """Number of decoder layers; 0 if they were not found."""
        return len(decoder_layers(self.model))

    @property
    def matrices(self) -> list[Tensor]:
        """The tensors of all quantized matrices."""
        return [tensor for weight in self.products.quantized.weights for tensor in weight.tensors]

    @property
    def pads_blocks(self) -> bool:
        """Whether the sizes of all blocks must be multiples of :attr:`multiple`, because nothing pads the queries of attention.

        Otherwise blocks of several rows, and blocks of one node, may keep their size.
        """
        return self.multiple > 1 and self.attending.own

    def takes_single_nodes(self, rows: int) -> bool:
        """Whether a block of `rows` rows may have a single node per row.

        False if sizes are static, or if a token could change because a single node's logits have other bits.
        """
        if self.static or self.pads_blocks:
            return False
        if (rows > 1 or self.products.few_rows) and not buckets.low_precision(self.dtype, self.rounds):
            return True
        invariance = self.checks.invariance
        return (rows > 1 and not self.rounds) or (invariance is not None and invariance.single)

    def buffers(self, rows: int, slots: int) -> CacheBuffers:
        """A new cache. rows: number of rows; slots: number of slots per row."""
        placeholders = self.vocabulary.placeholders is not None
        return CacheBuffers.allocate(self.layout, rows, slots, placeholders, self.attends == "triton")

    def sibling(self, layers: tuple[int, ...] | None = None) -> Target:
        """A second target with its own modules, which share all weights, also quantized ones.

        layers: the decoder layers whose outputs the sibling's results contain; None for the same layers as in this target's results.
        """
        twin = copy.copy(self)
        twin.model = self.copied()
        twin.backbone = backbone_of(twin.model)
        twin.taps = Taps(twin.model, self.layers if layers is None else layers)
        return twin

    def copied(self) -> PreTrainedModel:
        """Another copy of the model's modules, without the hooks in :attr:`taps`."""
        model = share_weights(self.model, self.matrices)
        self.taps.unwatch(model)
        return model

    @torch.no_grad()
    def output_head(self) -> OutputHead:
        """The output head, without the model's other layers.

        Raises:
            UnsupportedError: the head's logits differ from the model's.
        """
        head = OutputHead(self.copied())
        result = self.forward(self._few_tokens())
        head.check(result.hidden, result.logits)
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """The input embeddings of `tokens`. Ids outside the vocabulary get the embedding of an arbitrary token."""
        return cast(Tensor, self.model.get_input_embeddings()(tokens.clamp(0, self.vocabulary.embeddings - 1)))

    def renew(self, weights: WeightState) -> bool:
        """Quantizes the current weights again, in place: compiled code and recorded steps then read the new values.

        Returns False if a 16-bit copy can no longer represent its weight. weights: the current :class:`WeightState`.
        """
        if not self.products.quantized.renew():
            return False
        self.weights = weights
        return True

    def _quick(self) -> AbstractContextManager:
        """Returns inference mode, which makes operators cheaper, for passes that are neither compiled nor recorded."""
        seen = self.static or torch.compiler.is_dynamo_compiling()
        return nullcontext() if seen else torch.inference_mode()  # mode=False would switch gradients on

    def forward(self, given: PassInput) -> ForwardResult:
        """Runs one pass over a block of nodes. Does not prefill the prompt piece ``given.piece``."""
        nodes, text, root = given.nodes, given.text, given.root
        if root is not None:
            count = text.length + 1
            # The root is an embedding without an id, but some models need the ids of draft tokens. So drafts run in a second pass,
            # with ids. Recurrent models run all nodes in one pass.
            if nodes.shape[1] > count and not self.recurrent:
                begin = causal_block(len(nodes), count, nodes.device)
                first = self.forward(given._replace(nodes=nodes[:, :count], tree=begin))
                drafts = given._replace(nodes=nodes[:, count:], text=LeadingText(), root=None)
                return first.followed_by(self.forward(drafts))
            # The root's id may be -1. Recurrent layers would then take the root for a node without a draft token, and not run it.
            nodes = nodes.clamp(min=0).where(torch.arange(nodes.shape[1], device=nodes.device) == text.length, nodes)
        inputs = self.inputs(nodes, given.base, given.tree, given.buffers, given.view, text if text.length else None)
        if root is not None:
            vectors = self.embed(inputs.pop("input_ids")).clone()
            vectors[:, text.length] = root
            inputs["inputs_embeds"] = vectors
        kept = torch.arange(text.length, nodes.shape[1], device=nodes.device) if text.length else None
        return self.results(inputs, kept).behind(text.length)

    def prefill(self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int) -> None:
        """Writes keys and values of `tokens` ``[B, N]`` to the slots from `start` ``[B]`` on, without logits. latest: `start.max()`."""
        with self._quick():
            self.backbone(**self._text_inputs(tokens, start, buffers, view, latest))
        if self.taps.states is not None:
            self.taps.states.forget()

    def features(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool,
        valid: Tensor | None = None,
    ) -> ForwardResult:  # fmt: skip
        """Like :meth:`prefill`, but returns results for all tokens; if not `logits`, with logits of the first token only.

        valid: ``[B, N]`` bool, which tokens belong to the row's text. The other tokens are padding after the text.
        """
        inputs = self._text_inputs(tokens, start, buffers, view, latest, valid)
        return self.results(inputs, None if logits else torch.zeros(1, dtype=torch.int64, device=tokens.device))

    def results(self, inputs: dict, kept: Tensor | None = None) -> ForwardResult:
        """The model's results for `inputs`. The results are not inference tensors, so strategies and compiled functions can use them.

        kept: ``[K]`` int64, the nodes that get logits; None for all nodes.
        """
        self.taps.head.restrict_to(kept)
        with self._quick():
            output = self.model(**inputs)
        layers = self.taps.states.taken() if self.taps.states is not None else None
        return ForwardResult(_ordinary(output.logits.float()), _ordinary(self.taps.head.taken()), layers)

    def _text_inputs(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, valid: Tensor | None = None
    ) -> dict:  # fmt: skip
        """The model's arguments for a chunk of text. Recurrent layers process text differently from a block of nodes."""
        rows, count = tokens.shape
        text_pass = None
        if buffers.states is not None:
            counts = valid.sum(1).tolist() if valid is not None else [count] * rows
            specs = [spec.states for spec in self.layout]
            text_pass = recurrent.TextPass(buffers.states, specs, start.tolist(), counts)
        tree = causal_block(rows, count, tokens.device)
        return self.inputs(tokens, start, tree, buffers, view, LeadingText(count, latest), text_pass)

    def inputs(
        self, nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: Tensor,
        text: LeadingText | None = None, text_pass: recurrent.TextPass | None = None,
    ) -> dict:  # fmt: skip
        n = nodes.shape[1]
        states: StatePass | None = text_pass
        if text_pass is None and buffers.states is not None:
            specs = [spec.states for spec in self.layout]
            states = recurrent.NodePass(buffers.states, specs, tree.visible, nodes, base)
        offsets, visible = ending(tree.offsets, n), ending(tree.visible, n)
        slots = base[:, None] + ending(torch.arange(tree.offsets.shape[1], device=nodes.device)[None], n)
        if self.attends != "sdpa":
            whole_text = text is not None and text.length == n
            mask = kernel.pack_mask(base, tree.offsets, None if whole_text else visible)
        else:
            mask = attention.build_mask(self.attending.kinds, base, tree.offsets, visible, view.shape[0], self.dtype)
            mask = attention.shaped(mask, self.attending.group, text)
        positions, counts = base[:, None] + offsets, None
        if self.lengths.counted is not None and self.lengths.counted.by_node and len(positions) == 1:
            counts = positions[0] - torch.arange(n, device=nodes.device)
        if buffers.shifts is not None:
            positions = positions + buffers.shifts[:, None]
        cache = SlotCache(buffers, slots, view.shape[0], states, counts, self.attending.in_levels)
        return self.arguments(nodes, positions, mask, cache)

    def arguments(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> dict:
        """The arguments for the model's ``forward``. tokens, positions: ``[B, N]`` int64."""
        return {
            "input_ids": tokens.clamp(0, self.vocabulary.embeddings - 1),
            "attention_mask": mask,
            # Draft tokens may lie beyond the context. The loop never commits such draft tokens, but their positions have no embedding.
            "position_ids": positions.clamp(0, self.lengths.most - 1),
            "use_cache": True,
            self._cache_keyword: cache,
        }


def _ordinary(tensor: Tensor) -> Tensor:
    """Returns `tensor`, or an ordinary copy if `tensor` is an inference tensor."""
    inference = not torch.compiler.is_dynamo_compiling() and tensor.is_inference()
    return tensor.clone() if inference else tensor
