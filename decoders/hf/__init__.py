"""The interface to transformers: arguments, inputs, checkpoints, draft models, streamers. ``enabling.py`` calls it."""
