"""The version of the distribution, as pyproject.toml reads it and ``decoders.__version__`` gives it."""

__version__ = "0.1.0"
