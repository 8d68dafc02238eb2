"""Writes files atomically, and names the package's cache folder."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path


def cache_folder() -> Path:
    """``hf-decoders`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-decoders"


def write_whole(path: Path, content: bytes) -> None:
    """Writes the regular file `path` atomically, and creates its folder.

    Follows symbolic links. A new file gets its mode from the umask, an old file keeps its mode. A failure leaves no temporary file.

    Raises:
        OSError: the file cannot be written, or is not a regular file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{secrets.token_hex(8)}{target.suffix}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
