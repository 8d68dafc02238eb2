"""Linear layers whose products of few rows have the same bits for any number of rows: on CUDA, by a kernel of ours."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels.launch import runs_kernels


class _FewRows:
    """What the layers below have in common: they read their own parameters where these lie, so that nothing is copied or goes stale."""

    def matrix(self) -> Tensor:
        """``[out, in]``, of any strides."""
        return cast(Tensor, self.weight)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        from ..kernels.products import few_rows_linear  # imports Triton

        matrix = self.matrix()
        if x.dtype != matrix.dtype:
            return super().forward(x)  # type: ignore[misc]  # of the layer that it stands in for
        return few_rows_linear(x, matrix, self.bias)  # type: ignore[attr-defined]


class FewRowsLinear(_FewRows, nn.Linear):
    """An ``nn.Linear`` that multiplies few rows by our kernel."""


class FewRowsConv1D(_FewRows, Conv1D):
    """GPT-2's linear layer, whose weight is stored as ``[in, out]``."""

    def matrix(self) -> Tensor:
        return self.weight.t()


#: By the kind of layer: the class that stands in for it.
KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FewRowsLinear, Conv1D: FewRowsConv1D}


def multiplies(weight: Tensor) -> bool:
    """Whether the kernel takes a matrix: in 16 bits, on a device that has its instructions. The CPU's products are packed ones.

    In float32 a sum's order decides next to nothing, and the kernel would be slow.
    """
    return weight.dtype in (torch.bfloat16, torch.float16) and has_kernel(weight.device)


def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on `device`; NVIDIA's have had its instructions since Ampere."""
    if device.type != "cuda" or not runs_kernels(device):
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
