"""Cost curves as files: one JSON file per subject, named after it, written whole or not at all."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

from pydantic import ValidationError

from ..common.files import write_whole
from .curve import VERSION, CostCurve, Subject

SUFFIX = ".costs.json"


def default_folder() -> Path:
    """``hf-decoders/costs`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-decoders" / "costs"


def path_of(folder: Path, subject: Subject) -> Path:
    """Where the curve of `subject` is kept."""
    return folder / (subject.key + SUFFIX)


def read(folder: Path, subject: Subject) -> CostCurve | None:
    """The curve kept of `subject`; None if there is none of this version. A file that is damaged warns."""
    path = path_of(folder, subject)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"cost curve {path} cannot be read, measuring anew: {error}", stacklevel=2)
        return None
    try:
        content = json.loads(text)
        if isinstance(content, dict) and content.get("version") != VERSION:
            return None
        curve = CostCurve.model_validate(content)
        if curve.subject != subject:
            raise ValueError("it belongs to another model or machine")
    except (ValueError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        warnings.warn(f"cost curve {path} is damaged, measuring anew: {reason}", stacklevel=2)
        return None
    return curve


def write(folder: Path, curve: CostCurve) -> Path | None:
    """Keeps `curve`, with the points that another process has kept meanwhile; None, and a warning, if that is impossible."""
    path = path_of(folder, curve.subject)
    try:
        kept = read(folder, curve.subject) if path.exists() else None
        whole = kept.with_points(curve.points) if kept is not None else curve
        write_whole(path, (whole.model_dump_json(indent=1) + "\n").encode())
    except OSError as error:
        warnings.warn(f"cost curve not kept as {path}: {error}", stacklevel=2)
        return None
    return path
