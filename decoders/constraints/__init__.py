"""Grammars: what a text may be, as masks over the next token. See :mod:`.base` for the contract of a backend."""

from .auto import Auto
from .base import Backend
from .llguidance import LLGuidance
from .table import Table

#: In the order they are listed.
BUILT_IN: tuple[type[Backend], ...] = (Auto, Table, LLGuidance)

__all__ = ["BUILT_IN", "Auto", "Backend", "LLGuidance", "Table"]
