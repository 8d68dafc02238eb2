"""Prompts: what people ask of chat models, and made-up ones at the two ends of what drafting can meet.

Text whose continuation is obvious and random bytes ask how a strategy behaves where every draft token is right and where none
is; instructions lie in between.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

from ..server.prompts import prompt_text

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
