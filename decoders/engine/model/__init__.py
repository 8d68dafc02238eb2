"""The model's room: tensors in, logits out. Nothing here knows whose rows they are or what is kept of them."""
