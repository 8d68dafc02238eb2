"""The interface to transformers: arguments, inputs, checkpoints, draft models, streamers. ``generate.py`` calls it."""
