"""Guides track the positions of a call's rows in their grammars, and compute which tokens may follow each node of a block."""
