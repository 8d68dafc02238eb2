"""Regular expressions: patterns of several dialects are read into trees; trees become automata or text.

Of the package, only ``errors`` is imported.
"""
