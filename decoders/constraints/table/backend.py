"""The ``table`` backend: regular languages compiled for a vocabulary, within limits, as an automaton with masks in arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import torch as tensors
from torch import Tensor

from ...errors import GrammarError
from ..base import Backend, Language, Policy, Tables, Tabulated, mask_words
from ..vocabulary import Vocabulary
from .determinise import columns, determinise, minimise
from .lexicon import Lexicon
from .masks import MaskRows, Row, StateMasks, masks


@dataclass(frozen=True)
class MaskedAutomaton:
    """A byte automaton with a mask for each state, from which :class:`Tables` are made.

    Attributes:
        next: ``[S, C]`` int32, see :class:`Tables`.
        classes: ``[256]`` int64, see :class:`Tables`.
        mask_of: ``[S]`` int64, see :class:`Tables`.
        start: see :class:`Tables`.
        stopped: see :class:`Tables`; the last state.
        rows: the masks.
        accepting: ``[S]`` bool, whether the text may end in each state.
    """

    next: NDArray[np.int32]
    classes: NDArray[np.int64]
    mask_of: NDArray[np.int64]
    rows: MaskRows
    accepting: NDArray[np.bool_]
    start: int
    stopped: int

    @staticmethod
    def of(
        transitions: NDArray[np.int32], byte_class: NDArray[np.int64], accepting: NDArray[np.bool_], start: int,
        masks: StateMasks,
    ) -> MaskedAutomaton:  # fmt: skip
        """The automaton with these arrays (``[S, C]``, ``[256]``, ``[S]``) and masks, and one more state: after a stop token."""
        next = np.concatenate([transitions, np.zeros((1, transitions.shape[1]), np.int32)])
        mask_of = np.concatenate([masks.of, [masks.stops]])
        return MaskedAutomaton(
            next, byte_class, mask_of, masks.rows, np.concatenate([accepting, [True]]), start, len(transitions)
        )

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, in bytes."""
        return sum(part.nbytes for part in (self.next, self.classes, self.mask_of, self.rows, self.accepting))

    def tables(self) -> Tables:
        """The automaton as tensors; every call expands the masks."""
        next, classes, mask_of = map(torch.from_numpy, (self.next, self.classes, self.mask_of))
        return Tables(next, classes, mask_of, self.rows.all(), start=self.start, stopped=self.stopped)


_TYPES = {
    "next": torch.int32, "classes": torch.int64, "mask_of": torch.int64, "masks": torch.int32,
    "accepting": torch.bool, "ends": torch.int64,
}  # fmt: skip


def dumped(automaton: MaskedAutomaton) -> bytes:
    """`automaton` serialized as safetensors."""
    tables = automaton.tables()
    return tensors.save(
        {
            "next": tables.next, "classes": tables.classes, "mask_of": tables.mask_of, "masks": tables.masks,
            "accepting": torch.from_numpy(automaton.accepting), "ends": torch.tensor([tables.start, tables.stopped], device="cpu"),
        }
    )  # fmt: skip


def restored(content: bytes, vocabulary: Vocabulary) -> MaskedAutomaton:
    """The automaton that was dumped as `content`. Raises GrammarError: `content` is not a dump, or not for `vocabulary`."""
    try:
        parts = tensors.load(content)
    except (SafetensorError, ValueError) as error:
        raise GrammarError(f"it holds no tensors: {error}") from error
    if {name: tensor.dtype for name, tensor in parts.items()} != _TYPES:
        raise GrammarError("its tensors do not form a table")
    next, masks, ends = parts["next"], parts["masks"], parts["ends"]
    states, kinds = next.shape if next.ndim == 2 else (0, 0)
    shapes = {
        "next": (states, kinds), "classes": (256,), "mask_of": (states,), "accepting": (states,), "ends": (2,),
        "masks": (len(masks), mask_words(len(vocabulary))),
    }  # fmt: skip
    if not states or {name: tuple(tensor.shape) for name, tensor in parts.items()} != shapes:
        raise GrammarError("its tensors do not fit each other or the vocabulary")
    for name, limit in (("next", states), ("classes", kinds), ("mask_of", len(masks)), ("ends", states)):
        if int(parts[name].min()) < 0 or int(parts[name].max()) >= limit:
            raise GrammarError(f"{name} points out of the table")
    if bool(next[0].any()):
        raise GrammarError("state 0 is not dead")
    start, stopped = ends.tolist()
    rows = MaskRows(masks.shape[1], map(Row.of, masks.numpy()))
    classes, mask_of, accepting = (parts[name].numpy() for name in ("classes", "mask_of", "accepting"))
    return MaskedAutomaton(next.numpy(), classes, mask_of, rows, accepting, start, stopped)


#: Greatest number of states of a minimal automaton.
STATES = 4096


