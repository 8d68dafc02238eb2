"""Saved tables of n-gram counts for `ngram`: counting, files, and training on a model's own output."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import SettingsError

FORMAT = "decoders-ngram-table"
VERSION = "1"
#: Longest n-gram of a table and of the strategy: a context's key, extended by a follower, must fit into 64 bits.
MAX_NGRAM = 3


class NgramOrder(NamedTuple):
    """Counts of the n-grams of one length: ``K`` contexts with ``C`` followers each, the most frequent first.

    Attributes:
        keys: ``[K]`` int64, the contexts in ascending order (:func:`context_key`).
        followers: ``[K, C]`` int32, token ids; -1 if a context has fewer followers.
        counts: ``[K, C]`` int32, number of times that each follower occurred; 0 where there is no follower.
        totals: ``[K]`` int64, number of times that each context was followed by a token, including followers that are not stored.
    """

    keys: Tensor
    followers: Tensor
    counts: Tensor
    totals: Tensor


@dataclass(frozen=True)
class NgramTable:
    """A table of n-gram counts.

    Attributes:
        orders: the counts of unigrams, bigrams and so on, up to the longest n-grams.
        vocab_size: size ``V`` of the vocabulary.
        tokens: number of counted tokens.
        source: description of the text.
    """

    orders: tuple[NgramOrder, ...]
    vocab_size: int
    tokens: int
    source: str

    @staticmethod
    def count(
        texts: Iterable[tuple[Tensor, int]], vocab_size: int, *, max_ngram: int = MAX_NGRAM, followers: int = 16,
        source: str = "",
    ) -> NgramTable:  # fmt: skip
        """Counts n-grams up to `max_ngram` tokens long.

        Args:
            texts: pairs of a text ``[T]`` int64 and the index of the first token that is counted; earlier tokens are context only.
            followers: greatest number of followers per context.

        Raises:
            SettingsError: the vocabulary is too large for 64-bit keys, a token is outside of it, or there are no tokens to count.
        """
        if vocab_size**MAX_NGRAM >= 2**63:
            raise SettingsError(f"n-grams need a vocabulary of at most 2097151 tokens, not {vocab_size}")
        pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(max_ngram)]
        for given, start in texts:
            text = given.to("cpu", torch.int64)
            if text.numel() and not 0 <= int(text.min()) <= int(text.max()) < vocab_size:
                raise SettingsError(f"tokens must be 0 … {vocab_size - 1}, not {int(text.min())} to {int(text.max())}")
            for context, kept in enumerate(pairs):
                first = max(start, context)
                window = [text[first - back : text.numel() - back] for back in range(1, context + 1)]
                kept.append((context_key(window, vocab_size, text[first:]), text[first:]))
        orders: list[NgramOrder] = []
        for kept in pairs:
            keys, tokens = (torch.cat(parts) if parts else torch.empty(0) for parts in zip(*kept, strict=True))
            if not keys.numel():
                raise SettingsError(f"there is no n-gram of {len(orders) + 1} tokens to count")
            orders.append(_count(keys, tokens, vocab_size, followers))
        return NgramTable(tuple(orders), vocab_size, int(orders[0].totals.sum()), source)

    def save(self, path: Path) -> None:
        """Writes the table to the file `path`. The file is replaced atomically, so tables loaded before keep the old file's contents.

        Raises:
            SettingsError: `path` is not a regular file.
            OSError: the file cannot be written.
        """
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise SettingsError(f"n-gram table {path} cannot be written: it is not a regular file")
        draft = target.with_name(f".{target.name}")
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:  # mode x creates a new file: it never writes through a link
            file.write(self.dump())
        draft.replace(target)

    def dump(self) -> bytes:
        """The table as bytes in the safetensors format, with its description in the metadata."""
        tensors = {
            f"{n}.{k}": tensor for n, order in enumerate(self.orders, 1) for k, tensor in order._asdict().items()
        }
        about = {
            "format": FORMAT, "version": VERSION, "vocab_size": self.vocab_size, "max_ngram": len(self.orders),
            "tokens": self.tokens, "source": self.source,
        }  # fmt: skip
        return save(tensors, metadata={name: str(value) for name, value in about.items()})

    @staticmethod
    def load(path: Path) -> NgramTable:
        """Reads a file written by :meth:`save`.

        Raises:
            SettingsError: the file is missing, is not a table, or is inconsistent.
        """
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise SettingsError(f"n-gram table {path} cannot be read: it is not a regular file")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise SettingsError(
                        f"{path} is not an n-gram table: its format is {about.get('format')!r}, not {FORMAT!r}"
                    )
                if about.get("version") != VERSION:
                    raise SettingsError(
                        f"n-gram table {path} has version {about.get('version')!r}, this package reads {VERSION!r}"
                    )
                orders = tuple(
                    NgramOrder(*(file.get_tensor(f"{n}.{name}") for name in NgramOrder._fields))
                    for n in range(1, int(about["max_ngram"]) + 1)
                )
                table = NgramTable(orders, int(about["vocab_size"]), int(about["tokens"]), about["source"])
        except OSError as error:
            raise SettingsError(f"n-gram table {path} cannot be read: {error.strerror or error}") from error
        except (SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"{path} is not an n-gram table: {error}") from error
        table._check(path)
        return table

    def _check(self, path: Path) -> None:
        """Checks the contents: with a follower outside the vocabulary, compiled code would read out of bounds.

        Raises:
            SettingsError: the table is damaged.
        """
        for n, order in enumerate(self.orders, 1):
            keys, followers, counts, totals = order
            shape = followers.shape
            if (
                keys.dim() != 1 or not keys.numel() or followers.dim() != 2 or not followers.numel()
                or shape[0] != keys.numel() or counts.shape != shape or totals.shape != keys.shape
                or not -1 <= int(followers.min()) <= int(followers.max()) < self.vocab_size
                or int(counts.min()) < 0 or bool((keys.diff() <= 0).any())
            ):  # fmt: skip
                raise SettingsError(f"n-gram table {path} is damaged: its {n}-grams are inconsistent. Train it again")


def context_key(context: Sequence[Tensor], vocab_size: int, example: Tensor) -> Tensor:
    """The key of a context: its tokens are the digits of a number in base `vocab_size`, the most recent token last.

    Args:
        context: tensors, the most recent token first; empty for unigrams.
        example: any tensor with the shape, dtype and device of the result.
    """
    key = torch.zeros_like(example)
    for token in reversed(context):
        key = key * vocab_size + token
    return key


def load_table(path: Path, vocab_size: int, device: torch.device) -> tuple[NgramOrder, ...]:
    """Returns the orders of the table in `path`, with tensors on `device`. The file is read once, and again if it changes.

    Raises:
        SettingsError: the file is missing, or the table is for another vocabulary.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise SettingsError(f"n-gram table {path} cannot be read: {error.strerror}") from error
    table = _read(path.absolute(), state.st_mtime_ns, state.st_size, device)
    if table.vocab_size != vocab_size:
        raise SettingsError(
            f"n-gram table {path} is for a vocabulary of {table.vocab_size} tokens, the model's has {vocab_size}. "
            "Train a table for this model with `decoders train ngram`"
        )
    return table.orders


