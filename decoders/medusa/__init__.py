"""Medusa heads: the module beside the target, its files, its tree, and how it is trained.

Nothing is imported here, because the command line reads :mod:`decoders.medusa.config` before it needs torch.
"""
