"""Weight matrices packed once for oneDNN, shared by uncompiled steps, compiled graphs and every use of the model as a draft model.

On CUDA a kernel of ours multiplies matrices as they are (:mod:`.same_bits`): there is nothing to pack, free or renew.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....errors import UnsupportedError
from .. import torch_compat
from . import same_bits
from .fingerprints import Snapshot
from .fused import Group, columns_of, outputs_of, same_kind, share_of

#: Matrices with fewer elements are left alone: calling oneDNN costs more than its kernel saves.
SMALLEST = 128 * 128

_library = torch.library.Library("decoders", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return torch_compat.multiply_packed(x, packed, bias)


_library.impl("packed_linear", _packed_linear, "CPU")
_library.impl("packed_linear", _packed_linear, "MkldnnCPU")


@torch.library.register_fake("decoders::packed_linear", lib=_library)
def _(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight. x: ``[…, in]``, packed: ``[out, in]`` opaque, bias: ``[out]`` or None."""
    # Not is_compiling(): in torch 2.13 that is true in every thread while one of them compiles.
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.decoders.packed_linear(x, packed, bias, out_features)
    return _packed_linear(x, packed, bias, out_features)  # without a second pass through the dispatcher


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """:func:`packed_linear` for any type of `x` and `bias`; the product is computed in the type of `packed`."""
    if x.dtype == packed.dtype:
        return packed_linear(x, packed, bias, out_features)
    wide = None if bias is None else bias.to(packed.dtype)
    return packed_linear(x.to(packed.dtype), packed, wide, out_features).to(x.dtype)


class _Packed:
    """Base of the layers below.

    Attributes:
        packed: ``[out, in]``, opaque; the matrix of several layers if these are multiplied as one (:mod:`.fused`).
        columns: this layer's columns of the product; None: all.
        packed_bias: ``[out]``, of all these layers.
        packed_from: the type of the weight, of inputs and of outputs; `packed` may have a wider type.
    """

    packed: Tensor
    packed_from: torch.dtype
    columns: tuple[int, int] | None = None
    packed_bias: Tensor | None = None

    def product(self, x: Tensor, outputs: int) -> Tensor:
        if self.columns is None:
            return multiply(x, self.packed, self.bias, outputs)  # type: ignore[attr-defined]
        packed, bias = self.packed, self.packed_bias
        return share_of(x, packed, self.columns, lambda x: multiply(x, packed, bias, packed.shape[0]))


class PackedLinear(_Packed, nn.Linear):
    """An ``nn.Linear`` that multiplies by the packed copy of its weight. ``weight`` and ``bias`` can still be read."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.packed_from:
            _refuse_freed(self.weight)
            return F.linear(x, self.weight, self.bias)  # raises PyTorch's own error, or autocast converts
        return self.product(x, self.out_features)


class PackedConv1D(_Packed, Conv1D):
    """GPT-2's linear layer, whose weight is stored as ``[in, out]``."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.packed_from:
            _refuse_freed(self.weight)
            return super().forward(x)
        return self.product(x, self.nf)


#: Per kind of layer: the class that replaces it, and how its weight becomes a matrix ``[out, in]``.
_KINDS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Tensor], Tensor]]] = {
    nn.Linear: (PackedLinear, lambda weight: weight),
    Conv1D: (PackedConv1D, lambda weight: weight.t()),
}


class WeightCopy(ABC):
    """A copy of parameters in another form, stale once they change.

    Attributes:
        sources: the parameters.
    """

    def __init__(self, sources: Sequence[Tensor], more: Sequence[Tensor] = ()) -> None:
        self.sources, self._more = tuple(sources), tuple(more)
        self.settle()

    def settle(self) -> None:
        """Notes that the copy has the parameters' present values, or that these were freed and only the copy is left."""
        self._made_of = Snapshot((*self.sources, *self._more))

    @property
    def stale(self) -> bool:
        """Whether a parameter has changed since it was copied."""
        return self._made_of.changed

    @abstractmethod
    def repack(self) -> None:
        """Copies the parameters' present values into the same tensors, which graphs hold."""


@torch.no_grad()
def renew(copies: Iterable[WeightCopy]) -> int:
    """Renews stale copies in place; returns how many there were."""
    stale = [copy for copy in copies if copy.stale]
    with torch.inference_mode(False):
        for copy in stale:
            copy.repack()
    return len(stale)


