"""Draft models and drafting modules of a call."""
