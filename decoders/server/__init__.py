"""The HTTP server of ``decoders serve``, with OpenAI's routes. Needs the dependencies of the package's extra ``serve``."""
