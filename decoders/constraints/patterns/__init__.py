"""Regular expressions: dialects read into one tree, and automata and text made of it. Imports only the errors of the package."""
