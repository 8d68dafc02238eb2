"""Matrix products of a mixture of experts, for GPUs and dtypes with which torch's grouped product makes the host wait for the device.

torch multiplies all groups of tokens by their experts' matrices in one kernel only in bfloat16 on compute capability 9.0 and 10.0.
Otherwise torch on CUDA reads the group sizes on the host, so that no step can be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...common.devices import in_64_bits
from ...common.transformers_compat import experts_of, gated, register_experts, set_experts
from .modules_compat import own_parameters

#: The name of :func:`forward` in transformers' registry.
NAME = "decoders_experts"
#: If rows times experts are at most this number, every expert multiplies all rows. Otherwise the host counts the rows of each expert,
#: and an expert multiplies only these rows.
MOST_PRODUCTS = 1 << 14
#: Copying a matrix costs as much as reading this many matrices.
COPYING = 3

_library = torch.library.Library("decoders", "FRAGMENT")
_library.define("expert_product(Tensor x, Tensor experts, Tensor matrices, bool transposed) -> Tensor")


def _expert_product(x: Tensor, experts: Tensor, matrices: Tensor, transposed: bool) -> Tensor:
    """``x[s] @ matrices[experts[s]].T``, ``[S, O]``, by the cheapest of three methods.

    Args:
        x: ``[S, K]``.
        experts: ``[S]`` int64, the expert of each row of `x`.
        matrices: ``[E, O, K]``; if `transposed`, ``[E, K, O]``.
    """
    matrices = matrices if transposed else matrices.transpose(1, 2)
    rows, count = len(x), len(matrices)
    if rows * COPYING <= count:
        return torch.bmm(x[:, None], matrices[experts])[:, 0]
    if rows * count <= MOST_PRODUCTS:
        every = torch.bmm(x.expand(count, *x.shape), matrices)  # [E, S, O]
        return every[experts, torch.arange(rows, device=x.device)]
    chosen = in_64_bits(experts)
    order = chosen.argsort(stable=True).to(x.device)
    groups = x[order].split(torch.bincount(chosen, minlength=count).tolist())
    out = x.new_empty(rows, matrices.shape[2])
    out[order] = torch.cat([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])
    return out


_library.impl("expert_product", _expert_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "decoders::expert_product",
    lambda x, experts, matrices, transposed: x.new_empty(len(x), matrices.shape[2 if transposed else 1]),
    lib=_library,
)


def forward(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The output of a layer's experts, ``[T, H]``. The signature is the same as for transformers' expert functions.

    Args:
        hidden: ``[T, H]``.
        experts, weights: ``[T, k]``, the experts of each token, and the experts' weights.
    """
    chosen, product = experts.reshape(-1), torch.ops.decoders.expert_product
    x = hidden.repeat_interleave(experts.shape[-1], dim=0)

    def multiplied(x: Tensor, name: str) -> Tensor:
        out = product(x, chosen, getattr(module, name), module.is_transposed)
        return out + getattr(module, f"{name}_bias")[chosen] if module.has_bias else out

    if module.has_gate:
        x = gated(module, multiplied(x, "gate_up_proj"))
    else:
        x = module.act_fn(multiplied(x, "up_proj"))
    x = multiplied(x, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    weighted = x * weights.reshape(-1, 1)
    return weighted.view(*experts.shape, -1).sum(1).to(hidden.dtype)


register_experts(NAME, forward)


def is_grouped_natively(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product runs on `device` without making the host wait. Always True on the CPU."""
    if device.type != "cuda":
        return device.type == "cpu"
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def take_over(twin: nn.Module) -> int:
    """Makes expert layers of our copy of a model use :func:`forward` if torch's product makes the host wait; returns their number."""
    taken = 0
    for module in twin.modules():
        matrices = [t for t in own_parameters(module).values() if t is not None and t.dim() == 3]
        # Several layers may share a config. The first of these layers has then already set NAME in the config.
        if not matrices or experts_of(module) not in ("grouped_mm", NAME):
            continue
        if not all(is_grouped_natively(t.device, t.dtype) for t in matrices):
            set_experts(module, NAME)
            taken += 1
    return taken
