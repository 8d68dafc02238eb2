"""The registry of plugins: which plugin provides which name, and resolving names to objects. Public as ``decoders.plugins``."""
