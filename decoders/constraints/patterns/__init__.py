"""Regular expressions: patterns of several dialects are read into trees; trees become automata or text.

This package imports only ``errors`` from the rest of the project.
"""
