"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): drafts what followed the row's last tokens earlier, in this or other calls.

As in the paper's section 4.1, the row's last tokens are looked up in an index of earlier text. A tree of the continuations is
expanded greedily by their frequencies. A longer match gives a longer draft.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import Field
from torch import Tensor

from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..text_memory import ChainedText, TextMemory
from ..tree import NO_PARENT
from .followed_text import follow_rows
from .suffix_index import DraftedNode, RowText, expand, path_first


class SuffixSettings(Settings):
    """The length of matches, the size of drafts, and the texts that are searched."""

    alpha: float = Field(
        4.0,
        gt=0,
        le=64,
        description="Maximum number of draft tokens per token of the match (the paper's α: MAX_SPEC = α p).",
    )
    nodes: int = Field(
        32, ge=1, le=256, description="Maximum number of draft tokens per row, however long the match is."
    )
    min_probability: float = Field(
        0.1, ge=0, le=1, description="Minimum probability of a draft token, estimated from the frequencies on its path."
    )
    depth: int = Field(
        64,
        ge=1,
        le=1024,
        description="Maximum length of the suffix that is looked up, in tokens (the paper's depth of the tree).",
    )
    occurrences: int = Field(
        16,
        ge=1,
        le=1024,
        description="Maximum number of matches counted, the latest first, in each of three sources: the row, outputs of "
        "earlier calls, and texts given to remember().",
    )
    remember: int = Field(
        65536,
        ge=0,
        description="Maximum number of tokens kept of the outputs of earlier calls; the least recently used outputs are "
        "dropped first. 0 keeps none.",
    )


@dataclass
class _State:
    """The state of a call.

    Attributes:
        rows: the text of each row.
        memory: outputs of earlier calls; empty if no outputs are kept.
        given: texts that the user passed to :func:`decoders.remember`; None if there are none.
        append_only: whether the rows' texts only grow.
        matches: number of drafts of single rows that came from a match.
        matched: total length in tokens of the matches behind these drafts.
        drafted: total number of tokens in these drafts.
        used: ids in `memory` of the outputs in which a match was found.
        used_given: ids in `given` of the user's texts in which a match was found.
    """

    rows: list[RowText]
    memory: TextMemory
    given: TextMemory | None
    append_only: bool
    matches: int = 0
    matched: int = 0
    drafted: int = 0
    used: set[int] = field(default_factory=set)
    used_given: set[int] = field(default_factory=set)


