"""Names that have moved: the old ones work until the next version, with a warning that tells the new one."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

T = TypeVar("T")

#: Modules by their old names.
MODULES = {
    "decoders.engine.sampling": "decoders.sampling",
    "decoders.grammars": "decoders.hf.grammars",
    "decoders.library": "decoders.constraints.library",
    "decoders.medusa.calibration": "decoders.medusa.hidden_states",
    "decoders.resolve": "decoders.plugins",
    "decoders.verifier": "decoders.verifiers",
}


def renamed(owner: str, old: str, new: str) -> property:
    """A read-only attribute `old` of the class `owner`, which is called `new` now."""

    def read(self: Any) -> Any:
        warn(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(read, doc=f"Old name of ``{new}``.")


def renamed_keyword(old: str, new: str) -> Callable[[type[T]], type[T]]:
    """Lets a class be made with the keyword `old`, which is called `new` now."""

    def decorate(cls: type[T]) -> type[T]:
        usual = cls.__init__

        @functools.wraps(usual)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            if old in kwargs:
                warn(f"{cls.__name__}({old}=…)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            usual(self, *args, **kwargs)

        setattr(cls, "__init__", init)  # noqa: B010  (to mypy no signature is another)
        return cls

    return decorate


def moved(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of `module`, whose `names` live in the modules named beside them now."""

    def getattr_of_module(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", f"{names[name]}.{name}")
        return getattr(importlib.import_module(names[name]), name)

    return getattr_of_module


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Says that `old` goes in the next version, and that `new` is it."""
    warnings.warn(f"{old} goes in the next version: use {new}", FutureWarning, stacklevel=stacklevel)


class MovedModules:
    """Imports :data:`MODULES` by their old names. (A subclass of importlib.abc's would double the time of ``import decoders``.)"""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, cast(Any, self)) if name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warn(spec.name, MODULES[spec.name])
        return ModuleType(spec.name, f"Moved to {MODULES[spec.name]}.")

    def exec_module(self, module: ModuleType) -> None:
        moved = importlib.import_module(MODULES[module.__name__])
        module.__dict__.update({name: value for name, value in vars(moved).items() if not name.startswith("__")})
        if "__getattr__" in vars(moved):  # older names of what it holds
            module.__dict__["__getattr__"] = vars(moved)["__getattr__"]


def install() -> None:
    """Makes the old names of modules importable; doing it again changes nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
