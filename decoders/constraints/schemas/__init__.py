"""A compiler from JSON Schema to the language of the valid texts: as a regular expression, or as a grammar in Lark's notation.

The steps: ``document`` (references) → ``nodes`` (boolean expressions) → ``normaliser`` (shapes: sets of values by type) →
``writing`` (rules) → ``notation`` (Lark, or one regular expression). README.md explains more. This package imports only the errors and
:mod:`decoders.constraints.patterns` from the rest of the project.
"""
