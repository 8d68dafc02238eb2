"""The version of the distribution, for pyproject.toml and ``decoders.__version__``."""

__version__ = "0.1.0"
