"""Which modules of decoder layers read what others returned, while a model runs once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..cache import SlotCache
from ..kernels import attention

#: While a model runs its attention is noted, the whole process's.
_alone = threading.Lock()
#: An argument: its place, or its keyword.
Name = int | str | None


class Call(NamedTuple):
    """One call of a module."""

    module: nn.Module
    given: tuple
    options: dict[str, Any]
    result: Any

    def name_of(self, value: Any) -> Name:
        """The argument that is this object, None if none is."""
        named: list[tuple[int | str, Any]] = [*enumerate(self.given), *self.options.items()]
        return next((name for name, own in named if own is value and value is not None), None)


@contextmanager
def noted_calls(
    layers: Sequence[nn.Module], run: Callable
) -> Iterator[tuple[dict[nn.Module, list[Call]], dict[nn.Module, tuple]]]:
    """The calls of all modules in `layers` while the model runs; and per attention module what our kernel and the cache were given."""
    calls: dict[nn.Module, list[Call]] = {}
    attended: dict[nn.Module, tuple] = {}
    order: list[Call] = []
    updates: list[tuple] = []

    def note(module: nn.Module, given: tuple, options: dict[str, Any], result: Any) -> None:
        order.append(Call(module, given, options, result))
        calls.setdefault(module, []).append(order[-1])

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *given: Any, **options: Any
    ) -> Any:
        if updates and module in noted_modules:
            attended[module] = query, mask, options, updates[-1]
        return attention.kernel_attention(module, query, key, value, mask, *given, **options)

    def watch(cache: SlotCache) -> None:
        update = cache.update

        def noted(key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **options: Any) -> Any:
            updates.append((cache, key_states, value_states, layer_idx))
            return update(key_states, value_states, layer_idx, *more, **options)

        cache.update = noted  # type: ignore[method-assign]

    noted_modules = {m: None for layer in layers for m in layer.modules()}
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in noted_modules]
    with _alone:
        attention.register(attention.NAME, attend)
        try:
            run(watch)
        finally:
            attention.register(attention.NAME, attention.kernel_attention)
            for handle in handles:
                handle.remove()
    for noted in calls.values():
        noted.sort(key=lambda call: next(i for i, other in enumerate(order) if other is call))
    calls[ORDER] = order
    yield calls, attended


#: The place of all calls, in their order.
ORDER = nn.Module()


def once(calls: dict[nn.Module, list[Call]], module: nn.Module) -> Call | None:
    own = calls.get(module, [])
    return own[0] if len(own) == 1 else None
