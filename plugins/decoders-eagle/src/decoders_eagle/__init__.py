"""An EAGLE with the public bases of hf-decoders: a strategy, its network, a verifier and an observer."""
