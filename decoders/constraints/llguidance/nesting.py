"""How deep the terminals of a Lark grammar are nested in each other.

llguidance writes them out as one regular expression, and what it does then takes time with the cube of the depth: 0.1
seconds at 500, 6 at 2000, minutes at 20,000, with no limit of its own that would stop it.
"""

from __future__ import annotations

import re

_TOKENS = re.compile(
    r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|//[^\n]*|#[^\n]*|/[^/\\]*(?:\\.[^/\\]*)*/'  # nothing in these counts
    r"|(?P<define>[?!]*_?[A-Za-z][\w\-]*)[ \t]*(?:\.\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:"
    r"|(?P<name>_?[A-Za-z][\w\-]*)|(?P<open>[(\[~])|(?P<close>[)\]])|(?P<next>[|&])",
    re.DOTALL,
)


def depth(lark: str) -> int:
    """Most brackets, negations and terminals around anything, terminals written out; recursion counts once."""
    uses = _uses(lark)
    deepest: dict[str, int] = {}
    walk = [(name, False) for name in uses]
    begun: set[str] = set()
    while walk:  # no recursion: the depth is what is asked for
        name, done = walk.pop()
        if done:
            deepest[name] = max((level + deepest.get(used, 0) for used, level in uses[name].items()), default=0)
        elif name not in begun:
            begun.add(name)
            walk.append((name, True))
            walk += [(used, False) for used in uses[name] if used in uses]
    return max(deepest.values(), default=0)


def _uses(lark: str) -> dict[str, dict[str, int]]:
    """For every definition the terminals it uses and how deep in it they stand; "" is what stands in it anyway."""
    uses: dict[str, dict[str, int]] = {}
    inside: dict[str, int] = {}
    level = negations = 0
    for token in _TOKENS.finditer(lark):
        if name := token["define"]:
            inside = uses.setdefault(name.lstrip("?!"), {})
            level = negations = 0
        elif token["open"] == "~":
            negations += 1
        elif token["open"]:
            level += 1
        elif token["close"]:
            level = max(level - 1, 0)
        elif token["next"]:
            negations = 0
        name = token["name"] or ""
        if not name or name.lstrip("_")[0].isupper():
            inside[name] = max(inside.get(name, 0), 1 + level + negations)
    return uses
