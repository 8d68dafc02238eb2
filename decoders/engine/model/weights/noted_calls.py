"""Records the calls of all modules in decoder layers during a pass, to find out which module reads another module's result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..kernels import attention
from ..slot_cache import SlotCache

#: Held while the attention function of the whole process is replaced.
_alone = threading.Lock()
#: The name of an argument: its index, or its keyword; None for no argument.
Name = int | str | None


class Call(NamedTuple):
    """One call of a module: its positional arguments `given`, its keyword arguments `options`, and its result."""

    module: nn.Module
    given: tuple
    options: dict[str, Any]
    result: Any

    def name_of(self, value: Any) -> Name:
        """The name of the argument that is the object `value`; None if it is not an argument."""
        named: list[tuple[int | str, Any]] = [*enumerate(self.given), *self.options.items()]
        return next((name for name, own in named if own is value and value is not None), None)


def noted_calls(
    layers: Sequence[nn.Module], kernel: attention.Kernel, run: Callable
) -> tuple[dict[nn.Module, list[Call]], dict[nn.Module, tuple]]:
    """Calls `run`; returns the calls of each module in `layers`, and each attention module's query, mask, options and cache update.

    run: calls its argument with the cache, then runs the model.
    """
    calls: dict[nn.Module, list[Call]] = {}
    attended: dict[nn.Module, tuple] = {}
    order: list[Call] = []
    updates: list[tuple] = []

    name, compute = attention.REGISTERED[kernel]

    def note(module: nn.Module, given: tuple, options: dict[str, Any], result: Any) -> None:
        order.append(Call(module, given, options, result))
        calls.setdefault(module, []).append(order[-1])

    # The mask has transformers' name, because some models pass it by keyword.
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *given: Any, **options: Any
    ) -> Any:  # fmt: skip
        if updates and module in noted_modules:
            attended[module] = query, attention_mask, options, updates[-1]
        return compute(module, query, key, value, attention_mask, *given, **options)

    def watch(cache: SlotCache) -> None:
        update = cache.update

        def noted(key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **options: Any) -> Any:
            updates.append((cache, key_states, value_states, layer_idx))
            return update(key_states, value_states, layer_idx, *more, **options)

        cache.update = noted  # type: ignore[method-assign]

    noted_modules = {m: None for layer in layers for m in layer.modules()}
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in noted_modules]
    with _alone:
        attention.register(name, attend)
        try:
            run(watch)
        finally:
            attention.register(name, compute)
            for handle in handles:
                handle.remove()
    calls[ORDER] = order
    return calls, attended


#: Under this key, :func:`noted_calls` lists the calls of all modules in order.
ORDER = nn.Module()


def once(calls: dict[nn.Module, list[Call]], module: nn.Module) -> Call | None:
    own = calls.get(module, [])
    return own[0] if len(own) == 1 else None
