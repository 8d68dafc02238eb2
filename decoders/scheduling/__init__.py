"""Many requests at a time: a queue, a thread that decodes, and the handles of requests that callers hold.

:class:`decoders.Scheduler` and its results are exported by `decoders`; this package has what your own server needs in addition.
"""

from ..common.pieces import TextPieces

__all__ = ["TextPieces"]
