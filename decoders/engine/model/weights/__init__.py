"""The weights of a model: matrix products without copies, products of several matrices at once, quantization, and detecting changes."""
