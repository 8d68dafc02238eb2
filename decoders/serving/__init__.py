"""Many requests at a time: a queue, a thread that decodes, and the handles of requests that callers hold.

:class:`decoders.Scheduler` and its results are exported by the package itself; here is what a server of one's own needs besides.
"""

from ..common.pieces import TextPieces

__all__ = ["TextPieces"]
