"""Replaces norms and activations by variants that give a row the same bits in every block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from .. import modules_compat
from ..kernels.products import rms_norm_for
from .layers import Formula, norm_class
from .twin import share_weights

#: ATen assigns at least GRAIN elements to each thread. A thread runs only vector code if it has a multiple of TWO_VECTORS elements.
GRAIN, TWO_VECTORS = 32768, 64
#: torch's elementwise activations in which vector code and scalar code round differently.
ELEMENTWISE = (nn.SiLU, nn.Sigmoid, nn.GELU, nn.Softplus, nn.Mish)
#: Names of the attribute that holds epsilon, in norms of transformers and of torch.
EPSILONS = ("variance_epsilon", "eps")


def norm_kind(module: nn.Module) -> type[nn.Module] | None:
    """The class that replaces `module` if it is a root-mean-square norm for which there is a kernel; else None."""
    own, epsilons = (
        modules_compat.own_parameters(module),
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
    return None if formula is None else norm_class(cast(Hashable, type(module)), formula, operator)


@torch.no_grad()
def formula_of(module: nn.Module, epsilon: float) -> Formula | None:
    """The formula that gives the same bits as `module` for random numbers and a random weight; None if no formula does."""
    weight = modules_compat.own_parameters(module)["weight"]
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(rows, len(weight), generator=generator, device="cpu").to(weight) for rows in (8, 1))
    tried = share_weights(module)
    modules_compat.own_parameters(tried)["weight"] = nn.Parameter(scale[0])
    try:
        out = type(module).forward(tried, x)
    except Exception:  # the module takes other arguments
        return None
    formulas = (Formula(epsilon, one_added, first) for one_added in (False, True) for first in (True, False))
    return next((f for f in formulas if isinstance(out, Tensor) and torch.equal(out, f(x, scale[0]))), None)


def replace_norms(model: nn.Module) -> None:
    """Makes root-mean-square norms in our copy of a model run a kernel that gives a row the same bits for any number of rows."""
    for module in model.modules():
        module.__class__ = norm_kind(module) or type(module)


def align_activations(model: nn.Module) -> None:
    """Makes the activations in our copy of a model give a number the same bits at any index of the tensor."""
    for module in model.modules():
        plain = type(module)
        elementwise = plain in ELEMENTWISE or sys.modules.get(plain.__module__) is activations
        if elementwise and "forward" not in vars(module) and not any(True for _ in module.parameters()):
            module.__class__ = _aligned(cast(Hashable, plain))


@functools.cache
def _aligned(plain: type[nn.Module]) -> type[nn.Module]:
    """The class that replaces the class `plain`. The class pads its input so that every thread has whole vectors."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return plain.forward(self, x)
        count = x.numel()
        threads = 1 if count <= GRAIN else min(torch.get_num_threads(), -(-count // GRAIN))
        spare = -count % (TWO_VECTORS * threads)
        # torch processes a non-contiguous input row by row, so for such an input the size of a row decides whether scalar code runs.
        if not (spare if x.is_contiguous() else x.shape[-1] % TWO_VECTORS or threads > 1):
            return plain.forward(self, x)
        return plain.forward(self, F.pad(x.reshape(-1), (0, spare)))[:count].view(x.shape)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
