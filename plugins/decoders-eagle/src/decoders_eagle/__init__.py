"""A small EAGLE, built on the public base classes of hf-decoders: a strategy, its network, a verifier and an observer."""
