"""The rows of a call on the device: tokens, lengths, KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import CacheMemoryError, amount
from ...sampling.prefixes import Prefixes
from ...sampling.processors import SamplingInputs, row_keys
from ...strategy import Sequences
from ...tree import TreeTensors
from ..model.buckets import round_up
from ..model.cache import CacheBuffers
from ..model.target import Target


@dataclass(frozen=True)
class Rows:
    """The rows of a call on the device. Steps update the tensors in place.

    Attributes:
        tokens: ``[B, L]`` int64, a token for each of the ``L`` cache slots.
        length: ``[B]`` int64, number of committed tokens.
        prompt_length: ``[B]`` int64, number of prompt tokens.
        finished: ``[B]`` bool, whether the row has ended.
        limit: ``[B]`` int64, the length at which a row ends.
        faults: ``[B]`` int64, flags of :class:`Fault`.
        buffers: the KV cache.
        sampling: the rows' noise keys and stop tokens, and the parameters of the sampling plan.
        range: ``[L]`` int64, 0 … L-1. A pass gets the first entries as its `view`; attention reads only the first ``len(view)`` slots.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    finished: Tensor
    limit: Tensor
    faults: Tensor
    buffers: CacheBuffers
    sampling: SamplingInputs
    range: Tensor

    @staticmethod
    def allocate(target: Target, batch: int, slots: int) -> Rows:
        device = target.device

        def numbers() -> Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=device)

        with room_for(batch, slots):
            return Rows(
                torch.zeros(batch, slots, dtype=torch.int64, device=device), numbers(), numbers(), numbers().bool(), numbers(),
                numbers(), target.buffers(batch, slots), no_sampling(batch, device), torch.arange(slots, device=device),
            )  # fmt: skip

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]

    @property
    def place(self) -> tuple:
        """Addresses and shapes of the tensors. A recording can only be replayed on the tensors that it was recorded on."""
        tensors = (
            self.tokens, self.length, self.prompt_length, self.finished, self.limit, self.faults,
            *(tensor for tensor in vars(self.sampling).values() if tensor is not None),
        )  # fmt: skip
        return *((tensor.data_ptr(), tensor.shape) for tensor in tensors), self.buffers.place

    def of_rows(self, begin: int, end: int) -> Rows:
        """The rows from `begin` up to, not including, `end`, as views."""
        if (begin, end) == (0, len(self.length)):
            return self
        rows = slice(begin, end)
        return Rows(
            self.tokens[rows], self.length[rows], self.prompt_length[rows], self.finished[rows], self.limit[rows],
            self.faults[rows], self.buffers.of_rows(begin, end), self.sampling.of_rows(begin, end), self.range,
        )  # fmt: skip

    def enlarged(self, slots: int) -> Rows:
        """The same rows with room for `slots` tokens each."""
        with room_for(len(self.tokens), slots):
            tokens = self.tokens.new_zeros(len(self.tokens), slots)
            tokens[:, : self.slots] = self.tokens
            index = torch.arange(slots, device=tokens.device)
            return replace(self, tokens=tokens, buffers=self.buffers.enlarged(slots), range=index)

    def prefixes(self, nodes: Tensor, tree: TreeTensors, view: Tensor) -> Prefixes:
        """Returns, for each node of a block, the text up to and including the node. nodes: ``[B, N]``; view: see :attr:`range`."""
        padding = self.sampling.padding
        assert padding is not None
        tokens = self.tokens[:, : len(view)]
        return Prefixes(tokens, self.length, self.prompt_length, nodes, tree.offsets, tree.visible, padding)

    def sequences(self, view: int) -> Sequences:
        return Sequences(self.tokens[:, :view], self.length, self.prompt_length, self.finished, self.sampling.keys)


def no_sampling(rows: int, device: torch.device) -> SamplingInputs:
    """Returns the sampling tensors of `rows` rows for a plan without operations. The rows have no stop tokens."""
    return SamplingInputs(torch.zeros(1, device=device), row_keys(0, rows, device), stop_tensor([()], device)[0])


def shapes_of(sampling: SamplingInputs) -> tuple[torch.Size | None, ...]:
    """The shapes of the tensors in `sampling`. Recorded steps read the tensors, so each combination of shapes needs a recording."""
    return tuple([None if tensor is None else tensor.shape for tensor in vars(sampling).values()])


def stop_tensor(stop_tokens: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``[B, E]`` int64: the stop tokens of each row, padded with -1 to a multiple of 8, so that few shapes occur."""
    width = max(round_up(max(map(len, stop_tokens)), 8), 8)
    return torch.tensor([[*stops, *[-1] * (width - len(stops))] for stops in stop_tokens], device=device)


@contextmanager
def room_for(rows: int, slots: int) -> Iterator[None]:
    """Wraps an allocation: raises CacheMemoryError if the CPU lacks memory, and adds a note to other errors, such as CUDA's."""
    what = f"the key-value cache of {amount(rows, 'row')} with {slots} slots each"
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # The CPU's allocator raises a plain RuntimeError that names "memory", or an "overflow" for sizes above 2⁶³ bytes.
        cpu = isinstance(error, MemoryError) or any(word in str(error) for word in ("memory", "overflow"))
        if isinstance(error, torch.OutOfMemoryError) or not cpu:
            error.add_note(f"decoders: while allocating {what}")
            raise
        raise CacheMemoryError(
            f"there is no memory for {what}: ask for fewer tokens, rows or slots ({error})"
        ) from error
