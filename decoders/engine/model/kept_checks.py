"""Stores the results of passed checks on a CPU in files, so that later processes need not check the same architecture again.

A file is named by a hash of what the check depends on: the config, the modules with their plain attributes, the files of code, the
versions and the machine. The values of weights play no role. Only results for unmodified models of transformers are stored. A model
counts as modified if a module comes from another package, has hooks or a replaced ``forward``, or holds unknown objects.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ...common.devices import processor_name
from ...common.files import cache_folder, write_whole
from ...common.transformers_compat import NO_PART_OF_NETWORK, OF_TRAINING, attention_of, is_of_training
from ...common.version import __version__
from .attention import configs_within
from .facts import Invariance
from .kernels import cpu
from .modules_compat import hooks_everywhere, hooks_of
from .target import Target
from .torch_compat import float32_precision, instructions
from .weights.twin import INTERNAL, OF_GENERATION, OURS, PLAIN

#: Greatest number of bytes of a buffer that is hashed. The check of a model with a larger buffer is not stored.
_BUFFER = 64 << 20
#: The code of these packages is identified by their version and files.
_LIBRARIES = {"torch", "transformers", "decoders", "accelerate", "safetensors", "huggingface_hub"}
#: Attributes of modules that no check depends on, because they are not part of a model's design.
_LEFT_OUT = INTERNAL | OF_GENERATION | OF_TRAINING


@dataclass(frozen=True)
class KeptCheck:
    """The result of a check that passed.

    Attributes:
        day: ISO date of the check.
        longest: greatest length of text for which the check is valid; None for any length.
        invariance: whether a node has the same bits in every block; None in float32.
    """

    day: str
    longest: int | None
    invariance: Invariance | None


def folder() -> Path:
    return cache_folder() / "checks"


def find(key: str) -> KeptCheck | None:
    """The result that was stored under `key`; None if there is no readable file."""
    with suppress(OSError, KeyError, TypeError, ValueError):
        kept = json.loads((folder() / f"{key}.json").read_text(encoding="utf-8"))
        own, longest = kept["invariance"], kept["longest"]
        if own is not None:
            own = Invariance(bool(own["holds"]), tuple(map(str, own["differs"])), bool(own["single"]))
        return KeptCheck(date.fromisoformat(kept["day"]).isoformat(), None if longest is None else int(longest), own)
    return None


def keep(key: str, check: KeptCheck) -> None:
    """Stores `check` under `key`, if the folder can be written."""
    with suppress(OSError):
        write_whole(folder() / f"{key}.json", json.dumps(asdict(check)).encode())


def key_of(target: Target, model: PreTrainedModel) -> str | None:
    """The key for the check of `target`, a target of `model`; None if the check must not be stored."""
    if target.device.type != "cpu" or target.ranks.several or hooks_everywhere():
        return None
    try:
        parts = [*_surroundings(target), *_design(model)]
    except _UnknownError:
        return None
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class _UnknownError(Exception):
    """Raised if something that a check depends on has no stable hash."""


def _surroundings(target: Target) -> Iterator[object]:
    yield from (__version__, torch.__version__, transformers.__version__, platform.python_version())
    yield from (processor_name(target.device), instructions(), str(cpu.chosen()), torch.get_num_threads())
    yield from (torch.backends.mkldnn.enabled, float32_precision(target.device), target.rounds)
    yield from (torch.are_deterministic_algorithms_enabled(), target.dtype, target.attends, target.precision)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        yield path.name, *_stamp(path)


def _design(model: nn.Module) -> Iterator[object]:
    """Yields, for every module of `model`, its code, its attributes, and the dtypes and shapes of its parameters; then the configs."""
    kinds = dict.fromkeys(map(type, model.modules()))
    for kind in kinds:
        yield from _code(kind)
    configs: dict[int, PreTrainedConfig] = {}
    for name, module in model.named_modules():
        hooked = any(not is_of_training(hook) for hooks in hooks_of(module) for hook in hooks.values())
        if hooked or "forward" in vars(module):
            raise _UnknownError
        yield name, type(module).__qualname__
        for key, parameter in module.named_parameters(recurse=False):
            yield key, type(parameter).__qualname__, parameter.dtype, parameter.shape, parameter.stride()
        for key, buffer in module.named_buffers(recurse=False):
            yield key, _held(buffer)
        for key, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            elif key not in _LEFT_OUT and not key.startswith(OURS):
                yield key, _held(value)
    for config in configs_within(list(configs.values())):
        attention = str(attention_of(config))
        yield attention, *(_held(each.get(attention)) for each in (AttentionInterface(), AttentionMaskInterface()))
        yield _held({n: value for n, value in config.to_dict().items() if n not in NO_PART_OF_NETWORK})


def _code(kind: type[nn.Module]) -> Iterator[object]:
    """Yields what identifies the code of the class `kind`: its Python module, and the time and size of the module's file.

    Raises:
        _UnknownError: the module is not from :data:`_LIBRARIES`, or another package has replaced one of its functions.
    """
    file = sys.modules.get(kind.__module__)
    if kind.__module__.partition(".")[0] not in _LIBRARIES or file is None or file.__file__ is None:
        raise _UnknownError
    held = list(vars(file).values())  # a copy, because another thread may import a module during the loop
    for value in (kind.forward, *held):
        if isinstance(value, types.FunctionType) and not _of_library(value):
            raise _UnknownError
    yield kind.__module__, *_stamp(Path(file.__file__))


def _stamp(path: Path) -> tuple[int, int]:
    """The modification time and size of a file."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size


def _of_library(function: types.FunctionType) -> bool:
    package = str(function.__globals__.get("__name__")).partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


def _held(value: Any, depth: int = 4) -> object:
    """What the hash uses for `value`, an attribute of a module: an object whose ``repr`` is the same in every process."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.device.type == "cpu"
        if not plain or value.nbytes > _BUFFER:
            raise _UnknownError
        bits = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
        return value.dtype, value.shape, hashlib.blake2b(bits.tobytes()).hexdigest()
    if isinstance(value, dict) and depth:
        return [(str(key), _held(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        return [
            _held(each, depth - 1) for each in (value if isinstance(value, (list, tuple)) else sorted(value, key=str))
        ]
    if isinstance(value, functools.partial):
        return [_held(each, depth - 1) for each in (value.func, value.args, value.keywords)]
    function = getattr(value, "__func__", value)  # a method's function
    named = isinstance(value, (type, nn.Module, types.BuiltinFunctionType))
    if named or (isinstance(function, types.FunctionType) and _of_library(function)):
        return getattr(value, "__qualname__", type(value).__qualname__)
    raise _UnknownError
