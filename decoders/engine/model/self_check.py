"""Creates a target (our copy of a model) with kernels that work on this machine, and compares its logits with the model's."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...common import devices
from ...common.announce import announced
from ...common.transformers_compat import cache_keyword, cache_of, config_value
from ...errors import UnsupportedError
from ...settings import Attention
from ...tree import Topology
from . import kept_checks, mixed, own_masks, rope
from .blocks import PassInput, PromptPiece
from .buckets import BLOCK_MARGIN, slots_for
from .cache import CacheBuffers, LayerSpec, move_slots
from .invariance import brief_check
from .kept_checks import KeptCheck
from .kernels import chosen, interpreted
from .kernels.ahead import compile_kernels
from .layout import refusing
from .target import Target
from .weights.quantization import Precision, quantize
from .weights.twin import share_weights


def target_of(model: PreTrainedModel, attends: Attention = "auto", precision: Precision = Precision()) -> Target:
    """The target of `model`, with our kernels if they are chosen, support the model and compute the right logits; else with PyTorch's.

    If a kernel fails, the function warns, and :attr:`Checks.rejected <decoders.engine.model.facts.Checks.rejected>` has the reason.

    Raises:
        UnsupportedError: see :class:`Target`; or the target's logits for a tree differ from the model's.
    """
    with devices.current(model.device):
        if attends == "triton" or chosen.preferred(model.device) is None:
            return _checked(model, attends, precision)
        inexact = replace(precision, exact_products=precision.exact_products and model.dtype.itemsize > 2)
        if model.device.type == "cpu":  # exact_products has no effect on a CPU
            inexact = precision
        every: list[tuple[Attention, Precision]]
        every = [(attends, precision), (attends, inexact), ("sdpa", precision), ("sdpa", inexact)]
        *tries, last = dict.fromkeys(every)
        rejected: str | None = None
        for attention_of, products_of in tries:
            try:
                target = _checked(model, attention_of, products_of)
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Triton may raise anything, for example without a C compiler
                rejected = rejected or f"{type(error).__name__}: {error}"
        else:
            target = _checked(model, *last)  # this raises if the model itself is at fault
        if rejected is not None:
            rejected = f"attention is {target.attends}, exact_products {target.precision.exact_products}: {rejected}"
            target.checks = replace(target.checks, rejected=rejected)
            warnings.warn(
                f"a kernel of this package does not work here and was replaced by PyTorch's: {rejected}", stacklevel=2
            )
        return target


def _checked(model: PreTrainedModel, attends: Attention, precision: Precision) -> Target:
    target = Target(model, attends, precision)
    started = time.perf_counter()
    if target.device.type == "cuda" and not interpreted():
        with announced("compiling kernels for this model"):
            compile_kernels(partial(_passes_of_calls, target.sibling()))
        target.checks = replace(target.checks, kernel_seconds=time.perf_counter() - started)
    started = time.perf_counter()
    key = kept_checks.key_of(target, model)
    passed = kept_checks.find(key) if key is not None else None
    if passed is None:
        with announced(
            f"comparing the loop with {type(model).__name__}'s own forward pass, once per version and machine"
        ):
            longest = check_tree_logits(target, model)
            check_moves(target)
            invariance = brief_check(target)
        passed = KeptCheck(date.today().isoformat(), longest, invariance)
        if key is not None and (invariance is None or invariance.holds):
            kept_checks.keep(key, passed)
    target.checks = replace(
        target.checks, day=passed.day, longest=passed.longest, invariance=passed.invariance,
        seconds=time.perf_counter() - started,
    )  # fmt: skip
    return target


#: Number of tokens of the longest branch after a text. For each block, the check compares the logits along the last branch.
LONGEST_BRANCH = 3
#: In low precision, a model or a kernel is refused only if logits differ in this many trials, each with other texts.
TEXTS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes of a check.

    Attributes:
        texts: number of tokens of each row, the longest row first.
        trees: for each verified block, the number and the length of its branches.
        reach: the check limits windows and chunks of layers to this number of positions, so that its short texts exceed them.
    """

    texts: tuple[int, ...]
    trees: tuple[tuple[int, int], ...]
    reach: int

    def within(self, context: int) -> Sizes:
        """These sizes for a model with `context` positions. Texts are shortened so that a branch fits after them."""
        longest = max(context - LONGEST_BRANCH, 2)
        return replace(self, texts=tuple(min(count, longest - row) for row, count in enumerate(self.texts)))