class PackedWeight(WeightCopy):
    """A matrix in oneDNN's layout, or several that are multiplied as one, stacked by rows.

    Attributes:
        packed: ``[out, in]``, opaque, of the parameters' type or a wider one; always the same object.
        bias: ``[out]``, of the type of `packed`, for several layers with a bias; always the same object.
    """

    def __init__(
        self, sources: Sequence[Tensor], matrix: Callable[[Tensor], Tensor], biases: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(sources, biases)
        self._matrix, self._biases = matrix, tuple(biases)
        self._rows = [matrix(source).shape[0] for source in sources]
        self.packed = self._pack()
        self.bias = self._bias() if biases else None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.packed] if self.bias is None else [self.packed, self.bias]

    def repack(self) -> None:
        self.packed.copy_(self._pack())
        if self.bias is not None:
            self.bias.copy_(self._bias())
        self.settle()

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the parameters."""
        return self.packed.numel() * self.sources[0].dtype.itemsize

    def dense(self) -> list[Tensor]:
        """The weights in their original layout, bit for bit."""
        whole = self.packed.to_dense().to(self.sources[0].dtype)
        # A single matrix is not copied again; each of several gets its own memory.
        parts = [whole] if len(self.sources) == 1 else [part.clone() for part in whole.split(self._rows)]
        return [self._matrix(part).contiguous() for part in parts]

    def _pack(self) -> Tensor:
        matrices = [self._matrix(source.detach()) for source in self.sources]
        whole = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return torch_compat.reorder_linear_weight(whole.to(torch_compat.packed_type(whole.dtype)))

    def _bias(self) -> Tensor:
        return torch.cat([bias.detach() for bias in self._biases]).to(self.packed.dtype)


#: Packed copies in use anywhere in the process: two engines that share a parameter share its packed copy.
_in_use: weakref.WeakValueDictionary[tuple, PackedWeight] = weakref.WeakValueDictionary()


class PackedLayer(NamedTuple):
    """A packed module, its matrix, and the number of its own weight among the matrix's sources."""

    module: nn.Module
    weight: PackedWeight
    place: int = 0


