"""Projections of a recurrent module run once for a whole block, though the module itself runs level by level.

Most of the weights of such a module are in the linear layers that read its input and in the one that gives its output. Which these
are is seen in a trial call; what is in between goes on running level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

_STAND_IN = "decoders_stand_in"
_HOISTED = "decoders_hoisted"


def projections(
    module: nn.Module, call: Callable[[Tensor], Tensor], hidden: Tensor
) -> tuple[tuple[str, ...], str | None]:
    """Names of the linear layers that read `hidden` itself, and of the one whose result is what ``call(hidden)`` gives.

    Each is called once.
    """
    seen: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        child.register_forward_hook(lambda _, args, out, name=name: seen.append((name, args[0], out)))
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    ]
    try:
        given = call(hidden)
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, _, _ in seen]
    once = [entry for entry in seen if names.count(entry[0]) == 1]
    first = tuple(name for name, read, _ in once if read is hidden)
    last = next((name for name, _, out in once if out is given and name not in first), None)
    return first, last


def hoist(module: nn.Module, names: tuple[tuple[str, ...], str | None]) -> None:
    """Prepares `module`, of a private tree, for :func:`hoisted`."""
    first, last = names
    layers = [module.get_submodule(name) for name in (*first, *([last] if last else []))]
    for layer in layers:
        layer.__class__ = _replaceable(cast(Hashable, type(layer)))
    # In tuples, a copy of the tree has its own ones.
    setattr(module, _HOISTED, (tuple(layers[: len(first)]), tuple(layers[len(first) :])))


class Level:
    """Which tokens run at present.

    Attributes:
        nodes: places in ``[B·N]``.
    """

    nodes: Tensor


@contextmanager
def hoisted(module: nn.Module, tokens: Tensor, level: Level) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within it `module` runs on one level after the other, its projections on all `tokens` ``[B, N, H]`` at once.

    Gives a function that turns what the module gave for all levels, ``[B·N, …]``, into its result.
    """
    first, last = getattr(module, _HOISTED, ((), ()))
    inputs: list[Tensor] = []

    def reading(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        whole = layer(tokens).flatten(0, 1)
        return lambda _: whole[level.nodes][:, None]

    def writing(layer: Any) -> Callable[[Tensor], Tensor]:
        def keep(given: Tensor) -> Tensor:
            if not inputs:
                inputs.append(given.new_zeros(tokens.shape[0] * tokens.shape[1], *given.shape[2:]))
            inputs[0][level.nodes] = given[:, 0]
            return given.new_empty(*given.shape[:-1], layer.out_features)

        return keep

    def result(given: Tensor) -> Tensor:
        if not last:
            return given
        vars(last[0]).pop(_STAND_IN, None)
        return cast(Tensor, last[0](inputs[0].unflatten(0, tokens.shape[:2]))).flatten(0, 1)

    try:
        for layer in first:
            vars(layer)[_STAND_IN] = reading(layer)
        for layer in last:
            vars(layer)[_STAND_IN] = writing(layer)
        yield result
    finally:
        for layer in (*first, *last):
            vars(layer).pop(_STAND_IN, None)


@cache
def _replaceable(plain: type[nn.Module]) -> type[nn.Module]:
    """The class that stands in for `plain`: something else may run in its place."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        stand_in = vars(self).get(_STAND_IN)
        return cast(Tensor, plain.forward(self, x) if stand_in is None else stand_in(x))

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
