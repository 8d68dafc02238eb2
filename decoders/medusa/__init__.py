"""Medusa heads: the module beside the target, its files, its tree, and how it is trained."""

from __future__ import annotations

from .files import find_heads, load_heads, save_heads
from .heads import HeadsConfig, MedusaHeads
from .trees import DEFAULT_TREE

__all__ = ["DEFAULT_TREE", "HeadsConfig", "MedusaHeads", "find_heads", "load_heads", "save_heads"]