@dataclass
class Packing:
    """What :func:`pack` did to a module tree.

    Attributes:
        weights: one per distinct matrix.
        layers: every packed module, by path.
    """

    weights: list[PackedWeight] = field(default_factory=list)
    layers: dict[str, PackedLayer] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copies."""
        return sum(weight.packed.nbytes for weight in self.weights)

    def repack(self) -> int:
        """Packs again, in place, the matrices that were written to since; returns how many."""
        return renew(self.weights)


@torch.no_grad()
def pack(
    model: nn.Module, smallest: int | None = None, groups: Sequence[Group] = (), exact_products: bool = True
) -> Packing:
    """Makes the linear layers of `model`, a private tree, multiply by packed copies of their weights. On CUDA, kernels of ours
    replace linear layers and norms.

    Only plain linear layers with dense weights on the CPU are packed, of a type that oneDNN multiplies on this machine. Everything
    else is left alone: subclasses, layers with another ``forward``, quantized and distributed weights, parametrized layers,
    batched experts, other devices.

    Args:
        smallest: matrices with fewer elements are left alone; None: :data:`SMALLEST`.
        groups: layers that read the same input. Those of a group that are packed alike are multiplied as one.
        exact_products: whether layers on CUDA give a row the same bits for any number of rows, as long as these are few.
    """
    smallest = SMALLEST if smallest is None else smallest
    packing = Packing()
    modules = dict(model.named_modules(remove_duplicate=False))
    for paths in same_kind(groups, lambda path: _kind(modules[path], smallest)):
        layers = {path: modules[path] for path in paths}
        weights: list[Any] = [cast(Any, module).weight for module in layers.values()]
        biases: list[Any] = [cast(Any, module).bias for module in layers.values()]
        kind, matrix = cast(Any, packable(modules[paths[0]], smallest))
        _stand_in(packing, layers, kind, _shared(weights, matrix, [] if biases[0] is None else biases))
    as_one = list(same_kind(groups, lambda path: _few_rows_group(modules[path]))) if exact_products else []
    known = {id(layer.module): layer for layer in packing.layers.values()}
    for path, module in modules.items():
        if exact_products and (kind := _few_rows_kind(module)) is not None:
            module.__class__ = kind
            continue
        plain = packable(module, smallest)
        if plain is not None:
            stand_in, matrix = plain
            _stand_in(packing, {path: module}, stand_in, _shared([module.weight], matrix))
            known[id(module)] = packing.layers[path]
        elif id(module) in known:  # one module under two names
            packing.layers[path] = known[id(module)]
    for paths in as_one:
        same_bits.multiply_as_one([modules[path] for path in paths])
    return packing


def may_be_fused(module: nn.Module) -> bool:
    """Whether a layer is packed, or multiplied by our kernel, and so may be one product with others that read the same input."""
    weight = _plain_weight(module)
    return packable(module, smallest=0) is not None or (weight is not None and same_bits.multiplies(weight))


def _kind(module: Any, smallest: int) -> object:
    """A value that is equal for layers that can be packed as one; None for a layer that is not packed."""
    kind = packable(module, smallest)
    return None if kind is None else (kind, module.weight.dtype, module.bias is None)


def _stand_in(packing: Packing, layers: dict[str, nn.Module], kind: type[nn.Module], weight: PackedWeight) -> None:
    """Turns `layers` into layers of `kind`, which multiply by `weight`, the matrices of all of them."""
    if weight not in packing.weights:
        packing.weights.append(weight)
    columns = columns_of([outputs_of(module) for module in layers.values()])
    for place, (path, module) in enumerate(layers.items()):
        packing.layers[path] = PackedLayer(module, weight, place)
        module.__class__ = kind
        vars(module).update(packed=weight.packed, packed_from=weight.sources[place].dtype)
        if len(layers) > 1:
            vars(module).update(columns=columns[place], packed_bias=weight.bias)


def packable(module: nn.Module, smallest: int) -> tuple[type[nn.Module], Callable[[Tensor], Tensor]] | None:
    """The class that replaces a plain layer, and how its weight becomes a matrix; None if the layer is not packed."""
    weight = _plain_weight(module)
    if weight is None or weight.device.type != "cpu" or weight.numel() < smallest:
        return None
    return _KINDS[type(module)] if torch_compat.packed_type(weight.dtype) is not None else None


def _few_rows_kind(module: nn.Module) -> type[nn.Module] | None:
    """The class that replaces a plain layer, or a norm, on CUDA; None if none does."""
    weight = _plain_weight(module)
    if weight is None:
        return same_bits.norm_kind(module)
    return same_bits.KINDS[type(module)] if same_bits.multiplies(weight) else None


def _few_rows_group(module: Any) -> object:
    """A value that is equal for layers that may be one product on CUDA; None for other layers."""
    return None if _plain_weight(module) is None else same_bits.product_kind(module)


def _plain_weight(module: nn.Module) -> Tensor | None:
    """The dense weight of a plain linear layer; None for other modules."""
    weight = torch_compat.own_parameters(module).get("weight")  # parametrized and pruned layers have none
    if type(module) not in _KINDS or weight is None or "forward" in vars(module):
        return None
    plain = type(weight) in (nn.Parameter, Tensor) and weight.layout == torch.strided and weight.dim() == 2
    return weight if plain else None


def _shared(sources: list[Tensor], matrix: Callable[[Tensor], Tensor], biases: Sequence[Tensor] = ()) -> PackedWeight:
    """The packed copy of `sources`, shared with others in this process that use it."""
    key = (matrix, *map(place_of, biases))
    return shared_copy(_in_use, sources, key, lambda: PackedWeight(sources, matrix, biases))


Copy = TypeVar("Copy", bound=WeightCopy)


def shared_copy(
    in_use: weakref.WeakValueDictionary[tuple, Copy], sources: Sequence[Tensor], key: tuple, make: Callable[[], Copy]
) -> Copy:
    """The copy of `sources` that is in use, else a new one by `make`. key: distinguishes different copies of the same sources."""
    key = (*key, len(sources), *map(place_of, sources))
    copy = in_use.get(key)
    # The copy keeps its parameters, and thereby their memory, unless their data have been exchanged.
    moved = copy is not None and [s.data_ptr() for s in copy.sources] != [s.data_ptr() for s in sources]
    if copy is None or copy.stale or moved:
        with torch.inference_mode(False):
            copy = in_use[key] = make()
    return copy


def place_of(tensor: Tensor) -> tuple:
    """The address of a tensor's memory, and its type and layout."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def freed_error() -> UnsupportedError:
    return UnsupportedError(
        "this model's weights were freed (setting weights='packed'), since a packed copy of them decodes. Call "
        "decoders.release(model) or decoders.disable(model) to get them back before you run, copy, change, train or save it "
        "without strategy=; the next call with strategy= frees them again unless weights='keep'"
    )


def _refuse_freed(weight: Tensor) -> None:
    if weight.stride() == (0, 0):
        raise freed_error()
