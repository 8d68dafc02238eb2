"""The model's room: tensors in, logits out, without requests, strategies or verification."""
