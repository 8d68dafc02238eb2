"""A lock on an open file, which ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import logging
import sys
from io import FileIO

log = logging.getLogger("decoders.serving")

#: What a lock that another process holds raises.
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)


def locked(file: FileIO) -> bool:
    """Takes the lock of `file`, which closing it gives back. False: another process has it.

    A file system without locks gives them all, with a warning.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 40)  # a byte that nobody reads: on Windows, locked bytes cannot be read
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # Not lockf: its lock goes when any descriptor of the file is closed.
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        log.warning("%s cannot be locked (%s): let no second process write it", file.name, error.strerror)
    return True
