"""A draft model for any target: small, of the target's family, taught by the target's own texts and distributions.

Nothing is imported here, because the command line reads :mod:`decoders.distillation.recipe` before it needs torch.
"""
