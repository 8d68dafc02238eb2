"""Results of the checks of models on a CPU, kept in a file, so that a design that has passed is not checked in every process.

The key of a verdict is a digest of what it depends on except the values of weights: the config, the code that runs, the machine. Where
that cannot be determined (hooks, a replaced ``forward``, unknown objects) nothing is kept; failed checks are not kept either.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
import types
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
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
from .attention import NAME
from .kernels import cpu
from .target import Invariance, Target
from .torch_compat import float32_precision, hooks_everywhere, hooks_of, instructions
from .weights.state import global_names
from .weights.twin import INTERNAL, OF_GENERATION, OURS, PLAIN, captured

FORMAT = 1
#: Prefix of the modules that make a target and check it, and of those below it that take no part in that.
_ROOM, _BESIDE = "decoders.engine.model.", ("decoders.engine.model.compiled.", "decoders.engine.model.recordings")
#: Most verdicts in the file; the oldest are dropped.
KEPT = 200
#: Modules whose functions are followed into what they call, as are packages that a model's modules come from. Of other functions only
#: their own code is digested, of other classes only the name: they change with the versions of their packages.
_FOLLOWED = (
    "decoders.", "transformers.models.", "transformers.masking_utils", "transformers.modeling_rope_utils", "transformers.cache_utils",
    "transformers.integrations.sdpa", "transformers.activations", "torch.nn.modules.linear",
)  # fmt: skip
#: What ``functools.cache`` makes of a function.
_CACHED = type(functools.cache(len))
#: Most bytes of buffers that are looked at.
_BUFFERS = 64 << 20


@dataclass(frozen=True)
class Verdict:
    """The result of a check that passed.

    Attributes:
        day: when, as ISO has it.
        longest: see :attr:`Target.longest`.
        invariance: see :attr:`Target.invariance`.
    """

    day: str
    longest: int | None
    invariance: Invariance | None


def path() -> Path:
    return cache_folder() / "checks.json"


def find(key: str) -> Verdict | None:
    """The verdict that is kept under `key`; None if there is none that can be read."""
    with suppress(KeyError, TypeError, ValueError):
        kept = dict(_read()[key])
        own = kept.pop("invariance")
        if own is not None:
            own = Invariance(bool(own["holds"]), tuple(map(str, own["differs"])), bool(own["single"]))
        longest = kept.pop("longest")
        return Verdict(date.fromisoformat(kept.pop("day")).isoformat(), None if longest is None else int(longest), own)
    return None


def keep(key: str, verdict: Verdict) -> None:
    """Keeps a verdict under `key`; a file that cannot be written keeps none."""
    verdicts = _read()
    verdicts.pop(key, None)
    verdicts[key] = asdict(verdict)
    latest = dict(list(verdicts.items())[-KEPT:])
    with suppress(OSError):
        write_whole(path(), json.dumps({"format": FORMAT, "verdicts": latest}, indent=1).encode())


def _read() -> dict[str, Any]:
    with suppress(OSError, ValueError, AttributeError):
        kept = json.loads(path().read_text(encoding="utf-8"))
        if kept.get("format") == FORMAT and isinstance(kept.get("verdicts"), dict):
            return dict(kept["verdicts"])
    return {}


def key_of(target: Target, model: PreTrainedModel) -> str | None:
    """The key of a verdict on `target`, made of `model`; None where every process has to check it."""
    if target.device.type != "cpu" or target.ranks.several or hooks_everywhere():
        return None
    seen = _Seen(model)
    for name in sorted(sys.modules):
        if name.startswith(_ROOM) and not name.startswith(_BESIDE):
            held = list(vars(sys.modules[name]).values())  # at once: another thread may import or compile
            seen.follow([each for each in held if _runs(each) or (isinstance(each, type) and each.__module__ == name)])
    for name in (NAME, str(attention_of(model.config))):
        seen.follow([AttentionInterface().get(name), AttentionMaskInterface().get(name)])
    seen.look(model)
    for value in (
        __version__, torch.__version__, transformers.__version__, platform.python_version(), processor_name(target.device),
        instructions(), cpu.chosen(), torch.get_num_threads(), torch.backends.mkldnn.enabled, float32_precision(target.device),
        torch.are_deterministic_algorithms_enabled(), target.dtype, target.attends, target.precision, attention_of(model.config),
    ):  # fmt: skip
        seen.note(str(value))
    return seen.digest if seen.known else None


class _Seen:
    """A digest of code and of a model, in the order in which they are looked at.

    Attributes:
        known: whether everything could be digested.
    """

    def __init__(self, model: nn.Module) -> None:
        self.known = True
        packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "transformers"}
        self._followed = _FOLLOWED, packages
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, Any] = {}  # kept, so that no other object gets an id that was seen

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def note(self, *parts: object) -> None:
        self._hash.update(repr(parts).encode())

    def look(self, model: nn.Module) -> None:
        """Digests the modules of `model` with their attributes; of parameters, all but the values."""
        bytes_left = _BUFFERS
        for name, module in model.named_modules():
            hooks = [hook for each in hooks_of(module) for hook in each.values() if not is_of_training(hook)]
            self.known = self.known and not hooks and "forward" not in vars(module)
            if not self.known:
                return
            self.note(name)
            self.follow(type(module))
            for key, parameter in module.named_parameters(recurse=False):
                self.note(key, type(parameter).__qualname__, str(parameter.dtype), parameter.shape, parameter.stride())
            for key, buffer in module.named_buffers(recurse=False):
                bytes_left -= buffer.nbytes
                self.known = self.known and bytes_left >= 0
                self.note(key)
                self._values(buffer)
            for key, value in vars(module).items():
                if key not in INTERNAL | OF_GENERATION | OF_TRAINING and not key.startswith(OURS):
                    self.note(key)
                    self._held(value)

    def follow(self, value: Any) -> None:
        """Digests what a call of `value` runs, as far as it is found by names."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            while isinstance(value, (types.MethodType, functools.partial, staticmethod, classmethod)):
                if isinstance(value, functools.partial):
                    self.note([a for a in value.args if isinstance(a, PLAIN)], sorted(value.keywords))
                value = value.func if isinstance(value, functools.partial) else value.__func__
            if isinstance(value, PLAIN):
                self.note(value if isinstance(value, (bool, int, float, str, bytes, type(None))) else str(value))
                continue
            named = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
            self.note(str(named.__module__), named.__qualname__)
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, property):
                waiting += [each for each in (value.fget, value.fset) if each is not None]
            elif isinstance(value, functools.cached_property):
                waiting.append(value.func)
            elif isinstance(value, _CACHED):
                waiting.append(value.__wrapped__)
            elif isinstance(value, types.FunctionType):
                self._hash.update(_digest(value.__code__))
                waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *captured(value)]
                if self._follows(value.__module__):
                    waiting += _named(value)
            elif isinstance(value, type) and self._follows(value.__module__):
                waiting += [base for base in value.__mro__[1:] if self._follows(base.__module__)]
                waiting += [each for each in list(vars(value).values()) if _runs(each) or isinstance(each, PLAIN)]
            elif isinstance(value, type) and issubclass(value, nn.Module):
                waiting.append(value.forward)
            elif isinstance(value, (tuple, list)) and len(value) <= 500:
                waiting += value
            elif is_dataclass(value):
                self.note(repr(value))
            elif isinstance(value, dict) and len(value) <= 500:
                waiting += [each for each in value.values() if _runs(each) or isinstance(each, (type, *PLAIN))]

    def _follows(self, module: str | None) -> bool:
        prefixes, packages = self._followed
        return module is not None and (module.startswith(prefixes) or module.partition(".")[0] in packages)

    def _held(self, value: Any, depth: int = 4) -> None:
        """Digests the value of a module's attribute."""
        if isinstance(value, PreTrainedConfig):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                entries = {name: each for name, each in value.to_dict().items() if name not in NO_PART_OF_NETWORK}
                self.note(json.dumps(entries, sort_keys=True, default=str))
        elif isinstance(value, Tensor):
            self._values(value)
        elif isinstance(value, (list, tuple, set, frozenset)) and depth:
            self.note(type(value).__qualname__, len(value))
            for each in sorted(value, key=str) if isinstance(value, (set, frozenset)) else value:
                self._held(each, depth - 1)
        elif isinstance(value, dict) and depth:
            for key, each in value.items():
                self.note(str(key))
                self._held(each, depth - 1)
        elif isinstance(value, nn.Module) or _runs(value) or isinstance(value, (type, *PLAIN)):
            self.follow(type(value) if isinstance(value, nn.Module) else value)
        else:
            self.known = False

    def _values(self, tensor: Tensor) -> None:
        self.note(str(tensor.dtype), tensor.shape)
        if tensor.device.type != "cpu" or type(tensor) not in (Tensor, nn.Parameter) or tensor.nbytes > _BUFFERS:
            self.known = False
        else:
            self._hash.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _runs(value: Any) -> bool:
    kinds = (
        types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property,
        functools.cached_property, _CACHED,
    )  # fmt: skip
    return isinstance(value, kinds)


def _named(function: types.FunctionType) -> list[Any]:
    """The values of the globals that a function names; of modules among them, those of the attributes that it names."""
    names = dict.fromkeys(global_names(function.__code__))
    held = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [each for each in held if isinstance(each, types.ModuleType)]
    held = [each for each in held if not isinstance(each, types.ModuleType)]
    return [*held, *(vars(module)[name] for module in modules for name in names if name in vars(module))]


@functools.lru_cache(None)
def _digest(code: types.CodeType) -> bytes:
    """A digest of a function's code that does not depend on its place in the file."""
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(repr((code.co_code, code.co_names, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            hashed.update(_digest(constant))
        else:  # sets are listed in another order in every process
            hashed.update(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode())
    return hashed.digest()
