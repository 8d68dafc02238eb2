"""The weights of a model: packed, fused, quantised, freed, and how a change of theirs is noticed."""
