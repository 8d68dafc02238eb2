"""Prompts: ready instructions for chat models, made-up prompts, and prompts from files.

Two kinds of made-up prompts are extremes: text with an obvious continuation, where nearly every draft token is right, and random
characters, where nearly every draft token is wrong. Instructions lie in between.
"""

from __future__ import annotations

import gzip
import json
import zlib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError, installing, shortened, suggest
from .templates import encode_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The content of a prompt: a text to continue, or the messages of a conversation so far, which a chat template renders.
Content = str | list[dict[str, str]]
#: Prompts, each as a tuple: name, kind (category), content.
Texts = list[tuple[str, str, Content]]

#: Kinds of made-up prompts. predictable: texts with an obvious continuation, each cut off within a line. random: random printable
#: characters. agent: successive prompts of a coding agent, ten versions of one file with the same edit to make.
MADE_UP = ("predictable", "random", "agent")
#: Kinds of instructions. A story repeats neither its prompt nor itself, so n-gram lookups find little.
INSTRUCTIONS = ("edit", "summary", "extract", "chat", "code", "list", "story")


def instructions(kind: str) -> Texts:
    """The package's prompts of `kind`, one of :data:`INSTRUCTIONS` or :data:`MADE_UP`."""
    with resources.as_file(resources.files(__package__).joinpath("prompts.jsonl")) as path:
        return [(item["id"], kind, _prompt(item, kind)[1]) for item in read_rows(path) if item["kind"] == kind]


def encode(tokenizer: PreTrainedTokenizerBase, content: Content) -> list[int]:
    """The tokens of a prompt. The chat template renders messages. Without a template, messages are joined (:func:`bare`).

    Raises:
        SettingsError: `content` is neither a text nor messages, or has no tokens.
    """
    content = _checked(content)
    if isinstance(content, str) or not tokenizer.chat_template:
        encoding = tokenizer(bare(content))
    else:
        encoding = encode_messages(tokenizer, content)
    tokens = list(encoding["input_ids"])
    if not tokens:
        raise SettingsError("a prompt is empty: give every prompt at least one token")
    return tokens


def bare(content: Content) -> str:
    """The text of a prompt without a chat template: messages are joined by empty lines."""
    if isinstance(content, str):
        return content
    return "\n\n".join(message["content"] for message in content) + "\n\n"


#: The value of ``--prompts`` for all kinds of instructions; ``instruct:edit`` selects one kind.
INSTRUCT = "instruct"


def read_prompts(chosen: str, limit: int | None) -> Texts:
    """The prompts that ``--prompts`` asks for, at most `limit` of each kind (None: all).

    Args:
        chosen: the path of a file, or comma-separated kinds: ``code``, ``copy``, ``docstring`` (``all``: these three, the kinds of the
            demo), ``predictable``, ``random``, ``agent``, ``instruct:edit`` and so on (``instruct``: all of :data:`INSTRUCTIONS`).

    Raises:
        SettingsError: there is no such kind or file, or no prompt in the file.
    """
    from .. import demo

    groups = {"all": demo.KINDS, INSTRUCT: tuple(f"{INSTRUCT}:{kind}" for kind in INSTRUCTIONS)}
    known = (*demo.KINDS, *groups[INSTRUCT], *MADE_UP, *groups)
    pieces = [piece.strip() for piece in chosen.split(",") if piece.strip()]
    if not pieces or set(pieces) - {*known}:
        return _from_file(chosen, limit, known)
    texts: Texts = []
    for kind in dict.fromkeys(kind for piece in pieces for kind in groups.get(piece, (piece,))):
        if kind in demo.KINDS:
            texts += [(p.id, p.kind, p.text) for p in demo.prompts(kind)[:limit]]
        else:
            prefix = f"{INSTRUCT}:" if kind.startswith(INSTRUCT) else ""
            own = instructions(kind.removeprefix(prefix))[:limit]
            texts += [(prefix + name, kind, content) for name, _, content in own]
    return texts


def _from_file(chosen: str, limit: int | None, known: tuple[str, ...]) -> Texts:
    try:
        prompts = read_file(Path(chosen))
    except FileNotFoundError as error:
        odd = next((piece.strip() for piece in chosen.split(",") if piece.strip() not in known), chosen)
        raise SettingsError(
            f"--prompts {chosen!r} is not a file, and {odd!r} is not a kind. {suggest(odd, known)}"
        ) from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"--prompts {chosen!r} cannot be read: {error}") from error
    if not any(text for _, text in prompts):
        raise SettingsError(f"--prompts {chosen}: there is no text in this file")
    texts: Texts = []
    for kind in dict.fromkeys(kind for kind, _ in prompts):
        contents = [text for other, text in prompts if other == kind][:limit]
        texts += [(f"{kind}-{number:02}", kind, text) for number, text in enumerate(contents, 1)]
    return texts


def read_file(path: Path) -> list[tuple[str, Content]]:
    """The kind and content of each prompt in a file. The file holds one text, or rows with a text or messages (:func:`read_rows`).

    Raises:
        OSError, ValueError: the file has another format.
    """
    if path.suffix.lower() in (".jsonl", ".gz", ".parquet"):
        return [_prompt(item, path.name.partition(".")[0]) for item in read_rows(path)]
    return [(path.stem, path.read_text(encoding="utf-8"))]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file: JSON lines (plain or compressed with gzip) or parquet.

    Raises:
        OSError, ValueError: the file cannot be read, or has another format. SettingsError: parquet without pyarrow.
    """
    if path.suffix.lower() == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise SettingsError(f"{path} cannot be read without pyarrow: {installing('bench')}") from error
        return list(pyarrow.parquet.read_table(path).to_pylist())
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix.lower() == ".gz" else content).decode()
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    rows = []
    # Not splitlines(), because texts may contain other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:  # error.lineno is 1: every line is parsed by itself
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return rows


def _prompt(item: Any, kind: str) -> tuple[str, Content]:
    """The kind (`kind` if `item` names none) and the content of `item`, the object in a line of a file: its ``text`` or ``messages``.

    Raises:
        SettingsError: `item` has neither a text nor messages.
    """
    if not isinstance(item, dict) or not ("messages" in item or "text" in item):
        raise SettingsError(f"a line must be an object with the field text or messages, not {shortened(repr(item))}")
    return item.get("kind", kind), _checked(item.get("messages", item.get("text")))


def _checked(content: Any) -> Content:
    """`content` if it is a text, else the role and content of each message in it. Raises SettingsError if `content` is neither."""
    if isinstance(content, str):
        return content
    try:
        messages = [{"role": message["role"], "content": message["content"]} for message in content]
        if all(isinstance(text, str) for message in messages for text in message.values()):
            return messages
    except (KeyError, TypeError):
        pass
    raise SettingsError(f"a prompt must be a text, or messages with role and content, not {shortened(repr(content))}")