#: On the CPU the check has two short texts and a block of 16 nodes. It must be quick, because a process runs it before its first call.
ON_CPU = Sizes((16, 8), ((5, 3),), 6)
#: On CUDA the check has sizes as in real calls, because a kernel that is right at small sizes may be wrong at larger sizes. One text is
#: longer than a bucket of slots and longer than a split of the attention kernel. Blocks have up to 64 nodes.
ON_CUDA = Sizes((300, 41), ((3, 1), (5, 3), (21, 3)), 30)


@torch.no_grad()
def check_tree_logits(target: Target, model: PreTrainedModel) -> int | None:
    """Prefills texts, runs trees after them, and compares the logits with the model's own. This finds faults that no config shows.

    Returns:
        the greatest length of text for which the check is valid; None if it is valid for any length.

    Raises:
        UnsupportedError: the logits differ by more than rounding.
    """
    reference = share_weights(model)  # the copy is in evaluation mode, whatever the mode of the user's model
    rope.with_own_tables(reference)
    scheme = target.precision.weights if target.precision.weights != "16bit" else None  # 16-bit copies are exact
    quantize(reference, scheme, reference.get_output_embeddings(), groups=target.products.groups)
    layout = [replace(spec, quantized=False) for spec in target.layout]  # a cache in the model's own precision
    sizes = ON_CPU if target.device.type == "cpu" else ON_CUDA
    sizes = sizes.within(target.lengths.most)
    if target.recurrent:  # one row is enough, because rows of different lengths would be read one by one
        sizes = replace(sizes, texts=sizes.texts[-1:])
    # If the model uses the number of cached tokens, a text of more than `harmless` tokens can only be decoded in a single row.
    if target.lengths.counted and target.lengths.counted.harmless < sizes.texts[0]:
        sizes = replace(sizes, texts=sizes.texts[:1])
    with refusing(model, "cannot verify a token tree"):
        difference, longest = _difference(target, reference, layout, sizes), None
        if difference and not _follows_its_config(reference, target, sizes):
            difference = _difference(target, reference, layout, replace(sizes, reach=sys.maxsize))
            longest = min(
                (reach for kind in target.attending.kinds if (reach := kind.window or kind.chunk)), default=None
            )
    if difference:
        raise UnsupportedError(
            f"{type(model).__name__}: {difference}, so strategies would not be exact. Call generate without strategy=."
        )
    return longest


def _difference(target: Target, reference: PreTrainedModel, layout: list[LayerSpec], sizes: Sizes) -> str | None:
    """Describes in words how the logits of `target` and `reference` differ; None if they differ only by rounding."""
    exact = target.dtype in (torch.float32, torch.float64) and not target.rounds
    difference = None
    # In low precision, rounding may select other experts, which changes a token's logits. A fault shows in every text.
    for shift in range(1 if exact else TEXTS):
        ids = _texts(target, sizes, shift)
        difference = _difference_in(ids, target, reference, layout, sizes, 1e-4 if exact else 0.1)
        if difference is None:
            return None
    return difference


def _difference_in(
    ids: list[Tensor], target: Target, reference: PreTrainedModel, layout: list[LayerSpec], sizes: Sizes, tolerance: float
) -> str | None:  # fmt: skip
    target.use_rope_table(target.rope_table_of(max(map(len, ids))))
    with _short_windows(target, reference, sizes):
        expected = _plain_logits(reference, ids)
        for nodes, ours in _tree_logits(target, layout, ids, sizes):
            for row, text in enumerate(ids):
                count = ours.shape[1]
                plain = expected[row][:count]
                gap, scale = (ours[row] - plain).abs().max().item(), max(plain.abs().max().item(), 1.0)
                if not gap <= tolerance * scale and target.recurrent:
                    token_by_token = _by_token(reference, text[None], len(text) - LONGEST_BRANCH - 1, count)
                    gap = min(gap, (ours[row] - token_by_token).abs().max().item())
                if not gap <= tolerance * scale:
                    return (
                        f"logits verified through a token tree of {nodes} nodes after {len(text) - LONGEST_BRANCH} tokens differ from "
                        f"a plain forward by {gap:.2g} (largest logit {scale:.2g})"
                    )
    return None


