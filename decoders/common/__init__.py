"""What several packages share: files, devices, layers of a model, small weight files, private parts of transformers."""
