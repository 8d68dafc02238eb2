"""Detects changes of a model between two calls: changed weights, modules, attributes of modules, hooks, and config.

The loop reads the model's own weights, so changed weights take effect immediately. What depends on old weights must be dropped: keys
and values of earlier texts, quantized copies, and compiled code and CUDA graphs that contain values or addresses.
"""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ....common.transformers_compat import NO_PART_OF_NETWORK, OF_TRAINING, is_of_training
from ..modules_compat import buffers_in, hooks_everywhere, hooks_of, modules_in, parameters_in, writes_counted
from ..rope import has_varying_table
from ..torch_compat import local_part, with_parts
from .twin import INTERNAL, OF_GENERATION, OURS, PLAIN, captured

#: Attributes that are not part of a model's state.
_LEFT_OUT = INTERNAL | OF_GENERATION | OF_TRAINING
_CONTAINERS = (list, tuple, set, frozenset, dict)
#: Depth to which containers are searched, and greatest number of entries of a container that is searched.
_DEPTH, _ENTRIES = 4, 1000
#: Hooks of these packages do not read values that a user sets.
_LIBRARIES = {"torch", "transformers", "accelerate", "peft", "decoders"}
#: Changes are detected by a sample of each tensor: on the CPU _STRETCHES stretches of _BYTES bytes (a cache line), including the first
#: and last bytes; on other devices about _SAMPLED entries.
_STRETCHES, _BYTES, _SAMPLED = 4, 64, 64


@dataclass(frozen=True)
class WeightState:
    """A model's weights and modules at one time.

    Attributes:
        modules: changes when a weight is replaced by another tensor, resized, cast or stored in another way; when a module is replaced,
            or gets a hook, another mode or another ``forward``; when a plain attribute of a module or a value of a config is set.
        contents: changes with the entries of dicts, lists and sets that modules hold, and with a plain value that a hook reads.
        values: changes when a weight, or a tensor that a hook reads, is written in place or moves to other memory.
    """

    modules: tuple[object, ...]
    contents: tuple[object, ...]
    values: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        parts = modules_in(model)
        # Some rotary modules rewrite their table for each text's length. This counts as no change: our copy has its own tables.
        fixed = [part for part in parts if not has_varying_table(part)]
        tensors: list[Tensor] = [*parameters_in(parts), *buffers_in(fixed)]
        kinds: dict[Any, None] = dict.fromkeys(map(type, parts))
        modules: list[object] = [*hooks_everywhere(), *(kind.forward for kind in kinds)]
        contents: list[object] = []
        read: list[Tensor] = []
        configs: dict[int, PreTrainedConfig] = {}
        for part in parts:
            modules.append(id(part))
            for hooks in hooks_of(part):
                for number, hook in hooks.items():
                    if not is_of_training(hook):
                        modules.append(number)
                        for value in _read_by(hook):
                            read.append(value) if isinstance(value, Tensor) else contents.append(value)
        for part in fixed:
            for name, value in vars(part).items():
                if name in _LEFT_OUT or name.startswith(OURS):
                    continue
                if (kind := type(value)) in _PLAIN:
                    modules.append(value)
                    continue
                modules.append(id(value))
                if issubclass(kind, Tensor):
                    tensors.append(value)
                elif issubclass(kind, _CONTAINERS):
                    contents.append(content(value))
                elif issubclass(kind, PreTrainedConfig):
                    configs[id(value)] = value
        tensors = with_parts(tensors)
        modules += [(id(t), t.dtype, t.device, t.shape, strides_of(t)) for t in tensors]
        modules += map(content, configs.values())
        return cls(tuple(modules), tuple(contents), values_of((*tensors, *read)))

    @property
    def places(self) -> list[int]:
        """The addresses of the tensors."""
        return [place for place, _ in self.values[0]]  # type: ignore[attr-defined]


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor, on which compiled code depends; an empty tuple for other tensors."""
    return tensor.stride() if tensor.layout == torch.strided else ()


def values_of(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """A key that changes when any of `tensors` moves to other memory or is written. PyTorch's counter shows writes; samples of the
    contents show writes that the counter misses (through ``.data``, through numpy, in inference mode).
    """
    own = [local_part(tensor) for tensor in with_parts(tensors)]
    host: list[object] = []
    elsewhere: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in own:
        if (
            type(tensor) not in (nn.Parameter, nn.Buffer, Tensor)
            or tensor.layout != torch.strided
            or not tensor.numel()
        ):
            continue
        if tensor.device.type in _READABLE:
            host.append(_sample(tensor))
        elif not tensor.is_meta and (bits := _BITS.get(tensor.element_size())) is not None:
            span = _span(tensor)
            step = span // _SAMPLED + 1
            entries = tensor.detach().view(bits).as_strided((span // step,), (step,))
            elsewhere.setdefault((tensor.device, bits), []).append(entries)
    # One copy to the host per device and size of entries, because each copy waits for the device.
    copied = [torch.cat(entries).tolist() for entries in elsewhere.values()]
    return [(tensor.data_ptr(), writes_counted(tensor)) for tensor in own], host, copied


#: Devices whose memory the host reads directly.
_READABLE = {"cpu"}
#: Maps the size of an entry to the integer dtype in which entries are compared: NaNs then equal themselves, and signed zeros differ.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sample(tensor: Tensor) -> object:
    place, size = tensor.data_ptr(), tensor.nbytes if tensor.is_contiguous() else _span(tensor) * tensor.element_size()
    if not place:  # the tensor's memory was released
        return None
    if size <= _STRETCHES * _BYTES:
        return ctypes.string_at(place, size)
    step = size - _BYTES
    return [ctypes.string_at(place + step * n // (_STRETCHES - 1), _BYTES) for n in range(_STRETCHES)]


def _span(tensor: Tensor) -> int:
    """The number of entries from the first to the last entry of a strided tensor, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


