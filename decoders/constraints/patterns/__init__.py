"""Regular expressions: patterns of several dialects are read into trees; trees become automata or text.

It imports only ``errors`` from the rest of the project.
"""
