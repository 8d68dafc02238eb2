"""Grammars: what a text may be, as masks over the next token. See :mod:`.base` for the contract of a backend."""
