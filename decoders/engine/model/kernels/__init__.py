"""Kernels of our own, in Triton: what CUDA runs in the place of masked attention and of products with few rows."""
