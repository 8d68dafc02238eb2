"""Our copy of a model (a "twin") with the same weights; and a twin with only the model's first layers."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from ....common.transformers_compat import SET_BY_GENERATE, decoder_layers
from ....errors import SettingsError, UnsupportedError, amount
from ..torch_compat import uncompiled

#: Names of the attributes that every module has.
INTERNAL = frozenset(vars(nn.Module()))
#: Attributes that ``generate`` sets, which are not part of the network.
OF_GENERATION = SET_BY_GENERATE | {"generate", "__getstate__", "generation_config"}
#: Prefix of attributes that this package sets.
OURS = "decoders_"
#: Types of values that hold no other objects.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
#: Depth to which nested containers are searched, and depth to which other objects in a closure are searched.
DEPTH, HELPERS = 6, 3

Tree = TypeVar("Tree", bound=nn.Module)


def share_weights(model: Tree, quantized: Sequence[Tensor] = ()) -> Tree:
    """A copy of the modules of `model` with a separate config, in evaluation mode. All other objects are shared, so that later writes
    take effect in both: parameters, buffers, `quantized` weights, and attributes of modules (tensors, dicts, other objects).
    """
    twin = _Twin(model, quantized).of(model)
    # Attributes that tools have set on the model object (generate, locks) are not part of the network.
    for name in [name for name in vars(twin) if name in OF_GENERATION or name.startswith(OURS)]:
        del vars(twin)[name]
    if "rope_deltas" in vars(model):  # Qwen 2.5 Omni reads the attribute in transformers 5.17
        vars(twin)["rope_deltas"] = None
    # In a trainer, accelerate wraps `forward` for autocast. The loop computes in the model's own precision, so the wrapper is removed.
    if (forward := vars(twin).pop("_original_forward", None)) is not None:
        vars(twin)["forward"] = forward
    return twin.eval()


class _Twin:
    """Copies modules. Containers are copied only if they hold modules, configs or bound methods of the model."""

    def __init__(self, model: nn.Module, quantized: Sequence[Tensor]) -> None:
        self.own = {id(module) for module in model.modules()}
        self.memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers(), *quantized)}

    def of(self, value: Any) -> Any:
        """The twin's counterpart of `value`; `value` itself if the model and the twin share it."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, nn.Module) and id(value) in self.own:
            return self._module(value)
        if isinstance(value, PreTrainedConfig):
            return copy.deepcopy(value, self.memo)
        if isinstance(value, types.MethodType):
            touches = self._touches(value) or self._touches(value.__func__)
            return types.MethodType(self.of(value.__func__), self.of(value.__self__)) if touches else value
        if isinstance(value, types.FunctionType) and self._touches(value):
            original = uncompiled(value)  # without torch.compile, because the loop will compile the twin
            return self._function(value) if original is value else self.of(original)
        if isinstance(value, functools.partial) and self._touches(value):
            partial = functools.partial(self.of(value.func), *map(self.of, value.args), **self._values(value.keywords))
            vars(partial).update(self._values(vars(value)))
            return partial
        if isinstance(value, (list, tuple, set, dict)) and self._touches(value):
            return self._container(value)
        if isinstance(value, RemovableHandle):
            return self._handle(value)
        return value

    def _handle(self, handle: RemovableHandle) -> RemovableHandle:
        """The twin's handle of a hook. It removes the hook from the twin, not from the model."""
        hooks = self.memo.get(id(handle.hooks_dict_ref()))
        if hooks is None:
            return handle
        twin = copy.copy(handle)
        twin.hooks_dict_ref = weakref.ref(hooks)
        return twin

    def _module(self, module: nn.Module) -> nn.Module:
        twin = module.__class__.__new__(module.__class__)
        self.memo[id(module)] = twin
        for name, value in list(vars(module).items()):
            internal = name in INTERNAL and isinstance(value, (dict, set))
            vars(twin)[name] = self._container(value) if internal else self.of(value)
            if internal and name.endswith("_hooks"):
                self.memo[id(value)] = vars(twin)[name]
        return twin

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """The twin's copy of a function whose closure holds parts of the model, for example a ``forward`` of tensor parallelism."""
        cells = [types.CellType() for _ in function.__closure__ or ()]
        twin = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        vars(twin).update(vars(function))
        self.memo[id(function)] = twin  # a closure may hold its own function
        for cell, held in zip(cells, function.__closure__ or (), strict=True):
            if held != _EMPTY:
                cell.cell_contents = self._of_captured(held.cell_contents)
        return twin

    def _of_captured(self, value: Any, depth: int = HELPERS) -> Any:
        """The twin's counterpart of a value in a closure. Unlike :meth:`of`, copies any object that holds a part of the model."""
        if not self._holds_part(value, depth):
            return self.of(value)
        twin = object.__new__(type(value))  # because accelerate's wrapper of a forward cannot be copied by copy.copy
        vars(twin).update({name: self._of_captured(held, depth - 1) for name, held in vars(value).items()})
        return twin

    def _holds_part(self, value: Any, depth: int, within: int = DEPTH) -> bool:
        """Whether an attribute of `value` holds a part of the model. False for types that :meth:`of` copies or shares by itself.

        depth: levels of such objects that are searched; within: levels of containers and functions.
        """
        plain = isinstance(value, (*PLAIN, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType))
        if depth == 0 or plain or isinstance(value, (nn.Module, PreTrainedConfig, functools.partial)):
            return False
        held = getattr(value, "__dict__", {}).values()
        return any(self._touches(entry, within) or self._holds_part(entry, depth - 1, within) for entry in held)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            copied = copy.copy(value)
            copied.update((key, self.of(entry)) for key, entry in value.items())
            return copied
        entries = map(self.of, value)
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)

    def _values(self, value: dict[str, Any]) -> dict[str, Any]:
        return {key: self.of(entry) for key, entry in value.items()}

    def _touches(self, value: Any, depth: int = DEPTH) -> bool:
        """Whether `value` holds a part of the model that the twin copies."""
        if isinstance(value, nn.Module):
            return id(value) in self.own
        if isinstance(value, PreTrainedConfig):
            return True
        if depth == 0 or isinstance(value, PLAIN):
            return False
        if isinstance(value, types.MethodType):
            return self._touches(value.__self__, depth - 1)
        if isinstance(value, types.FunctionType):
            held = [*captured(value)]
            within = depth - 1
            return any(
                self._touches(each, within) or self._holds_part(each, min(within, HELPERS), within) for each in held
            )
        if isinstance(value, functools.partial):
            return any(self._touches(v, depth - 1) for v in (value.func, *value.args, *value.keywords.values()))
        if isinstance(value, dict):
            return any(self._touches(entry, depth - 1) for entry in value.values())
        return isinstance(value, (list, tuple, set)) and any(self._touches(entry, depth - 1) for entry in value)


#: An empty cell of a closure. It equals only other empty cells.
_EMPTY = types.CellType()


def captured(function: types.FunctionType) -> Iterator[Any]:
    """The values in the closure of a function."""
    return (cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A twin with the first `count` decoder layers of `model`, followed by the model's last norm and output head.

    Raises:
        UnsupportedError: the model's decoder layers were not found.
        SettingsError: `count` is less than 1, or the model does not have more than `count` layers.
    """
    name, twin = type(model).__name__, share_weights(model)
    layers = decoder_layers(twin)
    if not layers:
        raise UnsupportedError(f"{name} has no list of decoder layers, so it cannot stop after its first layers")
    if not 0 < count < len(layers):
        way = f"can stop after layer 1 … {len(layers) - 1}, not {count}" if len(layers) > 1 else "cannot stop early"
        raise SettingsError(f"{name} has {amount(len(layers), 'layer')} and {way}")
    for module in twin.modules():
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            del module[count:]
    # Only the whole model's config gets the new number. Modules use their own config to split tables with a part per layer (Gemma 4).
    twin.config = copy.deepcopy(twin.config)
    twin.config.get_text_config(decoder=True).num_hidden_layers = count
    return twin
