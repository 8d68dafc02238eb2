"""Prefills prompts with images by the model's own forward pass, masks and positions, and copies keys and values to the rows' slots.

The loop decodes the text after the last image as usual. The images shift the positions of this text.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...common.transformers_compat import attention_of, cache_keyword, set_attention
from ...errors import InputError, UnsupportedError
from .attention import module_configs
from .blocks import ForwardResult, PassInput, causal_block
from .buckets import view_bucket
from .cache import CacheBuffers
from .features import HeadInputs, LayerStates
from .given import cached_tokens, check_cache, put_cache
from .target import Target

#: Arguments that have an entry per token of the prompt.
PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
#: Errors that models raise if a prompt comes with the images of another prompt, so that lengths or shapes do not fit.
WRONGLY_DIVIDED = (AssertionError, IndexError, RuntimeError, StopIteration, ValueError)
#: To check a model, at most this many tokens at the end of each prompt are run a second time.
CHECKED = 4


@dataclass(frozen=True)
class MultimodalInputs:
    """Images and sounds of a request's prompts. Several successive rows may decode the same prompt.

    Attributes:
        arguments: arguments of the model's forward pass over all prompts, padded on the left, as transformers prepares them.
        repeats: number of rows per prompt.
        lengths: per row, number of tokens of the prompt.
        hashes: per row, a hash of all images and of the prompt's index; equal hashes mean equal images.
        ends: per row, number of tokens of the prompt up to its last placeholder.
        shifts: per row, the position after the prompt minus the prompt's number of tokens.
        alone: per prompt, the inputs of this prompt only; None for a prompt without images. An empty tuple if it is unknown which
            images belong to which prompt.
    """

    arguments: dict[str, Any]
    repeats: int
    lengths: tuple[int, ...]
    hashes: tuple[str, ...]
    ends: tuple[int, ...]
    shifts: tuple[int, ...]
    alone: tuple[MultimodalInputs | None, ...] = ()

    def hash_of(self, row: int) -> str:
        """The hash of a row's own images; an empty string without images. The row's entry in `hashes` if its own images are unknown."""
        if not self.alone:
            return self.hashes[row]
        own = self.alone[row // self.repeats]
        return own.hashes[0] if own is not None else ""

    def in_front_of(self, starts: Sequence[int]) -> bool:
        """Whether all images of every row come before the row's slot in `starts`, the first slot that the loop's own passes fill."""
        return all(end <= start for end, start in zip(self.ends, starts, strict=False))


class OwnForward:
    """A model's own forward pass with the target's weights, without the loop's attention and masks. model: the user's model."""

    _reads_embeddings = _ignores_zeros = False

    def __init__(self, target: Target, model: PreTrainedModel) -> None:
        self.target, self.model = target, target.copied()
        self._checked = False
        theirs = module_configs(model)
        for place, config in module_configs(self.model).items():
            if place in theirs:
                _attend_as(config, theirs[place])
        self._head = HeadInputs(self.model.get_output_embeddings())
        self._layers = LayerStates(self.model, target.layers) if target.layers else None

    def read(
        self, inputs: MultimodalInputs, buffers: CacheBuffers, tokens: Tensor, *, every: bool = False, logits: bool = False
    ) -> ForwardResult | None:  # fmt: skip
        """Prefills all prompts into the first slots of their rows. With recurrent layers, each prompt's last token is left out.

        Args:
            buffers: the rows' cache; the first rows belong to the prompts.
            tokens: ``[B, L]``, the rows' tokens.
            every: whether to return the results ``[B, N, …]`` of all tokens except the last; otherwise None is returned. Padding rows
                repeat the first row.
            logits: whether the results have logits of all tokens; otherwise they have logits of a single token.

        Raises:
            UnsupportedError: the model's cache does not hold exactly the prompts' tokens, or the loop's pass over a prompt's end gives
                other results.
        """
        target, arguments, rest = self.target, dict(inputs.arguments), int(bool(self.target.recurrent))
        behind = min(length - end for length, end in zip(inputs.lengths, inputs.ends, strict=True))
        keyword, width = cache_keyword(self.model), arguments["input_ids"].shape[1]
        cache = arguments[keyword] = _whole_cache(self.model)
        if rest:
            arguments |= {key: arguments[key][..., :-1] for key in PER_TOKEN if arguments.get(key) is not None}
        if every and logits and "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = 0
        try:
            output = self.model(**arguments)
            hidden, layers = self._head.taken(), self._layers.taken() if self._layers is not None else None
        finally:
            self._forget()
        source = torch.arange(len(inputs.lengths), device=tokens.device) // inputs.repeats
        try:
            stored = check_cache(target, cache) and cached_tokens(cache)
        except (InputError, UnsupportedError):
            stored = 0
        if stored != width - rest:
            raise UnsupportedError(
                f"{type(self.model).__name__} does not store keys and values of exactly the tokens of a prompt with images. "
                "Call generate without strategy=."
            )
        for row, length in enumerate(inputs.lengths):
            put_cache(target, buffers, row, cache, source=row // inputs.repeats, padding=width - length)
        last_logits = output.logits
        if rest and not self._checked:
            last = {key: inputs.arguments[key][..., -1:] for key in ("input_ids", "position_ids")}
            mask = {"attention_mask": inputs.arguments.get("attention_mask"), "use_cache": True}
            last_logits = self.model(**last, **mask, **{keyword: cache}).logits
            self._forget()
        if not self._checked:
            self._check(inputs.lengths, behind, buffers, tokens, last_logits[source, -1].float())
        if not every:
            return None
        # A row's text begins after its left padding. Results after the end of the text are arbitrary.
        begin = torch.tensor([width - length for length in inputs.lengths], device=tokens.device)
        begin, source = (F.pad(values, (0, len(tokens) - len(values)))[:, None] for values in (begin, source))
        place = begin + torch.arange(max(max(inputs.lengths) - 1, 1), device=tokens.device)
        place = place.clamp(max=hidden.shape[1] - 1)
        seen = layers[source, place] if layers is not None else None
        read = output.logits[source, place] if logits else output.logits[source, -1:]
        return ForwardResult(read.float(), hidden[source, place], seen)

    def read_vectors(self, vectors: Tensor, mask: Tensor | None = None) -> DynamicCache:
        """Returns a cache filled by a pass over prompts given as embeddings ``[B, P, H]``. mask: ``[B, P]``, 0 for left padding."""
        if self.target.recurrent and not self._reads_embeddings:
            self._check_embeddings()
        cache = DynamicCache(config=self.model.config)
        arguments: dict[str, Any] = {cache_keyword(self.model): cache, "use_cache": True}
        if mask is not None:
            arguments |= {"attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
        if "logits_to_keep" in inspect.signature(type(self.model).forward).parameters:
            arguments["logits_to_keep"] = 1
        try:
            self.model(inputs_embeds=vectors, **arguments)
        finally:
            self._forget()
        return cache

    def check_type_ids(self) -> None:
        """Raises UnsupportedError if passing zeros as ``token_type_ids`` changes the model's logits."""
        if self._ignores_zeros or "token_type_ids" not in inspect.signature(type(self.model).forward).parameters:
            return
        tokens = torch.arange(1, 3, device=self.target.device)[None] % self.target.vocabulary.embeddings
        typed = {"token_type_ids": torch.zeros_like(tokens)}
        try:
            plain, zeros = (self.model(input_ids=tokens, use_cache=False, **given).logits for given in ({}, typed))
            self._ignores_zeros = torch.equal(plain, zeros)
        except Exception:  # a model may raise anything
            self._ignores_zeros = False
        finally:
            self._forget()
        if not self._ignores_zeros:
            raise UnsupportedError(
                f"{type(self.model).__name__} uses token_type_ids, even if all are zeros, and the loop does not pass them "
                "on: leave them out, or call generate without strategy=."
            )

    def _check_embeddings(self) -> None:
        """Compares a pass over tokens with a pass over their embeddings. Raises UnsupportedError if the logits differ, because the
        model then needs a token's id besides its embedding. Drafts would be wrong: after a prompt of embeddings, recurrent layers get
        drafts as embeddings, in one pass with the prompt's last embedding.
        """
        tokens = torch.arange(1, 5, device=self.target.device)[None] % self.target.vocabulary.embeddings
        try:
            named = self.model(input_ids=tokens, use_cache=False).logits.float()
            read = self.model(inputs_embeds=self.target.embed(tokens), use_cache=False).logits.float()
        finally:
            self._forget()
        if not torch.allclose(named, read, rtol=1e-3, atol=1e-3 * named.abs().max().item()):
            raise UnsupportedError(
                f"{type(self.model).__name__} uses token ids besides embeddings, but after a prompt of embeddings its recurrent layers "
                "get drafts as embeddings only: pass the prompt as input_ids, or call generate without strategy=."
            )
        self._reads_embeddings = True

    def _forget(self) -> None:
        self._head.forget()
        if self._layers is not None:
            self._layers.forget()

    def _check(
        self, lengths: Sequence[int], behind: int, buffers: CacheBuffers, tokens: Tensor, logits: Tensor
    ) -> None:
        """Runs the ends of prompts again with the loop's pass, and compares the results with `logits` and the stored keys and values.

        behind: least number of tokens after the last image, over all rows.

        Raises:
            UnsupportedError: the last token has other logits, or a token before it has other keys or values.
        """
        target, rows = self.target, len(lengths)
        count = 1 if target.recurrent else min(behind, CHECKED)
        own, ends = buffers.of_rows(0, rows), torch.tensor(lengths, device=tokens.device)
        slots = (ends - count)[:, None] + torch.arange(count, device=tokens.device)
        row = torch.arange(rows, device=tokens.device)[:, None]
        before = [tensor[row, :, slots].clone() for tensor in own.tensors]
        view = torch.arange(min(view_bucket(max(lengths)), own.slots), device=tokens.device)
        tree = causal_block(rows, count, tokens.device)
        ours = target.forward(PassInput(tokens[:rows].gather(1, slots), ends - count, tree, own, view)).logits[:, -1]
        tolerance = 1e-4 if target.dtype in (torch.float32, torch.float64) and not target.rounds else 0.1
        pairs = [(ours, logits)]
        for tensor, old in zip(own.tensors, before, strict=True):
            pairs.append((tensor[row, :, slots][:, :-1].float(), old[:, :-1].float()))
            tensor[row, :, slots] = old
        for new, plain in pairs:
            gap = (new - plain).abs().max().item() if plain.numel() else 0.0
            if not gap <= tolerance * max(plain.abs().max().item() if plain.numel() else 0.0, 1.0):
                raise UnsupportedError(
                    f"{type(self.model).__name__}: its results for the text after an image differ by {gap:.2g} if the text is "
                    "read in a separate pass, so strategies would not be exact. Call generate without strategy=."
                )
        self._checked = count > 1 or bool(target.recurrent)


def _whole_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache that keeps every token, also in layers with a window. A later text may share only the beginning of this text, and then
    needs keys and values from before the window.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def _attend_as(config: PreTrainedConfig, other: PreTrainedConfig) -> None:
    """Copies the attention implementation of `other` to `config`, and likewise for the configs inside `config`."""
    if (name := attention_of(other)) is not None:
        set_attention(config, name)
    for part in config.sub_configs:
        if isinstance(getattr(config, part, None), PreTrainedConfig):
            _attend_as(getattr(config, part), getattr(other, part))
