"""Plugins: the strategies, verifiers and grammar backends of this process, the built-in ones and those that are installed.

``registry()`` lists them, finds them by name, and takes more (``register``); ``resolve_*`` make objects of what a user writes.
"""

from .registry.names import Entry, PluginInfo
from .registry.registry import Registry, registry, reset_registry
from .registry.resolve import resolve_backend, resolve_strategy, resolve_verifier

__all__ = [
    "Entry", "PluginInfo", "Registry", "registry", "reset_registry", "resolve_backend", "resolve_strategy", "resolve_verifier",
]  # fmt: skip