class Suffix(Strategy):
    """Looks up the row's last tokens in earlier text, and drafts a tree of the tokens that followed there.

    Earlier text is the row itself, the outputs of earlier calls, and the texts given to :func:`decoders.remember`. Every length ``p``
    of a match gives a tree of at most ``alpha * p`` nodes (the paper's MAX_SPEC), from the continuations of all matches of at least
    this length. The score of a tree is the sum of its nodes' probabilities. The tree with the best score is drafted. A continuation
    that reaches the end of the row is repeated periodically, so that drafts in periodic text have their full length.

    All work is done on the host. The search for a row takes 10 to 30 microseconds.
    """

    name = "suffix"
    summary = (
        "Proposes a tree of the tokens that followed the same suffix earlier, in the text or in earlier calls' outputs."
    )
    settings_class = SuffixSettings
    auto_place = 20
    hints = {"prompt_lookup_num_tokens": "nodes", "max_matching_ngram_size": "depth"}
    rests = True
    rows_apart = False
    on_device = False
    #: Usual acceptance rates of the grades from 0 on (:func:`_grade`).
    grade_rates = (
        0.0, 0.0, 0.0, 0.1, 0.35, 0.6, 0.15, 0.65, 0.95, 0.25, 0.8, 0.9, 0.3, 0.9, 0.95, 0.5, 0.95, 0.98,
    )  # fmt: skip

    def start(self, context: Context) -> _State:
        s: SuffixSettings = self.settings
        memory: TextMemory = context.memory("texts", partial(TextMemory, s.remember))
        # If this strategy drafts for a draft model, the target may reject tokens, which are then removed from the text.
        rows = [RowText() for _ in range(context.rows)]
        state = _State(rows, memory, context.texts, append_only=context.level == 0)
        if context.sequences is not None:
            _read(state, context.sequences)
        return state

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        finished = _read(state, sequences)
        with state.memory.lock, nullcontext() if state.given is None else state.given.lock:
            trees = [
                ([], []) if ended else self._tree(state, row) for row, ended in zip(state.rows, finished, strict=True)
            ]
        return _draft(trees)

    def observe(self, state: _State, step: Step) -> None:
        if any(step.sequences.read().finished):  # `propose` updates the texts of unfinished rows
            _read(state, step.sequences)

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        """Rows that stay keep their texts. The outputs of rows that left are added to the remembered outputs."""
        before, places = state.rows, rows.tolist()
        state.rows = [before[place] if place >= 0 else RowText() for place in places]
        if state.append_only:
            for place in set(range(len(before))) - set(places):
                state.memory.add(before[place].output())
        return state

    def finish(self, state: _State) -> None:
        """Adds the rows' outputs to the outputs remembered for later calls."""
        if state.append_only:
            for row in state.rows:
                state.memory.add(row.output())

    def details(self, state: _State) -> Mapping[str, Any]:
        return {
            "mean_match": round(state.matched / max(state.matches, 1), 2), "drafted": state.drafted,
            "texts_used": len(state.used), "texts": state.memory.texts, "remembered": state.memory.tokens,
            "given_used": len(state.used_given), "given": 0 if state.given is None else state.given.texts,
        }  # fmt: skip

    def _tree(self, state: _State, row: RowText) -> tuple[list[DraftedNode], list[int]]:
        """The draft tree of a row, and its nodes' grades."""
        s: SuffixSettings = self.settings
        matches = self._matches(state, row)
        best: list[DraftedNode] = []
        best_score, best_length = 0.0, 0
        for count, match in enumerate(matches, 1):
            if count < len(matches) and matches[count].length == match.length:
                continue  # the next match is equally long and belongs to the same tree
            most = min(int(s.alpha * match.length) or 1, s.nodes)
            if most <= best_score:
                break  # a node adds at most 1 to the score, so no shorter match can have a better tree
            nodes, score = expand([m.continuation for m in matches[:count]], most, s.min_probability)
            if score > best_score:
                best, best_score, best_length = nodes, score, match.length
        if best:
            state.matches, state.matched = state.matches + 1, state.matched + best_length
            state.drafted += len(best)
        # The draft of several rows may be cut to its first nodes, so there the likeliest nodes stay in front.
        if len(state.rows) == 1:
            best = path_first(best)
        return best, [_grade(best_length, node) for node in best]

    def _matches(self, state: _State, row: RowText) -> list[_Match]:
        """The earlier occurrences of the row's last tokens, the longest matches first.

        Equally long matches are sorted by source: the row itself, outputs of earlier calls, the user's texts. Within a source the
        latest occurrence is first.
        """
        s: SuffixSettings = self.settings
        own = row.index
        suffix = own.tokens[-s.depth :]
        matches = [
            _Match(length, _continued(own, end, s.nodes))
            for length, end in own.occurrences(suffix, s.occurrences, len(own) - 1)
        ]
        for memory, used in ((state.memory, state.used), (state.given, state.used_given)):
            if memory is None or not memory.tokens:
                continue
            for length, end in memory.index.occurrences(suffix, s.occurrences, len(memory.index)):
                number = memory.text_at(end)
                if number is None or end + 1 == (stop := memory.end_of(number)):
                    continue
                matches.append(_Match(length, memory.index.tokens[end + 1 : min(end + 1 + s.nodes, stop)]))
                memory.use(number)
                used.add(number)
        matches.sort(key=lambda match: -match.length)
        return matches


@dataclass(frozen=True, slots=True)
class _Match:
    """An earlier occurrence of the row's last tokens.

    Attributes:
        length: number of matching tokens.
        continuation: the tokens that followed there.
    """

    length: int
    continuation: array[int]


def _continued(text: ChainedText, end: int, most: int) -> array[int]:
    """The `most` tokens that follow index `end` in a row's own text. If fewer follow, these are repeated periodically."""
    following = text.tokens[end + 1 : end + 1 + most]
    if len(following) < most:
        following = (following * (most // len(following) + 1))[:most]
    return following


def _grade(length: int, node: DraftedNode) -> int:
    """The grade of a draft token, 3 … 17: three grades for each class of match lengths (1, 2-3, 4-7, 8-15, more).

    Within a class, the grade depends on the share of the parent's occurrences that continue with the token. First grade: share below
    a half. Second: share of at least a half, or a single occurrence. Third: all occurrences, if there are several.
    """
    agreed = 2 if node.share == 1 and node.support > 1 else 1 if node.share >= 0.5 else 0
    return 3 * min(length.bit_length(), 5) + agreed


def _read(state: _State, sequences: Sequences) -> list[bool]:
    """Updates the rows' texts, and returns which rows have finished."""

    def another(row: RowText) -> RowText:
        state.memory.add(row.output())
        return RowText()

    return follow_rows(state.rows, sequences, state.append_only, another)


def _draft(trees: Sequence[tuple[list[DraftedNode], list[int]]]) -> Draft:
    """Puts the rows' trees into one draft. Smaller trees are padded."""
    width = max(len(nodes) for nodes, _ in trees)
    tokens, grades, parents, chains = [], [], [], True
    for nodes, own in trees:
        missing = width - len(nodes)
        tokens.append([node.token for node in nodes] + [-1] * missing)
        grades.append(own + [0] * missing)
        chains = chains and all(node.parent == place for place, node in enumerate(nodes))
        parents.append([NO_PARENT, *(node.parent for node in nodes)] + [NO_PARENT] * missing)
    return Draft.listed(tokens, None if chains else parents, width, grades)
