"""Private parts of torch's modules and tensors: hooks, own parameters, and the counter of writes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn

#: Returns a module's forward hooks and forward pre-hooks, both by id. torch has no public list of hooks. Every call of the engine reads
#: the hooks of every module, so this is an `attrgetter`, which is faster than a Python function.
hooks_of: Callable[[nn.Module], tuple[Mapping[int, Any], Mapping[int, Any]]] = operator.attrgetter(
    "_forward_hooks", "_forward_pre_hooks"
)


def hooks_everywhere() -> tuple[int, ...]:
    """The ids of global hooks (``register_module_forward_hook``). torch has no public list of global hooks."""
    registered = nn.modules.module
    return *registered._global_forward_hooks, *registered._global_forward_pre_hooks


def remove_hooks(module: nn.Module, ids: Iterable[int]) -> None:
    """Removes hooks from `module`, a copy of the module that they were registered on. A hook's handle works only on the original."""
    for hooks in hooks_of(module):
        for name in ids:
            cast(dict, hooks).pop(name, None)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's dict of its own parameters. A parametrized or pruned weight is not in it, although ``module.weight`` exists.

    Writing to the dict bypasses ``register_parameter``, which runs hooks and accepts only parameters.
    """
    return module._parameters


def is_parametrized(module: Any) -> bool:
    """Whether a weight of `module` is parametrized now (adapters may do this in each pass). torch's own function is slower."""
    return "parametrizations" in module._modules


def modules_in(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())`` in a third of the time. Every call of the engine needs this list."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The own parameters of `modules`, without duplicates. Every call of the engine needs them, and ``Module.parameters`` is slower."""
    return list({id(t): t for module in modules for t in own_parameters(module).values() if t is not None}.values())


def buffers_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The own buffers of `modules`, without duplicates."""
    return list({id(t): t for module in modules for t in module._buffers.values() if t is not None}.values())


def writes_counted(tensor: Tensor) -> int:
    """Autograd's counter of in-place writes to `tensor`. The counter misses writes to inference tensors and through ``.data``."""
    if tensor.is_inference():  # checked first, because raising and catching the error takes 30 microseconds
        return 0
    try:
        return tensor._version
    except RuntimeError:
        return 0
