"""What every room needs and none owns: files, devices, layers of a model, small weight files, private parts of transformers."""
