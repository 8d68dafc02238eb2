"""Code that several packages share: files, devices, checkpoints, pieces of text, private parts of transformers."""
