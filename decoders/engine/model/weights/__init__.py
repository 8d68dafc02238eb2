"""The weights of a model: packed, fused, quantized and freed; and how changes to them are noticed."""