def _texts(target: Target, sizes: Sizes, shift: int = 0) -> list[Tensor]:
    """Pseudo-random token ids: for each row, a text followed by the tokens of the longest branch. Each `shift` gives other ids."""
    ids = (torch.arange(len(sizes.texts) * 1000, device=target.device) * 37 + 11 + shift) % 97 + 3
    return [
        ids[row * 1000 :][: count + LONGEST_BRANCH] % target.vocabulary.embeddings
        for row, count in enumerate(sizes.texts)
    ]


def _plain_logits(reference: PreTrainedModel, texts: list[Tensor]) -> list[Tensor]:
    """The model's own logits after the last tokens of each text, ``[LONGEST_BRANCH + 1, V]`` float32. Padding is on the right."""
    # The padding is an ordinary token, not 0, because a model may treat its own padding token in a special way.
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=float(texts[0][0]))
    count, longest = LONGEST_BRANCH + 1, tokens.shape[1]
    behind = [longest - len(text) for text in texts]
    takes = inspect.signature(type(reference).forward).parameters
    keep = {"logits_to_keep": count + max(behind)} if "logits_to_keep" in takes else {}
    logits = reference(input_ids=tokens, use_cache=False, **keep).logits
    last = logits.shape[1] - count
    return [logits[row, last - rest : last - rest + count].float() for row, rest in enumerate(behind)]


