"""Norms and activations that replace a model's own, so that a row's bits do not depend on its block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from .. import torch_compat
from ..kernels.products import rms_norm_for
from .twin import share_weights

#: ATen gives each thread at least GRAIN elements, and computes whole multiples of TWO_VECTORS without scalar code.
GRAIN, TWO_VECTORS = 32768, 64
#: Elementwise activations of torch whose vector code and scalar code round differently.
ELEMENTWISE = (nn.SiLU, nn.Sigmoid, nn.GELU, nn.Softplus, nn.Mish)


#: Names of the epsilon in norms of transformers and torch.
EPSILONS = ("variance_epsilon", "eps")


class Formula(NamedTuple):
    """How a norm computes ``x / sqrt(mean(x²) + epsilon) * weight``.

    Attributes:
        epsilon: the constant.
        one_added: whether the factor is ``1 + weight``, as in Gemma.
        rounded_first: whether the quotient is rounded to the dtype of `x` before the multiplication (Llama) or after it (OLMo 2).
    """

    epsilon: float
    one_added: bool
    rounded_first: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm as models of transformers compute it. x: ``[…, H]``, weight: ``[H]``."""
        wide = x.float()
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        factor = 1.0 + weight.float() if self.one_added else weight
        return (factor * (quotient.to(x.dtype) if self.rounded_first else quotient)).to(x.dtype)


def norm_kind(module: nn.Module) -> type[nn.Module] | None:
    """The class that replaces a root-mean-square norm, if there is a kernel; None for other modules."""
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
        or (operator := rms_norm_for(weight)) is None
    ):
        return None
    formula = formula_of(module, epsilons[0])
    return None if formula is None else _stand_in(cast(Hashable, type(module)), formula, operator)


@torch.no_grad()
def formula_of(module: nn.Module, epsilon: float) -> Formula | None:
    """The formula that gives the same bits as `module` on random numbers with a random weight, or None."""
    weight = torch_compat.own_parameters(module)["weight"]
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(rows, len(weight), generator=generator, device="cpu").to(weight) for rows in (8, 1))
    tried = share_weights(module)
    torch_compat.own_parameters(tried)["weight"] = nn.Parameter(scale[0])
    try:
        out = type(module).forward(tried, x)
    except Exception:  # other arguments
        return None
    formulas = (Formula(epsilon, one_added, first) for one_added in (False, True) for first in (True, False))
    return next((f for f in formulas if isinstance(out, Tensor) and torch.equal(out, f(x, scale[0]))), None)


@functools.cache
def _stand_in(plain: Any, formula: Formula, rms_norm: Callable[..., Tensor]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or x.dtype != self.weight.dtype or not x.numel():
            return plain.forward(self, x, *more, **options)
        return rms_norm(x, self.weight, *formula)

    namespace = {"forward": forward, "decoders_formula": formula, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)


def replace_norms(model: nn.Module) -> None:
    """Makes root-mean-square norms of a private copy run a kernel that gives a row the same bits for any number of rows."""
    for module in model.modules():
        module.__class__ = norm_kind(module) or type(module)


def align_activations(model: nn.Module) -> None:
    """Makes the activations of a private copy give an element the same bits at any place of its tensor."""
    for module in model.modules():
        plain = type(module)
        elementwise = plain in ELEMENTWISE or sys.modules.get(plain.__module__) is activations
        if elementwise and "forward" not in vars(module) and not any(True for _ in module.parameters()):
            module.__class__ = _aligned(cast(Hashable, plain))


@functools.cache
def _aligned(plain: type[nn.Module]) -> type[nn.Module]:
    """The class that replaces `plain`: it pads its input so that every thread has whole vectors."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return plain.forward(self, x)
        count = x.numel()
        threads = 1 if count <= GRAIN else min(torch.get_num_threads(), -(-count // GRAIN))
        spare = -count % (TWO_VECTORS * threads)
        # torch computes strided inputs row by row.
        if not (spare if x.is_contiguous() else x.shape[-1] % TWO_VECTORS or threads > 1):
            return plain.forward(self, x)
        return plain.forward(self, F.pad(x.reshape(-1), (0, spare)))[:count].view(x.shape)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
