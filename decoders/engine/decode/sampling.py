"""Builds the tensors that the operations of a sampling plan use, for one request or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...sampling.prefixes import OperationSequences
from ...sampling.processors import SamplingInputs, first_keys, row_keys
from ..model.buckets import round_up
from .request import Request
from .rows import stop_tensor


def sampling_of(requests: Sequence[Request], rows: int, device: torch.device) -> SamplingInputs:
    """The sampling tensors of one request, or of several requests with one row each.

    A parameter that is equal in all rows is stored once.

    Args:
        rows: number of rows, padding rows included.
    """
    added = [requests[0]] * (rows - len(requests)) if len(requests) > 1 else []
    every = [*requests, *added]
    values, stops = (
        [request.sampling.values or (0.0,) for request in every],
        [request.stopping.tokens for request in every],
    )
    seeds = [request.sampling.seed for request in every]
    inputs = SamplingInputs(
        torch.tensor(values if len(set(values)) > 1 else values[0], dtype=torch.float32, device=device),
        first_keys(seeds, device) if len(every) > 1 else row_keys(seeds[0], rows, device),
        stop_tensor(stops, device) if len(set(stops)) > 1 else stop_tensor(stops[:1], device)[0],
    )  # fmt: skip
    if not requests[0].plan.reads_text:
        return inputs
    sequences, biases = _sequences(every, device)
    padding = [row for request in requests for row in request.padding]
    width = round_up(max(map(len, padding)), 32)  # rounded up, so that few shapes occur
    columns = torch.full((rows, width), -1, dtype=torch.int64, device=device)
    for row, own in enumerate(padding):
        columns[row, width - len(own) :] = own
    return replace(inputs, sequences=sequences, biases=biases, padding=columns)


def _sequences(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns :attr:`SamplingInputs.sequences` and ``biases``. Their sizes are rounded up, so that few shapes occur."""
    lists = list(dict.fromkeys(request.sampling.sequences for request in requests))
    every = [sequence for own in lists for operation in own for sequence in operation]
    ngrams = [
        int(value) for request in requests
        for name, value in zip(request.plan.operations, request.sampling.values, strict=True) if name == "no_repeat_ngram"
    ]  # fmt: skip
    length = round_up(max([1, *ngrams, *(len(tokens) for tokens, _ in every)]), 4)
    count = round_up(max(len(operation) for own in lists for operation in own), 8)

    def filled(own: OperationSequences) -> tuple[list, list]:
        """For each operation, its sequences and their biases, sorted by last token and padded to the same number. Padding entries have
        bias 0, so they add nothing to any score.
        """
        tokens, biases = [], []
        for operation in own:
            each = sorted(operation, key=lambda sequence: sequence[0][-1])
            each = [((each[0][0][-1] if each else -1,), 0.0)] * (count - len(each)) + each
            tokens.append([[*[-1] * (length - len(sequence)), *sequence] for sequence, _ in each])
            biases.append([bias for _, bias in each])
        return tokens, biases

    tables = [filled(request.sampling.sequences) for request in requests] if len(lists) > 1 else [filled(lists[0])]
    shape = len(tables), len(lists[0]), count
    tokens = torch.tensor([own for own, _ in tables], dtype=torch.int64).view(*shape, length)
    biases = torch.tensor([own for _, own in tables], dtype=torch.float32).view(shape)
    return (tokens if len(lists) > 1 else tokens[0]).to(device), (biases if len(lists) > 1 else biases[0]).to(device)
