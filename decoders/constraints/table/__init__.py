"""The ``table`` backend: regular languages as byte automata with precomputed masks, for the CPU and for the compiled decoding step."""

from __future__ import annotations

from .backend import Table, TableGrammar

__all__ = ["Table", "TableGrammar"]
