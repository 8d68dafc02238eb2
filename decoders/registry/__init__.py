"""The built-in plugin and the installed plugins of this process.

``registry()`` lists plugins, finds objects by name and registers more plugins; ``resolve_*`` turn a user's value into an object.
"""

from .kinds import Entry, PluginInfo
from .plugins import Registry, registry, reset_registry
from .resolve import grammar_or_file, resolve_backend, resolve_grammar, resolve_strategy, resolve_verifier

__all__ = [
    "Entry", "PluginInfo", "Registry", "registry", "reset_registry", "grammar_or_file", "resolve_backend", "resolve_grammar",
    "resolve_strategy", "resolve_verifier",
]  # fmt: skip
