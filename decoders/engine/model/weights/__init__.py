"""The weights of a model: matrix products without copies, joint products of several matrices, quantization, and detecting changed
weights.
"""
