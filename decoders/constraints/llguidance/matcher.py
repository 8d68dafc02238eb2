"""A position in a text that llguidance follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...errors import GrammarError
from ...tree import NO_PARENT
from ..base import Matcher
from .source import reason

if TYPE_CHECKING:
    from .backend import LLGuidanceGrammar

T = TypeVar("T")


class LLGuidanceMatcher(Matcher):
    """A position in a text.

    Text tokens go to llguidance, stop tokens never do: whether the text has ended is kept here.
    """

    def __init__(self, grammar: LLGuidanceGrammar, origin: LLGuidanceMatcher | None = None) -> None:
        self.grammar: LLGuidanceGrammar = grammar
        if origin is None:
            self._inner, self._generation = grammar.fresh()
            self._taken: list[int] = []  # text tokens, from the beginning
            self._ended = False
        else:
            self._inner, self._generation = origin._inner.deep_copy(), origin._generation
            self._taken, self._ended = [*origin._taken], origin._ended
        self._floor = len(self._taken) + self._ended  # what was taken before the fork

    @property
    def accepting(self) -> bool:
        return self._ended or self._ask(lambda inner: bool(inner.is_accepting()))

    @property
    def stopped(self) -> bool:
        return self._ended

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.grammar, self)

    def advance(self, tokens: Sequence[int]) -> int:
        """Takes `tokens` up to the first illegal one; returns how many it took.

        Raises:
            GrammarError: llguidance hits a limit. The matcher stays where it was.
        """
        if self._ended:
            return 0
        known = self.grammar.vocabulary.tokens
        text: list[int] = []
        for token in tokens:
            if not 0 <= token < len(known) or known[token] is None:
                break
            text.append(token)
        taken = self._take(text) if self.grammar.policy == "full" else self._take_canonical(text)
        if taken == len(text) < len(tokens) and tokens[taken] in self.grammar.vocabulary.stops and self.accepting:
            self._ended = True
            taken += 1
        return taken

    def _take(self, text: list[int]) -> int:
        def consume(inner: Any) -> int:
            taken: int = inner.try_consume_tokens(text)
            if taken < len(text):
                inner.compute_bitmask()  # a limit that was hit on the way shows only now
            return taken

        taken = self._ask(consume) if text else 0
        self._taken += text[:taken]
        return taken

    def _take_canonical(self, text: list[int]) -> int:
        for count, token in enumerate(text):
            if self.forced_tokens(1) not in ([], [token]) or not self._take([token]):
                return count
        return len(text)

    def _push(self, token: int) -> None:
        """Takes a token that is known to be legal."""
        self._ask(lambda inner: inner.consume_token(token))
        self._taken.append(token)

    def rollback(self, count: int) -> None:
        held = len(self._taken) + self._ended - self._floor
        if not 0 <= count <= held:
            raise ValueError(f"{count} tokens to give back, and {held} have been taken")
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            del self._taken[-count:]
            if not self._inner.rollback(count):
                self._renew()

    def validate(self, tokens: Sequence[int]) -> int:
        count = self.advance(tokens)
        self.rollback(count)
        return count

    def fill_mask(self, out: Tensor) -> None:
        """Writes the mask of the tokens that may come next to ``out``, ``[W]`` int32 on the CPU.

        Raises:
            GrammarError: llguidance hits a limit, or the grammar leads nowhere from here.
        """
        if self._ended:
            out.copy_(self.grammar.ends)
            return
        self._write(*writable(out))

    def _write(self, row: Any, address: int) -> None:
        """The mask to `row`, ``[W]`` uint32 of numpy, which lies at `address`."""
        size = row.nbytes
        self._ask(lambda inner: inner.unsafe_compute_mask_ptr(address, size))
        if self.grammar.policy == "canonical" and (only := self.forced_tokens(1)):
            row[:] = 0
            row[only[0] >> 5] = 1 << (only[0] & 31)

    def fill_tree(self, parents: Sequence[int], tokens: Sequence[int], out: Tensor) -> list[bool]:
        """Masks after every node of a tree, as :meth:`Matcher.fill_tree`: a node is legal if its parent's mask says so."""
        tree = _merged(parents, tokens)
        legal = [False] * len(parents)
        out.fill_(-1)
        words, address = writable(out)
        stops, ends, size = self.grammar.vocabulary.stops, writable(self.grammar.ends)[0], len(self.grammar.vocabulary)
        begin = len(self._taken)
        walk = [(0, 0, begin)]  # depth first: one matcher goes down and comes back up
        try:
            while walk:
                node, parent, depth = walk.pop()
                if node:
                    token = tokens[node]
                    if not 0 <= token < size or not int(words[parent, token >> 5]) >> (token & 31) & 1:
                        continue
                    if token in stops:
                        legal[node], words[node] = True, ends
                        continue
                    if depth < len(self._taken):
                        self.rollback(len(self._taken) - depth)
                    self._push(token)
                legal[node] = True
                if self._ended:
                    words[node] = ends
                    continue
                self._write(words[node], address + node * words[node].nbytes)
                walk += [(child, node, len(self._taken)) for child in reversed(tree.children.get(node, []))]
        finally:
            if len(self._taken) > begin:
                self.rollback(len(self._taken) - begin)
        for node, first in tree.same.items():
            legal[node], words[node] = legal[first], words[first]
        return legal

    def forced_bytes(self) -> bytes:
        if self._ended:
            return b""

        def forced(inner: Any) -> bytes:
            text = bytes(inner.compute_ff_bytes())
            if not text and self.grammar.policy == "canonical":
                inner.compute_bitmask()  # a limit that was hit shows only now, and here it would matter
            return text

        # A matcher that has been asked for them takes them as read, and its masks change.
        return self._ask(forced, copy=True)

    def _ask(self, question: Callable[[Any], T], copy: bool = False) -> T:
        """What the ``LLMatcher``, or a copy of it, answers.

        One that meets an error never leaves it. A new lexer may know the answer: the old one had met too many states.

        Raises:
            GrammarError: a new one does not either.
        """
        for attempt in (1, 2):
            inner = self._inner.deep_copy() if copy else self._inner
            answer = question(inner)
            if not inner.is_error():
                return answer
            if attempt == 1:
                self._renew()
        raise self._failure(inner.get_error())

    def _renew(self) -> None:
        """Another ``LLMatcher`` at this position; one that cannot get here is in error, which the next question shows."""
        self._inner, self._generation = self.grammar.fresh(self._generation)
        self._inner.consume_tokens(self._taken)

    def _failure(self, message: str) -> GrammarError:
        text = self.grammar.vocabulary.spell(self._taken).decode(errors="replace")
        where = f"{self.grammar.language.name}, after {text[-60:]!r}"
        if "NoExtension" in message:
            return GrammarError(f"{where}: the grammar leads nowhere: no text that begins so is in the language")
        return GrammarError(f"{where}: llguidance gave up: {reason(message)}")


@dataclass(frozen=True)
class _Tree:
    """A tree in which no two siblings hold the same token.

    Attributes:
        children: of each node. same: nodes that are left out, with the node that spells what they do.
    """

    children: dict[int, list[int]]
    same: dict[int, int]


def _merged(parents: Sequence[int], tokens: Sequence[int]) -> _Tree:
    tree = _Tree({}, {})
    found: dict[tuple[int, int], int] = {}
    for node in range(1, len(parents)):
        if parents[node] == NO_PARENT:
            continue
        parent = tree.same.get(parents[node], parents[node])
        first = found.setdefault((parent, tokens[node]), node)
        if first == node:
            tree.children.setdefault(parent, []).append(node)
        else:
            tree.same[node] = first
    return tree


def writable(out: Tensor) -> tuple[Any, int]:
    """`out` as uint32 of numpy, and its address: masks are written there directly.

    Raises:
        ValueError: that cannot be done.
    """
    if out.dtype != torch.int32 or out.device.type != "cpu" or not out.is_contiguous():
        raise ValueError(f"masks are written to contiguous int32 on the CPU, not to {out.dtype} on {out.device}")
    return out.numpy().view("uint32"), out.data_ptr()
