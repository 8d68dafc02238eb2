"""All hooks. A plugin is a module (or object) with functions marked ``@decoders.hookimpl``.

Distributions register plugins in the entry-point group ``decoders``; the built-ins use the same hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from .constraints import Backend
    from .report import Observer
    from .strategy import Strategy
    from .verifiers.verifier import Verifier

#: Entry-point group and pluggy project name.
PROJECT = "decoders"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def decoders_strategies() -> Iterable[type[Strategy]]:  # type: ignore[empty-body]
    """Strategy classes of the plugin. Called once, when the registry is first used.

    Names must be unique among all plugins: if two plugins claim a name, neither gets it until one of them is blocked. This package's
    strategies keep their names.
    """


@hookspec
def decoders_verifiers() -> Iterable[type[Verifier]]:  # type: ignore[empty-body]
    """Verifier classes of the plugin. Called once.

    Each is a subclass of :class:`decoders.Verifier` with a ``snake_case`` name, is created without arguments, and passes
    :func:`decoders.testing.check_verifier`. The rules for names are the same as for strategies; a verifier may have the name of a
    strategy.
    """


@hookspec
def decoders_grammar_backends() -> Iterable[type[Backend]]:  # type: ignore[empty-body]
    """Grammar backends of the plugin. Called once.

    Each is a subclass of :class:`decoders.constraints.base.Backend` with a ``snake_case`` name, is created without arguments and passes
    :func:`decoders.testing.check_backend`. The rules for names are the same as for strategies, in a separate namespace. A
    specification chooses a backend with ``backend="name"``.
    """


@hookspec
def decoders_grammars() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Grammars of the plugin, by ``snake_case`` name, for ``generate(grammar="name")``. Called once.

    A value is what ``grammar=`` takes (``decoders.json_schema(…)``, ``regex``, ``grammar``, a type, a path), but not a name; or it is a
    function without arguments that is called on first use and returns such a value. The rules for names are the same as for strategies,
    in a separate namespace. Names of this package's own grammars cannot be taken.
    """


@hookspec
def decoders_grammar_types() -> Mapping[type | str, Callable[[Any], Any]]:  # type: ignore[empty-body]
    """Types of objects that ``generate(grammar=…)`` is to accept, each with a function that turns an object of the type into a grammar.

    A key is a type, or its full name, ``"my_package.Form"``, so that the plugin need not import the type. A key also covers objects of
    derived types. If ``grammar=`` is to take classes, the key is their metaclass. The function returns another value that ``grammar=``
    takes. Called once. If two plugins claim a type, neither gets it until one of them is blocked; this package keeps its types.
    Python's own types, such as ``dict`` and ``type``, cannot be claimed.
    """


@hookspec
def decoders_observers() -> Iterable[type[Observer]]:  # type: ignore[empty-body]
    """Observer classes of the plugin; their methods are called at the start of a call, after every step, and at its end. Called once.

    Each is a subclass of :class:`decoders.Observer` with a ``snake_case`` name, and is created once, without arguments. The rules
    for names are the same as for strategies, in a separate namespace. Without observers, calls lose no time.
    """


@hookspec
def decoders_commands() -> Mapping[str, Callable[..., None]]:  # type: ignore[empty-body]
    """Commands that this plugin adds to ``decoders``, by name: ``"weigh"``, or ``"bench weigh"`` for a command in a group. The group
    may be a group of this package or a new one.

    A value is a Typer function: its parameters are the arguments and options, its docstring is the help. It should import modules
    in its body, because ``decoders --help`` inspects every function. Called once. This package's commands keep their names; if two
    plugins claim a name, neither gets it until one of them is blocked. If Typer cannot inspect a function, both
    ``decoders plugins`` and ``decoders doctor`` report it, and all other commands still work.
    """