#: :data:`PLAIN` as a set, to compare exact types, because ``isinstance`` with a config is slow.
_PLAIN = frozenset(PLAIN)


def content(value: Any, depth: int = _DEPTH) -> object:
    """A key that changes when an entry of a container or a value of a config changes, in `value` or inside it.

    It is computed before every call, so it makes no copies and does not call ``to_dict``.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if not depth:
        return id(value)
    if issubclass(kind, PreTrainedConfig):
        left_out = NO_PART_OF_NETWORK
        return tuple([(n, content(v, depth - 1)) for n, v in vars(value).items() if n not in left_out])
    if not issubclass(kind, _CONTAINERS) or len(value) > _ENTRIES:
        return id(value)
    if issubclass(kind, dict):
        return tuple([(key if type(key) in _PLAIN else id(key), content(v, depth - 1)) for key, v in value.items()])
    if issubclass(kind, (set, frozenset)):
        return frozenset([content(v, 0) for v in value])
    return tuple([content(v, depth - 1) for v in value])


def _read_by(hook: Any) -> Iterator[object]:
    """Yields the plain values and tensors that a user's hook can read: in its closure, its defaults, its globals and the attributes of
    its object. From dicts among these, it yields plain values only.
    """
    held: list[Any] = []
    while isinstance(hook, functools.partial):
        held += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    held += getattr(getattr(hook, "__self__", hook), "__dict__", {}).values()
    if isinstance(function, types.FunctionType):
        if function.__module__.partition(".")[0] in _LIBRARIES:
            return
        named = [function.__globals__.get(name) for name in global_names(function.__code__)]
        held += [*captured(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *named]
    for value in held:
        if isinstance(value, dict):
            yield from (entry for entry in value.values() if isinstance(entry, PLAIN))
        elif isinstance(value, (*PLAIN, Tensor)):
            yield value


def global_names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)
