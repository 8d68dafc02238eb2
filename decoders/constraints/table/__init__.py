"""The ``table`` backend: regular languages as byte automata with ready masks, for the CPU and for the compiled step."""

from __future__ import annotations

from .backend import Table
from .grammar import TableGrammar
from .matcher import TableMatcher

__all__ = ["Table", "TableGrammar", "TableMatcher"]
