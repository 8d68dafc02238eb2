"""Compiles forward passes and tensor functions: in a background thread, layer by layer, and only once compiling pays."""
