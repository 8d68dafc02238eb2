"""The weights of a model: packed, fused, quantised and freed; and how changes are noticed."""
