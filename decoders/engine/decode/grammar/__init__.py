"""Guides track the positions of a call's rows in their grammars, and say which tokens may follow each node of a block."""
