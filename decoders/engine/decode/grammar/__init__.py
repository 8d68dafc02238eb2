"""Guides: the positions of a call's rows in their grammars, and which tokens may follow each node of a block."""
