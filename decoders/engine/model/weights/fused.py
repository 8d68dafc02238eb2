"""Joint products of linear layers with the same input: queries, keys and values; gate and up.

A kernel call costs some microseconds for any size, and its threads wait for each other at the end. A model of 30 small layers makes
211 calls per step; joint products save 90 of them.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .. import torch_compat
from ..kernels import MOST_MATRICES

Product = TypeVar("Product", Tensor, Tensor | None)
#: Paths of layers with the same input, in the order of their calls.
Group = tuple[str, ...]


class SharedInputs:
    """While entered, linear layers return zeros without computing, and their inputs are noted. layers: by path."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self._layers = layers
        self._calls: list[tuple[str, Tensor]] = []

    def __enter__(self) -> SharedInputs:
        for path, layer in self._layers.items():
            layer.forward = functools.partial(self._note, path, outputs_of(layer))
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers.values():
            vars(layer).pop("forward", None)

    def _note(self, path: str, outputs: int, x: Tensor) -> Tensor:
        self._calls.append((path, x))
        return x.new_zeros((*x.shape[:-1], outputs))

    def groups(self) -> list[Group]:
        """Groups of layers with the same input tensor. Layers that ran twice are in no group, and calls of groups do not interleave."""
        times = Counter(path for path, _ in self._calls)
        readers: dict[int, list[int]] = {}
        for place, (_, x) in enumerate(self._calls):
            readers.setdefault(id(x), []).append(place)
        groups: list[Group] = []
        end = -1
        for places in readers.values():
            group = tuple(self._calls[place][0] for place in places)
            if len(group) > 1 and places[0] > end and all(times[path] == 1 for path in group):
                groups.append(group)
                end = places[-1]
        return groups


def plain_weight(module: nn.Module) -> Tensor | None:
    """The dense weight of a plain linear layer; None for other modules: subclasses, layers with another ``forward``, parametrized or
    pruned layers, and quantized or distributed weights.
    """
    weight = torch_compat.own_parameters(module).get("weight")  # parametrized and pruned layers have none
    if type(module) not in (nn.Linear, Conv1D) or weight is None or "forward" in vars(module):
        return None
    plain = type(weight) in (nn.Parameter, Tensor) and weight.layout == torch.strided and weight.dim() == 2
    return weight if plain else None


def outputs_of(layer: nn.Module) -> int:
    """The number of outputs of a linear layer or of GPT-2's ``Conv1D``."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.nf)  # type: ignore[arg-type]


def same_kind(groups: Iterable[Group], kind: Callable[[str], object]) -> Iterator[Group]:
    """The parts of groups that can be multiplied as one product: layers whose `kind` is equal and not None.

    Other layers may run between them, an adapter's first layer for example, but calls of two parts do not interleave.
    """
    for group in groups:
        parts: dict[object, list[int]] = {}
        for place, path in enumerate(group):
            if (what := kind(path)) is not None:
                parts.setdefault(what, []).append(place)
        end = -1
        for places in parts.values():
            if len(places) > 1 and places[0] > end:
                yield tuple(group[place] for place in places)
                end = places[-1]


def join(modules: Mapping[str, nn.Module], groups: Iterable[Group], kind: Callable[[str], object]) -> None:
    """Joins layers of the same group and :func:`kind <same_kind>` to a product of up to :data:`MOST_MATRICES` matrices."""
    for paths in same_kind(groups, kind):
        for begin in range(0, len(paths), MOST_MATRICES):
            group = tuple(modules[path] for path in paths[begin : begin + MOST_MATRICES])
            ends = [0, *accumulate(map(outputs_of, group))]
            if len(group) > 1:
                for layer, columns in zip(group, pairwise(ends), strict=True):
                    vars(layer).update(group=group, columns=columns)


class Joint:
    """Base of layers that may have a joint product.

    Attributes:
        group: the layers of the joint product, itself included; None: no joint product.
        columns: the layer's columns of the product.
    """

    group: tuple[Any, ...] | None = None
    columns: tuple[int, int] = 0, 0

    def product(self, x: Tensor, multiply: Callable[[Tensor, tuple[Any, ...]], Product]) -> Product:
        """The layer's columns of the product that `multiply` returns for `x` and the layers of its group."""
        group = self.group
        if group is None:
            return multiply(x, (self,))
        return share_of(x, group[0], self.columns, lambda x: multiply(x, group))


class Latest(threading.local):
    """Keeps each thread's last result for a tensor, so that layers with the same input compute it once."""

    source: Tensor | None = None
    writes = -1
    by: object = None
    result: Any = None

    def of(self, x: Tensor, by: object, compute: Callable[[Tensor], Any]) -> Any:
        """``compute(x)``, or the last result if `x` and `by` are the same objects and `x` was not written since."""
        if self.source is not x or self.by is not by or self.writes != torch_compat.writes_counted(x):
            self.keep(x, by, compute(x))
        return self.result

    def keep(self, x: Tensor, by: object, result: Any) -> None:
        """Stores the result of `x` and `by`."""
        self.source, self.writes, self.by, self.result = x, torch_compat.writes_counted(x), by, result

    def forget(self) -> None:
        self.source = self.by = self.result = None


#: The joint product of several layers, until the last layer has taken its columns.
_products = Latest()


def share_of(x: Tensor, by: object, columns: tuple[int, int], multiply: Callable[[Tensor], Product]) -> Product:
    """A layer's columns of the joint product of several layers, which the first layer computes.

    Args:
        by: identifies the product.
        columns: begin and end (exclusive).
        multiply: ``[…, in]`` → ``[…, out]`` of all layers, or None.
    """
    if torch.compiler.is_dynamo_compiling():  # the compiler merges equal products
        product = multiply(x)
        return product if product is None else product[..., columns[0] : columns[1]]
    joint: Product = _products.of(x, by, multiply)
    if joint is None:
        return joint
    if columns[1] == joint.shape[-1]:
        _products.forget()
    return joint.narrow(-1, columns[0], columns[1] - columns[0])
