"""The target model as the loop sees it: many nodes in, logits out, keys and values in numbered slots."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...common import devices
from ...common.transformers_compat import cache_keyword, decoder_layers
from ...errors import ContextLengthError, UnsupportedError
from ...settings import Attention
from ...tree import TreeTensors
from . import attention, buckets, experts, own_masks, recurrent, rope
from .blocks import LeadingText, PassInput, causal_block
from .cache import CacheBuffers, SlotCache, StatePass
from .features import HeadInputs, LayerStates, OutputHead
from .kernels import attention as kernel
from .layout import (
    backbone_of,
    context_length,
    embeddings_of,
    placeholder_ids,
    probe_layout,
    refuse_unfit,
    shared_inputs,
    vocabulary_of,
)
from .ranks import Ranks
from .state_probe import adopt
from .torch_compat import rounds_float32
from .weights.few_rows import multiply_few_rows
from .weights.fused_blocks import fuse_blocks
from .weights.fused_layers import fuse_layers
from .weights.quantization import Precision, quantize, rounds_activations, take_packed
from .weights.same_bits import align_activations, replace_norms
from .weights.state import WeightState
from .weights.twin import share_weights

#: Most prompt tokens per row and pass by default.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class ForwardResult:
    """The result of a pass over a block of nodes.

    Attributes:
        logits: ``[B, N, V]`` float32.
        hidden: ``[B, N, H]``, the output head's input.
        layers: ``[B, N, T, H]``, outputs of the watched layers, None without any.
    """

    logits: Tensor
    hidden: Tensor
    layers: Tensor | None = None

    def behind(self, count: int) -> ForwardResult:
        """The same without the hidden states of the first `count` nodes, for which there are no logits."""
        if not count:
            return self
        layers = self.layers[:, count:] if self.layers is not None else None
        return ForwardResult(self.logits, self.hidden[:, count:], layers)

    def followed_by(self, other: ForwardResult) -> ForwardResult:
        """These nodes and, behind them, those of `other`."""
        own, others = self.layers, other.layers
        layers = torch.cat([own, others], 1) if own is not None and others is not None else None
        logits, hidden = torch.cat([self.logits, other.logits], 1), torch.cat([self.hidden, other.hidden], 1)
        return ForwardResult(logits, hidden, layers)


@dataclass(frozen=True)
class Invariance:
    """Whether a node has the same bits in every block (:mod:`.invariance`).

    Attributes:
        holds: whether drafts that are chains give the bits of plain decoding.
        differs: the comparisons in which bits differed; the one of branches does not count for `holds`.
        single: whether a block may have one node in one row; False if that was not compared.
    """

    holds: bool
    differs: tuple[str, ...] = ()
    single: bool = False

    def __str__(self) -> str:
        if not self.differs:
            return "a token has the same bits in every block"
        return f"bits depend on {', '.join(self.differs)}"


class Target:
    """A causal language model whose weights are the user's and whose module tree is private.

    :func:`~decoders.engine.model.self_check.target_of` creates one that is checked.

    The private tree shares every parameter with `model` but has its own config, so that our attention function does not affect a
    plain ``model.generate`` that another thread may be running. Its linear layers read the user's weights where they are.

    Attributes:
        static: whether steps are recorded per size, so that sizes are rounded to buckets.
        attends: the attention: "triton", the kernel for CUDA; "cpu", the kernel for CPUs; or "sdpa".
        rejected: why a kernel of ours was tried and not used (:func:`~decoders.engine.model.self_check.target_of`), else None.
        longest: the longest texts for which its logits are the model's; None: any.
        precision: of the matrices and of the cache, where it is not the model's own.
        in_levels: whether attention reads a quantized cache as it is stored.
        groups: paths of layers that read the same input; they are multiplied as one if they are stored or quantized alike.
        quantized: the quantized matrices.
        few_rows: number of layers that multiply by our kernels, for which one row costs less than three.
        weights: state of the weights that kept texts and quantized matrices are of.
        rounds: whether activations, keys or values are quantized, or products rounded to TensorFloat-32, so that a difference in the
            last bit may change a rounded value.
        layers: decoder layers whose outputs are in its results, see :meth:`watching`.
        recurrent: the layers that keep a state per row (:mod:`.recurrent`); such a model runs uncompiled.
        continues: whether these can read a text in several passes.
        counted: how its layers use the number of tokens in its cache, None if they do not.
        placeholders: ``[P]`` int64, the tokens that stand for parts of images and the like; None: it reads only text. Once more as
            `placeholders_on_host`.
        sides: the lengths at which its rotary tables change, None if they do not.
        multiple: blocks and chunks of text have a multiple of so many nodes. More than 1 where bits matter and depend on the slots of a
            path, too: then what was accepted on a branch is run again in its own slots.
        invariance: in low precision, whether a node has the same bits in every block.
        checked: the day on which its design was compared with the model's, in ISO format (:mod:`.kept_checks`).
        kernel_seconds: time of compiling kernels before the check.
        check_seconds: time of the check against the model.
        ranks: the processes that share its weights.

    Raises:
        UnsupportedError: the model's design does not fit the loop. A kernel that does not run may raise any error.
    """

    rejected: str | None = None
    longest: int | None = None
    invariance: Invariance | None = None
    checked: str = ""
    kernel_seconds: float = 0.0
    check_seconds: float = 0.0

    def __init__(self, model: PreTrainedModel, attends: Attention = "auto", precision: Precision = Precision()) -> None:
        refuse_unfit(model)
        precision.check(model.device)
        self.precision, self.ranks = precision, Ranks.of(model)
        if self.ranks.several and precision.weights is not None:
            raise UnsupportedError(
                f"weights={precision.weights!r}: the weights of {type(model).__name__} are shared by {self.ranks.size} processes, and "
                "parts of matrices are not quantized here. Leave weights='keep'; kv_cache='int8' works"
            )
        self.static = devices.static_shapes(model.device)
        kinds, self._kind_of_layer = attention.layer_kinds(model.config)
        self.model = share_weights(model)
        experts.take_over(self.model)
        self.sides = rope.take_over(self.model)
        self._attend_by("sdpa")
        self.tell_kinds(own_masks.take_over(self.model, kinds))
        self.embeddings = embeddings_of(model)
        self.vocab_size = vocabulary_of(model)
        self.max_positions = context_length(model)
        self.backbone = backbone_of(self.model)
        self.layers: tuple[int, ...] = ()
        self._layer_states: LayerStates | None = None
        self._watch_head()
        packed = take_packed(self.model)
        self.groups = shared_inputs(self.model, len(self.kinds))
        head = self.model.get_output_embeddings()
        self.quantized = quantize(self.model, precision.weights, head, groups=self.groups, given=packed)
        self.few_rows = multiply_few_rows(self.model, self.groups, precision.exact_products)
        if precision.exact_products:
            replace_norms(self.model)
        fuse_layers(self.model)
        self.weights = WeightState.of(model)
        layout = probe_layout(self.model, len(self.kinds))
        self.layout, self.counted = layout.layers, layout.counted
        self.recurrent = tuple(entry.layer for entry in layout.recurrent)
        self.continues = adopt(layout.recurrent)
        self.static = self.static and not self.recurrent
        if precision.cache is not None:
            self.layout = [replace(spec, quantized=True) for spec in self.layout]
        self.group = layout.groups[0] if len(set(layout.groups)) == 1 else 1
        self._cache_keyword = cache_keyword(self.model)
        self._head.forget()
        self.dtype = self.layout[0].dtype
        self.device = self.layout[0].device
        ids = placeholder_ids(model)
        self.placeholders_on_host = torch.tensor(ids, device="cpu") if ids is not None else None
        self.placeholders = torch.tensor(ids, device=self.device) if ids is not None else None
        self.rounds = precision.rounds or rounds_activations(model) or rounds_float32(self.device)
        ours = self._kernel_for(attends, len(layout.groups))
        if ours is not None:
            self._attend_by(ours)
        self.in_levels = self.attends == "cpu" and layout.as_stored
        if ours == "triton" and self.few_rows and not self.recurrent:
            fuse_blocks(decoder_layers(self.model), self._read_few)
        multiple = buckets.row_multiple(self.dtype, self.device, self.rounds)
        if multiple > 1 and not self.recurrent:
            align_activations(self.model)
        # PyTorch's attention alone needs it. To fill a multiple, committed tokens are run again, which recurrent states do not allow.
        self.multiple = 1 if self.recurrent or self.attends == "cpu" else multiple

    def _kernel_for(self, wanted: Attention, own_layers: int) -> kernel.Kernel | None:
        """Our kernel that computes attention, None for PyTorch's. own_layers: number of layers that call the configured attention.

        Raises:
            UnsupportedError: the kernel was asked for by name and does not fit.
        """
        ours = kernel.preferred(self.device) if wanted == "auto" else None if wanted == "sdpa" else wanted
        if ours is None:
            return None
        unfit = kernel.unfit(ours, self.layout, own_layers, self.device)
        if unfit is not None and wanted == "triton":
            raise UnsupportedError(
                f"attention='triton' does not fit {type(self.model).__name__}: {unfit}; leave 'auto'"
            )
        return ours if unfit is None else None

    def _few_tokens(self) -> PassInput:
        """A pass over four tokens of one row, to try what the model computes."""
        tokens = torch.tensor([[3, 5, 7, 11]], device=self.device) % self.embeddings
        start, tree = torch.zeros(1, dtype=torch.int64, device=self.device), causal_block(1, 4, self.device)
        return PassInput(tokens, start, tree, self.buffers(1, 16), torch.arange(8, device=self.device))

    def _read_few(self, watch: Callable[[SlotCache], None]) -> None:
        """A pass over a few tokens. watch: is given its cache first."""
        given = self._few_tokens()
        inputs = self.inputs(given.nodes, given.base, given.tree, given.buffers, given.view)
        watch(inputs[self._cache_keyword])
        self.model(**inputs)
        self._head.forget()

    def check_lengths(self, longest: int, rows: int) -> None:
        """Raises ContextLengthError if texts of up to `longest` tokens in so many rows cannot be decoded as by the model."""
        name = type(self.model).__name__
        if self.longest is not None and longest > self.longest:
            raise ContextLengthError(
                f"{name} sees other tokens than the window in its config says, so no more than the {self.longest} tokens of that "
                f"window can be decoded as it would, and {longest} are asked for: ask for fewer, or call generate without strategy=."
            )
        if self.counted is not None:
            self.counted.check(name, longest, rows)

    def side_of(self, length: int) -> int:
        """The side of a text of so many tokens (:class:`~decoders.engine.model.rope.Sides`); 0 where there is one."""
        return 0 if self.sides is None else self.sides.of(length)

    def take_side(self, side: int) -> None:
        """Makes the next passes those of texts on `side`."""
        if self.sides is not None:
            self.sides.take(side)

    def tell_kinds(self, kinds: tuple[attention.LayerKind, ...]) -> None:
        """Sets how far each kind of layer looks back."""
        self.kinds = kinds
        attention.tell_kinds(self.model, kinds, self._kind_of_layer)

    def kind_of(self, layer: int) -> attention.LayerKind:
        """How far a decoder layer looks back."""
        return self.kinds[self._kind_of_layer[layer]]

    def _attend_by(self, attends: Literal["sdpa", "triton", "cpu"]) -> None:
        self.attends = attends
        names = {"sdpa": attention.NAME, "triton": kernel.NAME, "cpu": kernel.CPU_NAME}
        attention.attend_by(self.model, names[attends])

    @property
    def uncompiled(self) -> str | None:
        """Why no pass is compiled; None where passes may be."""
        name = type(self.model).__name__
        if self.recurrent:
            return f"{name} keeps recurrent states: its blocks run level by level, as their tree says, which is no graph for every tree"
        if not devices.compiles(self.device):
            return f"{name} is on {self.device.type!r}, and passes are compiled for {' and '.join(devices.TRIED)} only"
        return None

    @functools.cached_property
    def decoder_layers(self) -> int:
        """Number of decoder layers; 0 if they were not found."""
        return len(decoder_layers(self.model))

    @property
    def matrices(self) -> list[Tensor]:
        """The tensors of all quantized matrices."""
        return [tensor for weight in self.quantized.weights for tensor in weight.tensors]

    def takes_single_nodes(self, rows: int) -> bool:
        """Whether blocks of so many rows may have one node in each, with the same bits as in longer blocks.

        False where sizes are static.
        """
        if self.static:
            return False
        if (rows > 1 or self.few_rows) and not buckets.low_precision(self.dtype, self.rounds):
            return True
        return (rows > 1 and not self.rounds) or (self.invariance is not None and self.invariance.single)

    def buffers(self, rows: int, slots: int) -> CacheBuffers:
        """Empty rows."""
        return CacheBuffers.allocate(self.layout, rows, slots, self.placeholders is not None)

    def _watch_head(self) -> None:
        self._head = HeadInputs(self.model.get_output_embeddings())

    def sibling(self) -> Target:
        """The same model on another module tree with the same weights, quantized ones included."""
        twin = copy.copy(self)
        twin.model = self.copied()
        twin.backbone = backbone_of(twin.model)
        twin._watch_head()
        if self._layer_states is not None:
            twin._layer_states = LayerStates(twin.model, self.layers)
        return twin

    def copied(self) -> PreTrainedModel:
        """Another module tree without our hooks."""
        model = share_weights(self.model, self.matrices)
        self._head.unwatch(model.get_output_embeddings())
        if self._layer_states is not None:
            self._layer_states.unwatch(model)
        return model

    @torch.no_grad()
    def output_head(self) -> OutputHead:
        """The output head, without the rest of the model.

        Raises:
            UnsupportedError: its logits differ from the model's.
        """
        head = OutputHead(self.copied())
        result = self.forward(self._few_tokens())
        head.check(result.hidden, result.logits)
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """The input embedding of `tokens`; ids outside the vocabulary are read as some token."""
        return cast(Tensor, self.model.get_input_embeddings()(tokens.clamp(0, self.embeddings - 1)))

    def watching(self, layers: tuple[int, ...]) -> Target:
        """A :meth:`sibling` whose results contain the outputs of these decoder layers; it needs a graph of its own."""
        twin = self.sibling()
        twin.layers, twin._layer_states = layers, LayerStates(twin.model, layers)
        return twin

    def renew(self, weights: WeightState) -> None:
        """Quantizes the present weights again, in place: compiled code and recorded steps see the new values."""
        self.quantized.renew()
        self.weights = weights

    def _quick(self) -> AbstractContextManager:
        """Inference mode, in which operations cost less, for passes that are neither compiled nor recorded."""
        seen = self.static or torch.compiler.is_dynamo_compiling()
        return nullcontext() if seen else torch.inference_mode()  # mode=False would switch gradients on

    def forward(self, given: PassInput) -> ForwardResult:
        """One pass over a block of nodes, without the piece that it may come with."""
        nodes, text, root = given.nodes, given.text, given.root
        if root is not None:
            count = text.length + 1
            # Some designs read more of a token than its embedding: drafts get a pass of their own, with ids, where that is possible.
            if nodes.shape[1] > count and not self.recurrent:
                begin = causal_block(len(nodes), count, nodes.device)
                first = self.forward(given._replace(nodes=nodes[:, :count], tree=begin))
                drafts = given._replace(nodes=nodes[:, count:], text=LeadingText(), root=None)
                return first.followed_by(self.forward(drafts))
            # Its place may hold -1, which would be taken for a node without a draft token and left out.
            nodes = nodes.clamp(min=0).where(torch.arange(nodes.shape[1], device=nodes.device) == text.length, nodes)
        inputs = self.inputs(nodes, given.base, given.tree, given.buffers, given.view, text if text.length else None)
        if root is not None:
            vectors = self.embed(inputs.pop("input_ids")).clone()
            vectors[:, text.length] = root
            inputs["inputs_embeds"] = vectors
        kept = torch.arange(text.length, nodes.shape[1], device=nodes.device) if text.length else None
        return self.results(inputs, kept).behind(text.length)

    def prefill(self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int) -> None:
        """Writes the keys and values of ``tokens`` ``[B, N]`` to slots ``start …`` without computing logits."""
        with self._quick():
            self.backbone(**self._text_inputs(tokens, start, buffers, view, latest))
        if self._layer_states is not None:
            self._layer_states.forget()

    def features(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool,
        valid: Tensor | None = None,
    ) -> ForwardResult:  # fmt: skip
        """As :meth:`prefill`, with results for all tokens; without `logits` only the first token gets logits.

        Args:
            valid: ``[B, N]`` bool, the tokens that are no padding behind a row's text.
        """
        inputs = self._text_inputs(tokens, start, buffers, view, latest, valid)
        return self.results(inputs, None if logits else torch.zeros(1, dtype=torch.int64, device=tokens.device))

    def results(self, inputs: dict, kept: Tensor | None = None) -> ForwardResult:
        """The model's results for `inputs`, as ordinary tensors, which strategies and compiled functions can use.

        Args:
            kept: ``[K]`` int64, the nodes that get logits; None: all.
        """
        self._head.let_read(kept)
        with self._quick():
            output = self.model(**inputs)
        layers = self._layer_states.taken() if self._layer_states is not None else None
        return ForwardResult(_ordinary(output.logits.float()), _ordinary(self._head.taken()), layers)

    def _text_inputs(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, valid: Tensor | None = None
    ) -> dict:  # fmt: skip
        """:meth:`inputs` for a chunk of text, which recurrent layers read in another way than a block of nodes."""
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
        offsets, visible = attention.ending(tree.offsets, n), attention.ending(tree.visible, n)
        slots = base[:, None] + attention.ending(torch.arange(tree.offsets.shape[1], device=nodes.device)[None], n)
        if self.attends != "sdpa":
            whole_text = text is not None and text.length == n
            mask = kernel.pack_mask(base, tree.offsets, None if whole_text else visible)
        else:
            mask = attention.build_mask(self.kinds, base, tree.offsets, visible, view.shape[0], self.dtype)
            mask = attention.shaped(mask, self.group, text)
        positions, counts = base[:, None] + offsets, None
        if self.counted is not None and self.counted.by_node and len(positions) == 1:
            counts = positions[0] - torch.arange(n, device=nodes.device)
        if buffers.shifts is not None:
            positions = positions + buffers.shifts[:, None]
        cache = SlotCache(buffers, slots, view.shape[0], states, counts, self.in_levels)
        return self.arguments(nodes, positions, mask, cache)

    def arguments(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> dict:
        """What the model is called with. tokens, positions: ``[B, N]`` int64."""
        return {
            "input_ids": tokens.clamp(0, self.embeddings - 1),
            "attention_mask": mask,
            # Draft tokens may reach past the context; the loop never commits them, but embeddings would be out of range.
            "position_ids": positions.clamp(0, self.max_positions - 1),
            "use_cache": True,
            self._cache_keyword: cache,
        }


def _ordinary(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if it was created in inference mode."""
    inference = not torch.compiler.is_dynamo_compiling() and tensor.is_inference()
    return tensor.clone() if inference else tensor
