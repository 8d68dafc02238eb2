"""What the plugins of this process provide, the built-in one and those that are installed.

``registry()`` lists them, finds them by name, and takes more (``register``); ``resolve_*`` make objects of what a user writes.
"""

from .registry.kinds import Entry, PluginInfo
from .registry.registry import Registry, registry, reset_registry
from .registry.resolve import grammar_or_file, resolve_backend, resolve_grammar, resolve_strategy, resolve_verifier

__all__ = [
    "Entry", "PluginInfo", "Registry", "registry", "reset_registry", "grammar_or_file", "resolve_backend", "resolve_grammar",
    "resolve_strategy", "resolve_verifier",
]  # fmt: skip
