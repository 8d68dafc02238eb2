"""Many requests at once: a queue, a thread that decodes, and the handles of requests that callers hold.

`decoders` exports :class:`decoders.Scheduler` and its results; this package exports what a server of your own needs in addition.
"""

from ..common.pieces import TextPieces, special_tokens, unfinished
from ..engine.decode.output import TokenLogprobs

__all__ = ["TextPieces", "TokenLogprobs", "special_tokens", "unfinished"]
