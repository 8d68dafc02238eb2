"""Regular expressions: read, as trees, as automata. Nothing of the package is imported but its errors."""
