"""Made-up prompts at the two ends of what drafting can meet: text whose continuation is obvious, and random bytes.

They ask how a strategy behaves where every guess is right and where none is; real prompts lie in between.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

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


#: Kind of prompt to what makes its texts.
MADE_UP: dict[str, Callable[[], list[str]]] = {"predictable": predictable, "random": noise}
