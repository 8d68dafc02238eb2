"""The demo models' data: the Python standard library's own sources, split by file.

Licence of the data: PSF-2.0 (a few files carry their own, compatible notices).
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LICENCE = "PSF-2.0"
HELD_OUT_PER_MILLE = 30

_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "_bundled"}

# Three reasons to leave a file out: it is not valid Python on purpose, it is a generated table that would teach digits
# instead of code, or it is written per machine (build paths) and would make two machines train on different text.
_SKIPPED_FILES = (
    "lib2to3/tests/data/*",
    "test/test_lib2to3/data/*",
    "test/bad*",
    "test/tokenizedata/bad*",
    "test/encoded_modules/*",
    "encodings/cp*.py",
    "encodings/iso8859_*.py",
    "encodings/koi8_*.py",
    "encodings/mac_*.py",
    "encodings/ptcp154.py",
    "encodings/kz1048.py",
    "encodings/tis_620.py",
    "encodings/hp_roman8.py",
    "encodings/palmos.py",
    "pydoc_data/topics.py",
    "html/entities.py",
    "_sysconfigdata*",
    "config-*",
    "*/config-*",
    "sitecustomize.py",
    "usercustomize.py",
)


@dataclass(frozen=True)
class Source:
    """One file: `path` relative to the standard library (posix), `text` as decoded UTF-8."""

    path: str
    text: str


def stdlib_root() -> Path:
    """Where this interpreter keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(path: str) -> bool:
    """Whether a relative path belongs to the held-out split.

    It depends on the path alone, so a file that a later Python adds cannot move another one across the split.
    """
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def read_sources(root: Path | None = None) -> list[Source]:
    """All usable files under `root` (default: the standard library), sorted by path, exact duplicates dropped.

    Duplicates are dropped before the split, so no held-out file has a twin in the training files.
    """
    root = stdlib_root() if root is None else root
    seen: set[bytes] = set()
    sources = []
    for path in sorted(_python_files(root)):
        try:
            text = (root / path).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if not text.strip() or digest in seen or _is_table(text):
            continue
        seen.add(digest)
        sources.append(Source(path, text))
    return sources


def _python_files(root: Path) -> Iterator[str]:
    """Paths below `root` with slashes. Skipped folders, site-packages among them, are not even listed."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_DIRECTORIES]
        for name in files:
            path = Path(folder, name).relative_to(root).as_posix()
            if name.endswith(".py") and not any(fnmatch.fnmatchcase(path, pattern) for pattern in _SKIPPED_FILES):
                yield path


def split(sources: list[Source]) -> tuple[list[Source], list[Source]]:
    """(training files, held-out files); disjoint and together everything."""
    train = [source for source in sources if not is_held_out(source.path)]
    held_out = [source for source in sources if is_held_out(source.path)]
    return train, held_out


def digest(sources: list[Source]) -> str:
    """A fingerprint of the corpus, so that a run is not resumed on other data."""
    hasher = hashlib.sha256()
    for source in sources:
        hasher.update(source.path.encode() + b"\0" + source.text.encode() + b"\0")
    return hasher.hexdigest()


def _is_table(text: str) -> bool:
    """Large files that are mostly digits, escapes and punctuation (codec tables, embedded binary data)."""
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return len(text) > 20_000 and letters < 0.62 * len(text)
