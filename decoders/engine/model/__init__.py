"""The model: its forward pass takes tensors and returns logits. This package knows no requests, strategies or verification."""
