"""Every hook there is. A plugin is a module (or object) with functions marked ``@decoders.hookimpl``.

Third-party distributions expose theirs through the entry-point group ``decoders``; the built-in strategies register
through the very same hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .strategy import Strategy

#: Entry-point group and pluggy project name.
PROJECT = "decoders"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def decoders_strategies() -> Iterable[type[Strategy]]:  # type: ignore[empty-body]
    """Strategy classes that this plugin provides.

    Called once, when strategies are first listed or named. Names must be unique among all plugins: a name that two
    plugins claim belongs to neither until one of them is blocked.
    """
