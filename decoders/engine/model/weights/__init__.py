"""The weights of a model: products without copies, joint products, quantization, and detection of changes."""
