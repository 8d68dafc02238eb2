"""The model: its forward pass takes tensors and returns logits. Requests, strategies and verification are not part of this package."""
