"""The target model as the loop sees it: our copy of the user's model, checked, with kernels and its own attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...common import devices, host_reads
from ...common.announce import announced
from ...common.transformers_compat import cache_keyword, decoder_layers
from ...errors import ContextLengthError, UnsupportedError
from ...settings import Attention
from . import attention, buckets, experts, own_masks, rope
from .blocks import PassInput, causal_block
from .cache import CacheBuffers
from .facts import Attending, Checks, Lengths, Products, Vocabulary
from .features import Taps
from .kernels import attention as kernel
from .kernels.chosen import kernel_for
from .layout import backbone_of, context_length, probe_layout, refuse_unfit, shared_inputs
from .output_head import OutputHead
from .passes import Passes
from .ranks import Ranks
from .slot_cache import SlotCache
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


class Target(Passes):
    """A causal language model for the loop: our copy of the user's model, with the user's weights.

    :func:`~decoders.engine.model.self_check.target_of` creates a target and checks it.

    The copy has its own modules and config but shares every parameter with `model`. So our attention function does not affect a plain
    ``model.generate`` that another thread may be running.

    Attributes:
        static: whether steps are recorded per size, so that sizes are rounded up to buckets.
        precision: precision of the matrices and of the cache, if it differs from the model's precision.
        vocabulary: the tokens that the model accepts and predicts.
        attending: how attention is computed.
        products: how matrices are multiplied.
        lengths: how results depend on the length of a text.
        checks: the results of the checks made when the target was created.
        weights: the state of the weights from which the kept keys and values, and the quantized matrices, were computed.
        rounds: whether intermediate values are rounded (activations, keys or values are quantized, or float32 products use
            TensorFloat-32), so that a difference in the last bit may become larger.
        recurrent: indices of the layers that keep a state per row (:mod:`.recurrent`). A model with recurrent layers runs uncompiled.
        continues: whether all recurrent layers can continue a text with several tokens at once.
        taps: the hooks that store outputs of a pass besides logits.
        multiple: blocks and chunks of text have a multiple of this number of nodes. It is more than 1 if the last bits of logits matter
            and depend on the slots of a path. Then tokens accepted on a branch run again in the slots ``base + depth``.
        ranks: the processes that share the weights.

    Raises:
        UnsupportedError: the loop does not support the model's architecture. A kernel that does not run may raise any exception.
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
        sides = rope.take_over(self.model)
        self.attending = Attending("sdpa", kinds, kind_of_layer)
        self._attend_by("sdpa")
        self.tell_kinds(own_masks.take_over(self.model, kinds))
        self.vocabulary = Vocabulary.of(model)
        self.backbone = backbone_of(self.model)
        self.taps = Taps(self.model)
        packed = take_packed(self.model)
        groups = shared_inputs(self.model, len(self.attending.kinds))
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
        layout = probe_layout(self.model, len(self.attending.kinds))
        self.layout, self.lengths = layout.layers, Lengths(context_length(model), sides, layout.counted)
        self.recurrent = tuple(entry.layer for entry in layout.recurrent)
        self.continues = adopt(layout.recurrent)
        self.static = self.static and not self.recurrent
        if precision.cache is not None:
            self.layout = [replace(spec, quantized=True) for spec in self.layout]
        group = layout.groups[0] if len(set(layout.groups)) == 1 else 1
        self.cache_keyword = cache_keyword(self.model)
        self.taps.head.forget()
        self.dtype = self.layout[0].dtype
        self.device = self.layout[0].device
        self.rounds = precision.rounds or rounds_activations(model) or rounds_float32(self.device)
        ours = kernel_for(attends, self.layout, len(layout.groups), type(self.model).__name__)
        if ours is not None:
            self._attend_by(ours)
        in_levels = self.attends == "cpu" and layout.as_stored
        self.attending = replace(self.attending, group=group, in_levels=in_levels)
        if ours is not None and (self.products.few_rows or quantized.layers) and not self.recurrent:
            fuse_blocks(decoder_layers(self.model), ours, self._read_few)
        multiple = buckets.row_multiple(self.dtype, self.device, self.rounds)
        if multiple > 1 and not self.recurrent:
            align_activations(self.model)
        # Only PyTorch's attention needs multiples. Committed tokens run again to fill a multiple, which recurrent states do not allow.
        self.multiple = 1 if self.recurrent or self.attends == "cpu" else multiple

    def _few_tokens(self) -> PassInput:
        """The input of a pass over four tokens of one row, for checks, with a new cache that is not quantized."""
        tokens = torch.tensor([[3, 5, 7, 11]], device=self.device) % self.vocabulary.embeddings
        start, tree = torch.zeros(1, dtype=torch.int64, device=self.device), causal_block(1, 4, self.device)
        buffers = CacheBuffers.allocate([replace(spec, quantized=False) for spec in self.layout], 1, 16)
        return PassInput(tokens, start, tree, buffers, torch.arange(8, device=self.device))

    def _read_few(self, watch: Callable[[SlotCache], None]) -> None:
        """Runs a pass over a few tokens. watch: called before the pass with the cache that it uses, which is not quantized."""
        given = self._few_tokens()
        inputs = self.inputs(given.nodes, given.base, given.tree, given.buffers, given.view)
        watch(inputs[self.cache_keyword])
        self.model(**inputs)
        self.taps.head.forget()

    def check_lengths(self, longest: int, rows: int) -> None:
        """Raises ContextLengthError if the loop cannot decode `rows` texts of up to `longest` tokens with the model's own results."""
        name, most = type(self.model).__name__, self.checks.longest
        if most is not None and longest > most:
            raise ContextLengthError(
                f"{name} does not look back as its config's window says, so the loop can decode at most the {most} tokens of "
                f"that window, and {longest} are asked for: ask for fewer, or call generate without strategy=."
            )
        if self.lengths.counted is not None:
            self.lengths.counted.check(name, longest, rows)

    def side_of(self, length: int) -> int:
        """The rotary table (side) for a text of `length` tokens, see :class:`~decoders.engine.model.rope.Sides`; 0 if there is one."""
        return 0 if self.lengths.sides is None else self.lengths.sides.of(length)

    def take_side(self, side: int) -> None:
        """Makes the next passes use the rotary table of `side`."""
        if self.lengths.sides is not None:
            self.lengths.sides.take(side)

    def tell_kinds(self, kinds: tuple[attention.LayerKind, ...]) -> None:
        """Sets how far each kind of layer looks back."""
        self.attending = replace(self.attending, kinds=kinds)
        attention.tell_kinds(self.model, kinds, self.attending.kind_of_layer)

    def kind_of(self, layer: int) -> attention.LayerKind:
        """The kind of a decoder layer, which says how far the layer looks back."""
        return self.attending.kinds[self.attending.kind_of_layer[layer]]

    def _attend_by(self, attends: Literal["sdpa", "triton", "cpu"]) -> None:
        self.attending = replace(self.attending, by=attends)
        names = {"sdpa": attention.NAME, "triton": kernel.NAME, "cpu": kernel.CPU_NAME}
        attention.attend_by(self.model, names[attends])

    @property
    def vocab_size(self) -> int:
        """See :attr:`Vocabulary.size`."""
        return self.vocabulary.size

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers whose outputs are in the target's results, see :meth:`watching`."""
        return self.taps.layers

    @property
    def uncompiled(self) -> str | None:
        """Why no pass can be compiled; None if passes can be compiled."""
        name = type(self.model).__name__
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

    def takes_single_nodes(self, rows: int) -> bool:
        """Whether a block of `rows` rows may have a single node per row. False if sizes are static, or if other bits of a single node's
        logits could change a token.
        """
        if self.static:
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
        """A target with a further copy of the modules, which shares the (quantized) weights. layers: see :meth:`watching`."""
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

    def watching(self, layers: tuple[int, ...]) -> Target:
        """A :meth:`sibling` whose results contain the outputs of the decoder layers `layers`. Its passes need another graph."""
        return self.sibling(layers)

    def renew(self, weights: WeightState) -> bool:
        """Quantizes the present weights again, in place, so that compiled code and recorded steps read the new values. Returns False if
        a 16-bit copy of a weight can no longer represent the weight. weights: the present :class:`WeightState`.
        """
        if not self.products.quantized.renew():
            return False
        self.weights = weights
        return True
