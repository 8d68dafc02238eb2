"""A pass of the model, uncompiled: it runs nodes (a root and draft tokens) or text, returns logits and writes the KV cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...tree import TreeTensors
from . import attention
from .blocks import LeadingText, PassInput, causal_block, ending
from .cache import CacheBuffers, LayerSpec
from .facts import Attending, Lengths, Vocabulary
from .features import Taps
from .kernels import attention as kernel
from .recurrent import NodePass, TextPass
from .slot_cache import SlotCache, StatePass


@dataclass(frozen=True)
class ForwardResult:
    """The result of a pass over a block of ``N`` nodes.

    Attributes:
        logits: ``[B, N, V]`` float32.
        hidden: ``[B, N, H]``, the output head's input.
        layers: ``[B, N, T, H]``, outputs of the ``T`` watched layers; None if no layer is watched.
    """

    logits: Tensor
    hidden: Tensor
    layers: Tensor | None = None

    def behind(self, count: int) -> ForwardResult:
        """These results without the hidden states of the first `count` nodes, for passes in which these nodes get no logits."""
        if not count:
            return self
        layers = self.layers[:, count:] if self.layers is not None else None
        return ForwardResult(self.logits, self.hidden[:, count:], layers)

    def followed_by(self, other: ForwardResult) -> ForwardResult:
        """The results of these nodes, followed by the results of the nodes of `other`."""
        own, others = self.layers, other.layers
        layers = torch.cat([own, others], 1) if own is not None and others is not None else None
        logits, hidden = torch.cat([self.logits, other.logits], 1), torch.cat([self.hidden, other.hidden], 1)
        return ForwardResult(logits, hidden, layers)


class Passes:
    """The passes of a :class:`~decoders.engine.model.target.Target`, which sets the attributes.

    Attributes:
        model: the target's copy of the model.
        backbone: `model` without the output head.
        layout: what each layer stores in the cache.
        dtype: dtype of keys and values.
        cache_keyword: name of the argument of ``model.forward`` for the cache.
    """

    model: PreTrainedModel
    backbone: torch.nn.Module
    layout: list[LayerSpec]
    dtype: torch.dtype
    cache_keyword: str
    static: bool
    vocabulary: Vocabulary
    attending: Attending
    lengths: Lengths
    recurrent: tuple[int, ...]
    taps: Taps

    @property
    def attends(self) -> Literal["sdpa", "triton", "cpu"]:
        """See :attr:`Attending.by`."""
        return self.attending.by

    def embed(self, tokens: Tensor) -> Tensor:
        """The input embeddings of `tokens`. Ids outside the vocabulary get the embedding of an arbitrary token."""
        return cast(Tensor, self.model.get_input_embeddings()(tokens.clamp(0, self.vocabulary.embeddings - 1)))

    def _quick(self) -> AbstractContextManager:
        """Inference mode, in which operators cost less, for passes that are neither compiled nor recorded."""
        seen = self.static or torch.compiler.is_dynamo_compiling()
        return nullcontext() if seen else torch.inference_mode()  # mode=False would switch gradients on

    def forward(self, given: PassInput) -> ForwardResult:
        """One pass over a block of nodes, without the prompt piece that may come with the block."""
        nodes, text, root = given.nodes, given.text, given.root
        if root is not None:
            count = text.length + 1
            # Some models need a token's id besides its embedding. So drafts run in a second pass, with ids, except in recurrent models.
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
        """Like :meth:`prefill`, but returns results for all tokens. Without `logits`, only the first token gets logits.

        valid: ``[B, N]`` bool, which tokens belong to the row's text. The other tokens are padding after the text.
        """
        inputs = self._text_inputs(tokens, start, buffers, view, latest, valid)
        return self.results(inputs, None if logits else torch.zeros(1, dtype=torch.int64, device=tokens.device))

    def results(self, inputs: dict, kept: Tensor | None = None) -> ForwardResult:
        """The model's results for `inputs`. They are not inference tensors, so strategies and compiled functions can use them.

        kept: ``[K]`` int64, the nodes that get logits; None for all nodes.
        """
        self.taps.head.let_read(kept)
        with self._quick():
            output = self.model(**inputs)
        layers = self.taps.states.taken() if self.taps.states is not None else None
        return ForwardResult(_ordinary(output.logits.float()), _ordinary(self.taps.head.taken()), layers)

    def _text_inputs(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, valid: Tensor | None = None
    ) -> dict:  # fmt: skip
        """The result of :meth:`inputs` for a chunk of text, which recurrent layers process in another way than a block of nodes."""
        rows, count = tokens.shape
        text_pass = None
        if buffers.states is not None:
            counts = valid.sum(1).tolist() if valid is not None else [count] * rows
            specs = [spec.states for spec in self.layout]
            text_pass = TextPass(buffers.states, specs, start.tolist(), counts)
        tree = causal_block(rows, count, tokens.device)
        return self.inputs(tokens, start, tree, buffers, view, LeadingText(count, latest), text_pass)

    def inputs(
        self, nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: Tensor,
        text: LeadingText | None = None, text_pass: TextPass | None = None,
    ) -> dict:  # fmt: skip
        """The arguments for the model's ``forward``. nodes, base, tree, buffers, view: see :class:`PassInput`.

        Args:
            text: the committed tokens at the beginning of `nodes`; None for nodes of a tree alone.
            text_pass: how recurrent layers run over a chunk of text; None for a block of nodes.
        """
        n = nodes.shape[1]
        states: StatePass | None = text_pass
        if text_pass is None and buffers.states is not None:
            specs = [spec.states for spec in self.layout]
            states = NodePass(buffers.states, specs, tree.visible, nodes, base)
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
            self.cache_keyword: cache,
        }


def _ordinary(tensor: Tensor) -> Tensor:
    """`tensor`; if it is an inference tensor, an ordinary copy."""
    inference = not torch.compiler.is_dynamo_compiling() and tensor.is_inference()
    return tensor.clone() if inference else tensor
