"""``--prompts`` of ``decoders bench``: kinds of the demo's prompts, instructions, made-up ones, or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError

if TYPE_CHECKING:
    from ..bench.prompts import Content

#: All kinds of instructions; one of them is ``instruct:edit``.
INSTRUCT = "instruct"


def read_prompts(chosen: str, limit: int | None) -> list[tuple[str, str, Content]]:
    """(name, kind, text or messages) of prompts, `limit` of each kind.

    Args:
        chosen: kinds, comma-separated: the demo's (``all`` is all of these), ``instruct`` and ``instruct:edit``,
            ``predictable``, ``random``, ``agent``; or a file.

    Raises:
        SettingsError: no such kind or file, or no prompt in it.
    """
    from .. import demo
    from ..bench.prompts import INSTRUCTIONS, MADE_UP, instructions

    groups = {"all": demo.KINDS, INSTRUCT: tuple(f"{INSTRUCT}:{kind}" for kind in INSTRUCTIONS)}
    known = (*demo.KINDS, *groups[INSTRUCT], *MADE_UP, *groups)
    pieces = [piece.strip() for piece in chosen.split(",") if piece.strip()]
    if not pieces or set(pieces) - {*known}:
        return _from_file(chosen, limit, known)
    kinds = [kind for piece in pieces for kind in groups.get(piece, (piece,))]
    texts: list[tuple[str, str, Content]] = []
    for kind in dict.fromkeys(kinds):
        if kind in MADE_UP:
            numbered = enumerate(MADE_UP[kind]()[:limit], 1)
            texts += [(f"{kind}-{number:02}", kind, text) for number, text in numbered]
        elif kind.startswith(INSTRUCT):
            prompts = instructions(kind.partition(":")[2])[:limit]
            texts += [(f"{INSTRUCT}:{name}", kind, messages) for name, _, messages in prompts]
        else:
            texts += [(p.id, p.kind, p.text) for p in demo.prompts(kind)[:limit]]
    return texts


def _from_file(chosen: str, limit: int | None, known: tuple[str, ...]) -> list[tuple[str, str, Content]]:
    path = Path(chosen)
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".jsonl":
            prompts = [_prompt(json.loads(line), path.stem) for line in content.splitlines() if line.strip()]
        else:
            prompts = [(path.stem, content)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        kinds = ", ".join(known)
        raise SettingsError(f"--prompts {chosen!r} is neither one of {kinds} nor a readable file: {error}") from error
    if not any(text for _, text in prompts):
        raise SettingsError(f"--prompts {chosen}: there is no text in it")
    texts: list[tuple[str, str, Content]] = []
    for kind in dict.fromkeys(kind for kind, _ in prompts):
        contents = [text for other, text in prompts if other == kind][:limit]
        texts += [(f"{kind}-{number:02}", kind, text) for number, text in enumerate(contents, 1)]
    return texts


def _prompt(item: dict[str, Any], kind: str) -> tuple[str, Content]:
    """Kind (by default the file's name) and content of a line: a text, or messages with role and content.

    Raises:
        KeyError: it has neither.
        TypeError: it has neither.
    """
    if "messages" not in item:
        return item.get("kind", kind), item["text"]
    messages = [{"role": message["role"], "content": message["content"]} for message in item["messages"]]
    return item.get("kind", kind), messages
