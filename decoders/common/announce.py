"""Log lines about work that takes long, so that users know what they wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("decoders")

#: Work that takes longer than this many seconds is announced.
LONG = 2.0


@contextmanager
def announced(work: str) -> Iterator[None]:
    """Logs a warning if the ``with`` block runs longer than :data:`LONG` seconds, and in this case also logs its duration at the end.

    Args:
        work: what the block does, and for which purpose. Both log lines begin with this text.
    """
    started = time.perf_counter()
    timer = threading.Timer(LONG, _log.warning, (f"{work} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if (seconds := time.perf_counter() - started) > LONG:
            _log.info("%s: %.1f s", work, seconds)
