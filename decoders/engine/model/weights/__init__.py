"""The weights of a model: products without copies, joint products, quantization, and the detection of changed weights."""
