"""Batches of the demo models' data: windows of code and edit tasks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from decoders.demo.data import Source, edit_task, functions, new_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LICENCE = "PSF-2.0"
#: Share of edit tasks in a batch.
EDIT_SHARE = 0.25


def digest(sources: list[Source]) -> str:
    """A fingerprint of the corpus, so that a run is not resumed on other data."""
    hasher = hashlib.sha256()
    for source in sources:
        hasher.update(source.path.encode() + b"\0" + source.text.encode() + b"\0")
    return hasher.hexdigest()


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a text, without special tokens. The tokenizer does not warn if the text is longer than the context."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> np.ndarray:
    """Texts as one stream of ids [T] uint16: the end token, then each text followed by the end token."""
    end = tokenizer.eos_token_id
    parts = [np.array([end], dtype=np.uint16)]
    for text in texts:
        parts.append(np.array([*ids_of(tokenizer, text), end], dtype=np.uint16))
    return np.concatenate(parts)


class Batches:
    """Batches of B rows of T + 1 ids: a quarter of the rows are edit tasks, the others are windows of code.

    Code windows are drawn without replacement: every epoch cuts the stream at a random offset and permutes the windows. Edit rows are
    filled with edit tasks: a function and its copy, usually with a name replaced, both drawn when a row is needed.
    """

    def __init__(
        self, sources: list[Source], tokenizer: PreTrainedTokenizerFast, *, seed: int, rows: int, length: int
    ) -> None:
        self.seed, self.rows, self.length = seed, rows, length
        self.tokenizer = tokenizer
        self.stream = encode(tokenizer, (source.text for source in sources))
        self.functions = functions(sources)
        self.names = new_names(self.functions)
        self.edit_rows = round(EDIT_SHARE * rows) if self.functions and self.names else 0
        self._epoch: tuple[int, int, np.ndarray] = (-1, 0, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> torch.Tensor:
        """The batch of one step: ids [B, T + 1] int64. Inputs are all ids but the last, labels all ids but the first."""
        code_rows = self.rows - self.edit_rows
        rows = [self._code(step * code_rows + row) for row in range(code_rows)]
        rows += [self._edit(step * self.edit_rows + row) for row in range(self.edit_rows)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _code(self, index: int) -> np.ndarray:
        windows = (len(self.stream) - 1 - self.length) // self.length
        if windows < 1:
            raise ValueError(f"the corpus has {len(self.stream)} tokens, too few for rows of {self.length}")
        epoch, place = divmod(index, windows)
        if epoch != self._epoch[0]:
            rng = np.random.default_rng([self.seed, epoch])
            self._epoch = (epoch, int(rng.integers(self.length)), rng.permutation(windows))
        _, offset, order = self._epoch
        start = offset + int(order[place]) * self.length
        return self.stream[start : start + self.length + 1]

    def _edit(self, index: int) -> np.ndarray:
        rng = random.Random(f"{self.seed}/{index}")
        ids: list[int] = []
        while len(ids) < self.length + 1:
            task = edit_task(rng.choice(self.functions), self.names, rng)
            ids += [*ids_of(self.tokenizer, task.text), self.tokenizer.eos_token_id]
        return np.array(ids[: self.length + 1], dtype=np.uint16)