def _tree_logits(
    target: Target, layout: list[LayerSpec], ids: list[Tensor], sizes: Sizes
) -> Iterator[tuple[int, Tensor]]:
    """Yields, for each block, its number of nodes, and the logits ``[B, D, V]`` float32 along its last branch, root included."""
    device, rows, longest = target.device, len(ids), sizes.texts[0]
    slots = slots_for(longest, target.static)
    view, start = torch.arange(slots, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    buffers = CacheBuffers.allocate(layout, rows, slots + BLOCK_MARGIN)
    tokens = torch.zeros(rows, longest, dtype=torch.int64, device=device)
    for row, text in enumerate(ids):  # shorter texts are padded, as in a call
        tokens[row, : len(text)] = text[:longest]
    pieces = [0, longest - 1] if target.recurrent else [0, longest * 3 // 4, longest - 1]
    for begin, end in pairwise(dict.fromkeys(pieces)):
        target.prefill(tokens[:, begin:end], start + begin, buffers, view, begin)
    base = torch.tensor(sizes.texts, device=device) - 1
    for branches, length in sizes.trees:
        tree = Topology.branches(branches, length)
        path = [0, *range(len(tree) - length, len(tree))]
        nodes = (torch.arange(rows * len(tree), device=device).view(rows, -1) * 5) % target.vocabulary.embeddings
        for row, (text, count) in enumerate(zip(ids, sizes.texts, strict=True)):
            nodes[row, path] = text[count - 1 : count + length]
        inputs = target.inputs(nodes, base, tree.tensors(rows, device), buffers, view)
        yield len(tree), target.results(inputs, torch.tensor(path, device=device)).logits


def check_moves(target: Target) -> None:
    """Raises UnsupportedError if our kernel for moving slots gives other results than plain copies. An unused kernel is not checked."""
    buffers = target.buffers(2, 64)
    if buffers.places is None:
        return
    for tensor in buffers.tensors:
        tensor.copy_((torch.arange(tensor.numel(), device=target.device) * 31 % 113).view(tensor.shape))
    plain, results = replace(buffers, places=None).enlarged(64), []
    for own in (buffers, plain):
        _move_some(own, target.device)
        results.append(own.tensors)
    if not all(map(torch.equal, *results)):
        raise UnsupportedError("keys and values of accepted tokens are moved to wrong places")


def _move_some(buffers: CacheBuffers, device: torch.device) -> None:
    rows = len(buffers.keys[0])
    path = torch.arange(20, device=device).repeat(rows, 1)
    path[0, 1:7] += 12
    path[-1, 2:5] += 2
    move_slots(buffers, torch.arange(rows, device=device) * 9 + 3, path)


@torch.no_grad()
def _passes_of_calls(twin: Target) -> None:
    """Runs a check's passes with one row and with two rows, to compile kernels. twin: a copy, because modules may store results."""
    _move_some(twin.buffers(2, 64), twin.device)
    sizes = ON_CUDA.within(twin.lengths.most)
    for rows in (1, 2):
        own = replace(sizes, texts=sizes.texts[:rows])
        list(_tree_logits(twin, twin.layout, _texts(twin, own), own))


#: Fields of a config that limit how far back layers attend (:func:`~decoders.engine.model.attention.layer_kinds`).
REACHES = ("sliding_window", "attention_chunk_size")


@contextmanager
def _short_windows(target: Target, reference: PreTrainedModel, sizes: Sizes) -> Iterator[None]:
    """Within this context, limits windows and chunks of `target` and of `reference`, our copy of a model, to `sizes.reach`."""
    reach, config = sizes.reach, reference.config.get_text_config(decoder=True)
    usual = {name: value for name in REACHES if isinstance(value := config_value(config, name), int) and value > reach}
    kinds = target.attending.kinds
    try:
        for name in usual:
            setattr(config, name, reach)
        target.tell_kinds(tuple(kind.within(reach) for kind in kinds))
        with own_masks.within(reference, reach, sizes.texts[0] + LONGEST_BRANCH):
            yield
    finally:
        target.tell_kinds(kinds)
        for name, value in usual.items():
            setattr(config, name, value)


def _follows_its_config(reference: PreTrainedModel, target: Target, sizes: Sizes) -> bool:
    """Whether shorter windows in the config of `reference` change its logits. Some models read windows only at construction."""
    text = _texts(target, sizes)[:1]
    usual = _plain_logits(reference, text)[0]
    with _short_windows(target, reference, sizes):
        return not torch.equal(usual, _plain_logits(reference, text)[0])


@torch.no_grad()
def can_mix(target: Target) -> bool:
    """Whether a mixed pass (:mod:`~decoders.engine.model.mixed`) gives the same results as separate passes over rows and prompt.

    False for models with their own attention code, static sizes, recurrent layers, a quantized cache, or Triton's attention.
    """
    if target.static or target.attends == "triton" or target.recurrent or target.precision.cache is not None:
        return False
    device, vocab = target.device, min(target.vocab_size, target.vocabulary.embeddings)
    prompts = torch.arange(3, 39, device=device).view(3, 12) % vocab
    rows, start = CacheBuffers.allocate(target.layout, 3, 32), torch.zeros(3, dtype=torch.int64, device=device)
    view, base = torch.arange(16, device=device), torch.tensor([8, 4], device=device)
    target.prefill(prompts[:, :8], start, rows, view, 0)
    nodes, tree = prompts[:2, 8:], Topology.chain(3).tensors(2, device)
    piece = PromptPiece(prompts[2:, 8:], start[:1] + 8, 8, view, rows)
    given = PassInput(nodes, base, tree, rows.of_rows(0, 2), view)
    try:
        ours = mixed.forward(target, given, piece)
    except Exception:  # a model's own attention code may raise anything for this mask
        return False
    written = [tensor[2:].clone() for tensor in rows.tensors]
    plain = target.forward(given)
    target.prefill(*piece.alone)
    pairs = [(ours.logits, plain.logits), *zip(written, (tensor[2:] for tensor in rows.tensors), strict=True)]
    tolerance = 1e-4 if target.dtype == torch.float32 and not target.rounds else 0.1
    return all(
        (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1.0) for one, other in pairs if one.numel()
    )


def _by_token(model: PreTrainedModel, ids: Tensor, begin: int, count: int) -> Tensor:
    """The model's own logits ``[count, V]`` float32, with one pass per token, for `count` tokens of `ids` ``[1, T]`` from `begin` on.

    Recurrent layers may use other equations for a single token than for a text in one pass: Nemotron-H bounds only a text's time steps.
    """
    out, logits = model(input_ids=ids[:, :begin], use_cache=True), []
    for place in range(begin, begin + count):
        positions = torch.full((1, 1), place, device=ids.device)
        cache = {cache_keyword(model): cache_of(out)}
        out = model(input_ids=ids[:, place : place + 1], position_ids=positions, use_cache=True, **cache)
        logits.append(out.logits[0, -1].float())
    return torch.stack(logits)