@lru_cache(maxsize=4)
def _read(path: Path, mtime_ns: int, size: int, device: torch.device) -> NgramTable:
    """Loads a table to `device`. Time and size are part of the cache key, so that a changed file is read again."""
    table = NgramTable.load(path)
    return replace(table, orders=tuple(NgramOrder(*(tensor.to(device) for tensor in order)) for order in table.orders))


def _count(keys: Tensor, tokens: Tensor, vocab_size: int, followers: int) -> NgramOrder:
    """Counts n-grams of one length.

    Args:
        keys, tokens: ``[T]``, the context key and the follower of every n-gram.
        followers: greatest number of followers that are kept per context.
    """
    grams, counts = torch.unique(keys * vocab_size + tokens, return_counts=True)
    contexts, size = torch.unique_consecutive(grams // vocab_size, return_counts=True)
    row = torch.arange(contexts.numel()).repeat_interleave(size)
    totals = torch.zeros(contexts.numel(), dtype=torch.int64).scatter_add_(0, row, counts)
    # Sorts by context, then by count. The sorts are stable, so the smaller token id comes first among equal counts.
    order = counts.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    rank = torch.arange(grams.numel()) - (size.cumsum(0) - size).repeat_interleave(size)
    within = rank < followers
    order, rank, row = order[within], rank[within], row[within]
    best = torch.full((contexts.numel(), min(followers, int(size.max()))), -1, dtype=torch.int32)
    best[row, rank] = (grams[order] % vocab_size).int()
    often = torch.zeros_like(best)
    often[row, rank] = counts[order].int()
    return NgramOrder(contexts, best, often, totals)


def train_table(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, tokens: int, rows: int = 16, length: int = 256,
    temperature: float = 1.0, seed: int = 0, followers: int = 16, source: str = "",
    on_progress: Callable[[int], None] = lambda counted: None, **options: Any,
) -> NgramTable:  # fmt: skip
    """Samples continuations of `prompts` from `model`, and counts their n-grams. Prompt tokens serve as context, but are not counted.

    The texts are the model's own, because a drafter has to predict the model's tokens.

    Args:
        model: enabled by :func:`decoders.enable`.
        prompts: token ids of each prompt; every batch draws `rows` prompts.
        tokens: number of tokens to count.
        rows: number of texts sampled together. The last batch has only as many texts as are still needed.
        length: greatest number of tokens to sample after each prompt.
        on_progress: called after each batch with the number of tokens sampled so far.
        options: further arguments of ``generate``.

    Raises:
        SettingsError: there are no prompts, a prompt is empty, or the temperature is not above 0 and finite.
    """
    if not 0 < temperature < math.inf:
        raise SettingsError(f"the temperature for sampling texts must be above 0 and finite, not {temperature:g}")
    if not prompts or not all(prompts):
        raise SettingsError("give at least one prompt, and at least one token in every prompt")
    options = dict(temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=length) | options
    texts: list[tuple[Tensor, int]] = []
    counted, generator = 0, torch.Generator().manual_seed(seed)
    while counted < tokens:
        needed = min(rows, math.ceil((tokens - counted) / length))
        drawn = [prompts[i] for i in torch.randint(len(prompts), (needed,), generator=generator).tolist()]
        for text, start in sample(model, drawn, seed=int(torch.randint(2**62, (), generator=generator)), **options):
            texts.append((text[: start + tokens - counted], start))
            counted += texts[-1][0].numel() - start
        on_progress(counted)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return NgramTable.count(texts, vocab_size, followers=followers, source=source)


def sample(model: PreTrainedModel, prompts: Sequence[Sequence[int]], **options: Any) -> list[tuple[Tensor, int]]:
    """Samples one batch. Returns for each prompt a text ``[T]`` on the CPU (prompt and continuation), and the prompt's length."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    options = dict(strategy="autoregressive", do_sample=True, return_dict_in_generate=True) | options
    out: Any = model.generate(input_ids=ids, attention_mask=mask, **options)  # type: ignore[operator]
    return [
        (row[width - len(prompt) : width + new], len(prompt))
        for row, prompt, new in zip(out.sequences.cpu(), prompts, out.report.new_tokens, strict=True)
    ]


def excerpts(text: Sequence[int], length: int) -> list[Sequence[int]]:
    """Cuts `text` into prompts of `length` tokens; the last prompt may be shorter."""
    return [text[at : at + length] for at in range(0, len(text), length)]
