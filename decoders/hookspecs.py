"""Every hook there is. A plugin is a module (or object) with functions marked ``@decoders.hookimpl``.

Third-party distributions expose theirs through the entry-point group ``decoders``; the built-ins register through
the very same hooks.
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
    """Strategy classes that this plugin provides.

    Called once, when the registry is first used. Names must be unique among all plugins: a name that two plugins claim
    belongs to neither until one of them is blocked.
    """


@hookspec
def decoders_verifiers() -> Iterable[type[Verifier]]:  # type: ignore[empty-body]
    """Verifier classes that this plugin provides.

    Subclasses of :class:`decoders.Verifier` with a ``snake_case`` name, made without arguments, that pass
    :func:`decoders.testing.check_verifier`. Called once. The rules for names are those of strategies; verifiers have a
    namespace of their own: a verifier may be called like a strategy.
    """


@hookspec
def decoders_grammar_backends() -> Iterable[type[Backend]]:  # type: ignore[empty-body]
    """Grammar backends that this plugin provides.

    Subclasses of :class:`decoders.constraints.base.Backend` with a ``snake_case`` name, made without arguments, that
    pass :func:`decoders.testing.check_backend`. Called once. The rules for names are those of strategies; backends have a
    namespace of their own. A specification takes one with ``backend="name"``.
    """


@hookspec
def decoders_grammars() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Grammars that this plugin provides, by ``snake_case`` name: ``generate(grammar="name")`` takes them.

    A value is anything else that ``grammar=`` takes (``decoders.json_schema(…)``, ``regex``, ``grammar``, a type, a path), or a
    function without arguments that makes it on first use. Called once. The rules for names are those of strategies; grammars
    have a namespace of their own. The library of this package keeps its names.
    """


@hookspec
def decoders_grammar_types() -> Mapping[type | str, Callable[[Any], Any]]:  # type: ignore[empty-body]
    """Types of objects that ``generate(grammar=…)`` is to take, each with the function that makes a grammar of such an object.

    A key is a type, or its full name, ``"my_package.Form"``, which need not be imported for that. It holds for objects of derived
    types; for classes that are given themselves it is their metaclass. A function returns anything else that ``grammar=`` takes. Called
    once. A type that two plugins claim belongs to neither until one of them is blocked; this package keeps its types.
    """


@hookspec
def decoders_observers() -> Iterable[type[Observer]]:  # type: ignore[empty-body]
    """Observers that this plugin provides, which are called when a call starts, after every step, and when it ends.

    Subclasses of :class:`decoders.Observer` with a ``snake_case`` name, made once without arguments. Called once. The rules for
    names are those of strategies; observers have a namespace of their own. Where no plugin has one, calls pay nothing.
    """


@hookspec
def decoders_commands() -> Mapping[str, Callable[..., None]]:  # type: ignore[empty-body]
    """Commands that this plugin adds to ``decoders``, by name: ``"weigh"``, or ``"bench weigh"`` in a group, one of this package or the
    plugin's own.

    A value is a Typer function: its parameters are the arguments and options, its docstring is the help. It should import what it
    needs in its body, because ``decoders --help`` reads every function. Called once. A command of this package
    keeps its name; a name that two plugins claim belongs to neither until one of them is blocked. A function that Typer
    cannot read is listed by ``decoders plugins`` and ``decoders doctor``, and the other commands work.
    """
