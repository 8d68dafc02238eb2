"""Announces work that a user has to wait for, if it takes long."""

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
    """Logs a warning once the ``with`` block has run for :data:`LONG` seconds, and logs the duration of such a block when it ends.

    Args:
        work: what the block does, and what for. Both log lines begin with it.
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
