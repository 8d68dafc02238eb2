"""Norms that give a row the same bits for any number of rows: on CUDA, by a kernel of ours in the place of PyTorch's reductions.

Which modules are root-mean-square norms is not told by their class: each is tried on random numbers beside the formula. With
``nn.LayerNorm`` there is nothing to do, PyTorch's kernel takes a row at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import torch_compat
from .few_rows import multiplies
from .twin import share_weights

#: What the constant of a norm is called.
EPSILONS = ("variance_epsilon", "eps")


class Formula(NamedTuple):
    """In which way a norm computes ``x / sqrt(mean(x²) + epsilon) * weight``.

    Attributes:
        epsilon: the constant.
        one_added: whether the factor is ``1 + weight``, as in Gemma.
        rounded_first: whether the quotient is rounded to the type of `x` before it is multiplied, as in Llama, or after, as in OLMo 2.
    """

    epsilon: float
    one_added: bool
    rounded_first: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """As models of transformers compute it. x: ``[…, H]``, weight: ``[H]``."""
        wide = x.float()
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        factor = 1.0 + weight.float() if self.one_added else weight
        return (factor * (quotient.to(x.dtype) if self.rounded_first else quotient)).to(x.dtype)


def norm_kind(module: nn.Module) -> type[nn.Module] | None:
    """The class that stands in for a root-mean-square norm in 16 bits on a device that has the kernel; None for all else."""
    own, epsilons = (
        torch_compat.own_parameters(module),
        [vars(module)[name] for name in EPSILONS if name in vars(module)],
    )
    weight: Any = own.get("weight")
    if list(own) != ["weight"] or type(weight) is not nn.Parameter or weight.dim() != 1 or "forward" in vars(module):
        return None
    if (
        [type(epsilon) for epsilon in epsilons] != [float]
        or any(True for _ in module.children())
        or not multiplies(weight)
    ):
        return None
    formula = formula_of(module, epsilons[0])
    return None if formula is None else _stand_in(cast(Hashable, type(module)), formula)


@torch.no_grad()
def formula_of(module: nn.Module, epsilon: float) -> Formula | None:
    """The formula of which `module` gives the bits on random numbers, with a random weight: its own may be ones."""
    weight = torch_compat.own_parameters(module)["weight"]
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(rows, len(weight), generator=generator).to(weight) for rows in (8, 1))
    tried = share_weights(module)
    torch_compat.own_parameters(tried)["weight"] = nn.Parameter(scale[0])
    try:
        out = type(module).forward(tried, x)
    except Exception:  # it takes something else
        return None
    formulas = (Formula(epsilon, one_added, first) for one_added in (False, True) for first in (True, False))
    return next((f for f in formulas if isinstance(out, Tensor) and torch.equal(out, f(x, scale[0]))), None)


@functools.cache
def _stand_in(plain: Any, formula: Formula) -> type[nn.Module]:
    from ..kernels.norms import rms_norm  # imports Triton

    def forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or x.dtype != self.weight.dtype or not x.numel():
            return plain.forward(self, x, *more, **options)
        return rms_norm(x, self.weight, *formula)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
