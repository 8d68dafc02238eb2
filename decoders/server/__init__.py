"""An HTTP server with OpenAI's routes on top of schedulers: ``decoders serve``. Needs the extra ``serve``."""
