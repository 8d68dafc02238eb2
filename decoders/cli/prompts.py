"""``--prompts`` of ``decoders bench``: kinds of the demo's prompts, made-up ones, or a file."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import SettingsError


def read_prompts(chosen: str, limit: int | None) -> list[tuple[str, str, str]]:
    """(name, kind, text) of prompts, `limit` of each kind.

    Args:
        chosen: kinds, comma-separated: the demo's (``all`` is all of these), ``predictable``, ``random``; or a file.

    Raises:
        SettingsError: no such kind or file, or no prompt in it.
    """
    from .. import demo
    from ..bench.prompts import MADE_UP

    known = (*demo.KINDS, *MADE_UP)
    pieces = [piece.strip() for piece in chosen.split(",") if piece.strip()]
    if not pieces or set(pieces) - {*known, "all"}:
        return _from_file(chosen, limit, known)
    kinds = [kind for piece in pieces for kind in (demo.KINDS if piece == "all" else (piece,))]
    texts: list[tuple[str, str, str]] = []
    for kind in dict.fromkeys(kinds):
        if kind in MADE_UP:
            made = enumerate(MADE_UP[kind]()[:limit], 1)
            texts += [(f"{kind}-{number:02}", kind, text) for number, text in made]
        else:
            texts += [(p.id, p.kind, p.text) for p in demo.prompts(kind)[:limit]]
    return texts


def _from_file(chosen: str, limit: int | None, known: tuple[str, ...]) -> list[tuple[str, str, str]]:
    path = Path(chosen)
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            texts = [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
        else:
            texts = [content]
    except (OSError, ValueError, KeyError, TypeError) as error:
        kinds = ", ".join([*known, "all"])
        raise SettingsError(f"--prompts {chosen!r} is neither one of {kinds} nor a readable file: {error}") from error
    if not any(texts):
        raise SettingsError(f"--prompts {chosen}: there is no text in it")
    return [(f"{path.stem}-{number:02}", path.stem, text) for number, text in enumerate(texts[:limit], 1)]
