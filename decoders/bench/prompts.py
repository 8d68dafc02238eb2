"""Prompts: what people ask of chat models, made-up ones at the two ends of what drafting can meet, files, and batches of them.

Text whose continuation is obvious and random bytes ask how a strategy behaves where every draft token is right and where none
is; instructions lie in between.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import SettingsError
from ..server.templates import prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A text to go on with, or what was said so far, for a chat template.
Content = str | list[dict[str, str]]

#: Characters of a random prompt.
LENGTH = 160


def predictable() -> list[str]:
    """Texts that go on in an obvious way, each cut off within a line."""
    words = ("alpha", "beta", "gamma", "delta")
    modules = (
        "argparse", "ast", "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime", "decimal",
        "difflib", "enum", "fnmatch", "functools", "glob", "hashlib", "heapq", "html", "inspect", "io",
    )  # fmt: skip
    return [
        "\n".join(f"line {i}: the quick brown fox jumps over the lazy dog" for i in range(1, 12)) + "\nline 12: the",
        "\n".join(f"| row {i} | {words[i % 4]} | True | False | None |" for i in range(1, 13)) + "\n| row 13 |",
        "\n".join(f"import {name}" for name in modules) + "\nimport",
        "\n".join(f"    self.value_{i} = value_{i}" for i in range(1, 17)) + "\n    self.value_17",
    ]


def noise() -> list[str]:
    """Random printable bytes, the same in every run."""
    generator = random.Random(0)
    return ["".join(generator.choices(string.printable[:95], k=LENGTH)) for _ in range(4)]


def agent() -> list[str]:
    """The same edit asked for ten times, each time of the file as it is then: what an agent does that works on one file."""
    lines = [
        "def load(path, limit=0):",
        '    """Read the entries of a file."""',
        "    entry = None",
        "    with open(path) as file:",
        "        for line in file:",
        "            entry = parse(line)",
        "            if entry is None:",
        "                continue",
        "            check(entry, limit)",
        "            store(entry.name, entry.value)",
        "    if entry is None:",
        "        raise ValueError(path)",
        "    return entry",
    ]
    changes = [
        (0, "def load(path, limit=10):"), (1, '    """Read all entries of a file."""'), (8, "            check(entry, limit, path)"),
        (7, "                break"), (4, "        for line in file.readlines():"), (11, '        raise ValueError("no entry")'),
        (9, "            store(entry.name, entry.value, path)"), (3, '    with open(path, "r") as file:'),
        (12, "    return entry, path"), (2, "    entry = default"),
    ]  # fmt: skip
    texts = []
    for place, line in changes:
        lines[place] = line
        texts.append("# original\n" + "\n".join(lines) + "\n\n# rename entry to record\n")
    return texts


#: Kind of prompt to what makes its texts.
MADE_UP: dict[str, Callable[[], list[str]]] = {"predictable": predictable, "random": noise, "agent": agent}

#: Kinds of instructions. The answer to a story repeats neither the prompt nor itself: lookups have little to find.
INSTRUCTIONS = ("edit", "summary", "extract", "chat", "code", "list", "story")


def instructions(kind: str) -> list[tuple[str, str, Content]]:
    """(name, kind, messages) of the instructions of a kind that come with this package."""
    lines = resources.files(__package__).joinpath("instructions.jsonl").read_text(encoding="utf-8").splitlines()
    every = [json.loads(line) for line in lines]
    return [(item["id"], item["kind"], item["messages"]) for item in every if item["kind"] == kind]


def encode(tokenizer: PreTrainedTokenizerBase, content: Content) -> list[int]:
    """Tokens of a prompt: messages through the chat template, or as bare text where the tokenizer has none."""
    if isinstance(content, str) or not tokenizer.chat_template:
        return list(tokenizer(bare(content))["input_ids"])
    # The template writes the special tokens itself.
    text = prompt_text(tokenizer, content)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def bare(content: Content) -> str:
    """What is said in a prompt, without a template."""
    if isinstance(content, str):
        return content
    return "\n\n".join(message["content"] for message in content) + "\n\n"


#: All kinds of instructions; one of them is ``instruct:edit``.
INSTRUCT = "instruct"


def read_prompts(chosen: str, limit: int | None) -> list[tuple[str, str, Content]]:
    """(name, kind, text or messages) of the prompts that ``--prompts`` asks for, `limit` of each kind.

    Args:
        chosen: kinds, comma-separated: the demo's (``all`` is all of these), ``instruct`` and ``instruct:edit``,
            ``predictable``, ``random``, ``agent``; or a file.

    Raises:
        SettingsError: no such kind or file, or no prompt in it.
    """
    from .. import demo

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


@dataclass(frozen=True)
class Workload:
    """Prompts that are decoded in one call.

    Attributes:
        name: of the prompt, or of the first and last.
        kind: what it is counted under.
        input_ids: ``[B, P]``, padded on the left.
        attention_mask: ``[B, P]``.
    """

    name: str
    kind: str
    input_ids: Tensor
    attention_mask: Tensor

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]


def workloads(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str, Content]], rows: int = 1
) -> list[Workload]:
    """Workloads of `rows` prompts each from ``(name, kind, text or messages)``; prompts of one kind stay together.

    The last workload of a kind is filled up from the kind's first prompts, so that all have the same number of rows.
    """
    workloads_made = []
    for kind in dict.fromkeys(kind for _, kind, _ in texts):
        of_kind = [(name, text) for name, other, text in texts if other == kind]
        for start in range(0, len(of_kind), rows):
            chosen = [of_kind[i % len(of_kind)] for i in range(start, start + rows)]
            encoded = [encode(tokenizer, text) for _, text in chosen]
            longest = max(map(len, encoded))
            ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in encoded])
            mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in encoded])
            name = chosen[0][0] if rows == 1 else f"{chosen[0][0]}…{chosen[-1][0]}"
            workloads_made.append(Workload(name, kind, ids, mask))
    return workloads_made
