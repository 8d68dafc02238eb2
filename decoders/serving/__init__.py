"""Many requests at a time: a queue, a thread that decodes, and what a caller holds of a request.

:class:`decoders.Scheduler` and what it gives are exported by the package itself; here is what a server of one's own needs beside them.
"""

from .pieces import TextPieces

__all__ = ["TextPieces"]
