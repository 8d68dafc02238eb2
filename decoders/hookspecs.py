"""The specifications of all hooks. A plugin is a module or object with functions marked ``@decoders.hookimpl``.

Distributions register plugins in the entry-point group ``decoders``. The built-in strategies, verifiers and so on use the same hooks.
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
    """Returns the strategy classes of the plugin. Called once, when the registry is first used.

    Names must be unique among all plugins. If two plugins claim a name, neither gets it until one of them is blocked. The names of
    this package's strategies cannot be taken.
    """


@hookspec
def decoders_verifiers() -> Iterable[type[Verifier]]:  # type: ignore[empty-body]
    """Returns the verifier classes of the plugin. Called once.

    Each is a subclass of :class:`decoders.Verifier` with a ``snake_case`` name, is created without arguments, and passes
    :func:`decoders.testing.check_verifier`. The rules for names are the same as for strategies. A verifier may have the name of a
    strategy.
    """


@hookspec
def decoders_grammar_backends() -> Iterable[type[Backend]]:  # type: ignore[empty-body]
    """Returns the grammar backends of the plugin. Called once.

    Each is a subclass of :class:`decoders.constraints.base.Backend` with a ``snake_case`` name, is created without arguments, and
    passes :func:`decoders.testing.check_backend`. The rules for names are the same as for strategies, but backends have their own
    namespace. A grammar specification chooses a backend with ``backend="name"``.
    """


@hookspec
def decoders_grammars() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Returns the grammars of the plugin, by ``snake_case`` name, for ``generate(grammar="name")``. Called once.

    A value is anything that ``grammar=`` takes except a name: ``decoders.json_schema(…)``, ``regex``, ``grammar``, a type, a path. It
    may also be a function without arguments that returns such a value. The function is called on first use. The rules for names are
    the same as for strategies, but grammars have their own namespace. The names of this package's grammars cannot be taken.
    """


@hookspec
def decoders_grammar_types() -> Mapping[type | str, Callable[[Any], Any]]:  # type: ignore[empty-body]
    """Returns types of objects that ``generate(grammar=…)`` shall accept, each with a function that converts such an object.

    A key is a type, or its full name such as ``"my_package.Form"``, so that the plugin need not import the type. A key also covers
    objects of derived types. To accept classes, use their metaclass as the key. The function returns a value of a kind that
    ``grammar=`` already takes. Called once. If two plugins claim a type, neither gets it until one of them is blocked. The types of
    this package, and Python's own types such as ``dict`` and ``type``, cannot be claimed.
    """


@hookspec
def decoders_observers() -> Iterable[type[Observer]]:  # type: ignore[empty-body]
    """Returns the observer classes of the plugin. Called once.

    The methods of an observer are called at the start of a call, after every step, and at the end of the call. Each class is a
    subclass of :class:`decoders.Observer` with a ``snake_case`` name, and is created once, without arguments. The rules for names are
    the same as for strategies, but observers have their own namespace. Without observers, calls lose no time.
    """


@hookspec
def decoders_commands() -> Mapping[str, Callable[..., None]]:  # type: ignore[empty-body]
    """Returns commands that the plugin adds to ``decoders``, by name. Called once.

    A name is one word, such as ``"weigh"``, or a group and a word, such as ``"bench weigh"``. The group may be a group of this package
    or a new one. A value is a Typer function: its parameters are the arguments and options, its docstring is the help. The function
    should import modules in its body, because ``decoders --help`` inspects every function. The names of this package's commands cannot
    be taken. If two plugins claim a name, neither gets it until one of them is blocked. If Typer cannot inspect a function,
    ``decoders plugins`` and ``decoders doctor`` report it, and all other commands still work.
    """