class Table(Backend):
    """Compiles regular languages of up to :data:`STATES` states. A state's mask is a row of a tensor, which may be on the device."""

    name = "table"
    summary = "regular grammars as static tables: a mask costs one table look-up, on the device too"

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> TableGrammar:
        if language.regex is None:
            raise GrammarError(
                f'{language.name}: backend="table" reads regular expressions only, and this language has none: '
                'use backend="llguidance"'
            )
        try:
            minimal = minimise(determinise(language.regex))
        except GrammarError as error:
            raise GrammarError(f"{language.name}: {error}", error.keyword, error.path) from error
        if not minimal.start:
            raise GrammarError(f"{language.name}: no text matches the regex {language.regex[:80]!r}")
        if len(minimal.next) > STATES:
            raise GrammarError(
                f'{language.name}: its automaton has {len(minimal.next)} states, the limit of backend="table" is {STATES}; '
                'use backend="llguidance"'
            )
        transitions, byte_class = columns(minimal.next)
        state_masks = masks(transitions, byte_class, minimal.accepting, Lexicon.of(vocabulary))
        if not state_masks.alive[minimal.start]:
            have = Lexicon.of(vocabulary).single
            missing = bytes(np.flatnonzero(minimal.next.any(0) & ~have).astype(np.uint8))
            raise GrammarError(
                f"{language.name}: no text can be written with this vocabulary, which lacks tokens of the bytes {missing!r}"
            )
        automaton = MaskedAutomaton.of(transitions, byte_class, minimal.accepting, minimal.start, state_masks)
        return TableGrammar(language, vocabulary, policy, automaton)

    def restore(
        self, content: bytes, language: Language, vocabulary: Vocabulary, policy: Policy = "full"
    ) -> TableGrammar:
        return TableGrammar(language, vocabulary, policy, restored(content, vocabulary))


#: Greatest number of cached steps, by state and token: about 10 MB.
STEPS = 1 << 17


class TableGrammar(Tabulated):
    """A regular language as a table. Immutable apart from its cache of steps. State 0 is dead."""

    backend = "table"

    def __init__(self, language: Language, vocabulary: Vocabulary, policy: Policy, automaton: MaskedAutomaton) -> None:
        """automaton: its masks are for the policy ``full`` or, if it was restored or unpickled, for `policy`."""
        self.language, self.vocabulary, self.policy = language, vocabulary, policy
        self.first, self.stopped = automaton.start, automaton.stopped
        self.accepting: list[bool] = automaton.accepting.tolist()
        self._after = automaton.next.reshape(-1).data
        self._kind = bytes(automaton.classes.tolist())
        self._classes = automaton.next.shape[1]
        self._forced: dict[int, bytes] = {0: b"", self.stopped: b""}
        self.automaton = automaton
        if policy == "canonical":
            rows, mask_of = self._canonical(automaton)
            self.automaton = replace(automaton, rows=rows, mask_of=mask_of)
        self.rows = self.automaton.rows
        self.mask_rows: list[int] = self.automaton.mask_of.tolist()
        self._stops = frozenset(vocabulary.stops)
        self._steps: list[dict[int, int]] = [{} for _ in self.mask_rows]
        self._remembered = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return TableGrammar, (self.language, self.vocabulary, self.policy, self.automaton)

    @property
    def nbytes(self) -> int:
        return self.automaton.nbytes

    def tables(self) -> Tables:
        return self.automaton.tables()

    def dump(self) -> bytes:
        return dumped(self.automaton)

    def step(self, state: int, token: int) -> int:
        """The state after `token`; 0 if the token is illegal. In state 0 every token is illegal."""
        remembered = self._steps[state]
        after = remembered.get(token)
        if after is None:
            after = self._walk(state, token)
            if self._remembered >= STEPS:
                self._steps = [{} for _ in self._steps]
                self._remembered = 0
            self._steps[state][token] = after
            self._remembered += 1
        return after

    def fill(self, state: int, out: Tensor) -> None:
        self.rows.fill(self.mask_rows[state], out)

    def forced_bytes(self, state: int) -> bytes:
        """See :meth:`Matcher.forced_bytes`."""
        text = self._forced.get(state)
        if text is None:
            forced, position = bytearray(), state
            while not self.accepting[position] and (byte := self._forced_byte[position]) >= 0:
                forced.append(byte)
                position = self._after[position * self._classes + self._kind[byte]]
            text = self._forced[state] = bytes(forced)
        return text

    def _walk(self, state: int, token: int) -> int:
        """The state after the bytes of a token; 0 if the mask does not allow the token."""
        if not state or state == self.stopped or not 0 <= token < len(self.vocabulary):
            return 0
        if not self.rows.each[self.mask_rows[state]].allows(token):
            return 0
        if token in self._stops:
            return self.stopped
        for byte in self.vocabulary.tokens[token] or b"":
            state = self._after[state * self._classes + self._kind[byte]]
        return state

    @cached_property
    def _forced_byte(self) -> list[int]:
        """``[S]``: the only byte that may follow each state; -1 if there are several, or none."""
        bytes_of: list[list[int]] = [[] for _ in range(self._classes)]
        for byte, kind in enumerate(self._kind):
            bytes_of[kind].append(byte)
        forced = []
        for row in self.automaton.next.tolist():
            kinds = [kind for kind, after in enumerate(row) if after]
            single = len(kinds) == 1 and len(bytes_of[kinds[0]]) == 1
            forced.append(bytes_of[kinds[0]][0] if single else -1)
        return forced

    def _canonical(self, automaton: MaskedAutomaton) -> tuple[MaskRows, NDArray[np.int64]]:
        """The masks for the policy ``canonical``, and each state's row in them: where bytes are forced, only one token is legal."""
        rows: dict[int, int] = {}
        of = automaton.mask_of.copy()
        for state in range(1, self.stopped):
            first = self.vocabulary.canonical(self.forced_bytes(state))[:1]
            if first:
                of[state] = rows.setdefault(first[0], len(automaton.rows) + len(rows))
        rows_of_masks = [*automaton.rows.each]
        for token in rows:
            mask = np.zeros(automaton.rows.width, np.uint32)
            mask[token >> 5] = 1 << (token & 31)
            rows_of_masks.append(Row.of(mask.view(np.int32)))
        used, numbers = np.unique(of, return_inverse=True)
        return MaskRows(automaton.rows.width, [rows_of_masks[number] for number in used.tolist()]), numbers
