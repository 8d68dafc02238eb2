"""The weights of a model: read where they are, multiplied as one, quantized; and how changes to them are noticed."""
