"""Speculative decoding (Leviathan et al. 2023; Chen et al. 2023): a smaller model drafts, the target verifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..drafters import Drafter, Expansion, OtherVocabulary
from ..errors import SettingsError, UnsupportedError
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Step
from ..tree import TreeTensors
from .draft_model import DraftModelSettings, DraftModelStrategy
from .draft_tree import GRADE_RATES, DraftTree, StaticTree, TreeForm, TreeSettings, grades_of, shape_of
from .text_drafter import TextDrafter

#: With ``alignment="auto"``, a draft model that has at least this share of the target's tokens drafts tokens, not strings, because it
#: splits texts much as the target does.
NEARLY_ALL = 0.98


class ShapeSettings(TreeSettings):
    """The length and the shape of the drafts of a draft model."""

    length: int = Field(
        5, ge=1, le=32, description="Number of tokens drafted per step (the papers' K or gamma); for a tree, its depth."
    )
    schedule: Literal["constant", "heuristic"] = Field(
        "constant",
        description="constant: always `length` tokens. heuristic: two tokens more after a draft that was fully accepted, "
        "otherwise one token less (transformers' rule). For chains only.",
    )
    max_length: int = Field(
        16, ge=1, le=32, description="Maximum number of tokens drafted per step with schedule heuristic."
    )
    tree: TreeForm = "none"
    template: tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="Paths of a static tree, each a tuple of ranks, one per level (as Medusa's tree choices). None: built "
        "from the other settings.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.schedule == "heuristic" and self.tree != "none":
            raise ValueError(f"schedule 'heuristic' is for chains, not for a {self.tree} tree")
        if self.template is not None and self.tree != "static":
            raise ValueError(f"a template needs tree='static', not tree={self.tree!r}")
        return self


class SpeculativeSettings(ShapeSettings, DraftModelSettings):
    """The length and the shape of drafts, and how a draft model with another vocabulary drafts."""

    alignment: Literal["auto", "tokens", "strings"] = Field(
        "auto",
        description="How a draft model with another vocabulary drafts. tokens: only tokens that both vocabularies have "
        "(token-level intersection). strings: a chain of its likeliest tokens, whose text is then tokenized by "
        "the target's tokenizer. auto: tokens for trees, and for draft models that have nearly all of the "
        "target's tokens; otherwise strings.",
    )


@dataclass
class _State:
    """The state of a call.

    Attributes:
        tree: the shape of drafts; None for chains.
        lengths: ``[B]`` int64, number of tokens to draft in each row; used by the heuristic schedule only.
        own_nodes: number of nodes in the last draft, root included.
        limit: greatest number of tokens of the next draft, from :meth:`Speculative.limit`; None for no limit.
        other: the vocabularies of target and draft model if they differ; None if they are equal or there are no tokenizers to
            compare.
        mask: the mask token, if the draft model drafts a chain in one pass over masks; None if it drafts token by token.
    """

    drafter: Drafter | TextDrafter
    tree: DraftTree | None
    lengths: Tensor
    own_nodes: int = 1
    limit: int | None = None
    other: OtherVocabulary | None = None
    mask: int | None = None


class Speculative(DraftModelStrategy):
    """Drafts a chain (Leviathan et al. 2023, Algorithm 1, with the call's verifier), or a tree of the draft model's best continuations.

    When sampling with the coupled verifier, the draft model draws with the target's noise (Daliri et al. 2024), so that both mostly
    draw the same token. With other verifiers the draft model draws with different noise.

    A draft model whose config has a ``pard_token`` (An et al. 2025, "PARD") drafts a chain of any length in two passes: one over the
    committed tokens and one over mask tokens. It drafts trees level by level, and in calls with a grammar it drafts token by token.
    """

    name = "speculative"
    summary = "A smaller model of the same family drafts a chain or a tree of tokens."
    settings_class: ClassVar[type[Settings]] = SpeculativeSettings
    auto_place = 50
    auto_settings = {"length": 12}
    hints = {"num_assistant_tokens": "length", "num_assistant_tokens_schedule": "schedule"}
    on_device = True
    rests = True
    grade_rates = GRADE_RATES

    def __init__(self, settings: Settings | None = None, /, **values: Any) -> None:
        super().__init__(settings, **values)
        # The heuristic schedule sets the next draft's length on the host.
        self.on_device = self.settings.schedule == "constant"

    def start(self, context: Context) -> _State:
        s: ShapeSettings = self.settings
        other, lengths = self.other_vocabulary(context), torch.full((context.rows,), s.length, device=context.device)
        ahead, children = s.length if s.schedule == "constant" else max(s.length, s.max_length), 1
        if other is not None and self._alignment(other) == "strings":
            return _State(TextDrafter(context, other, ahead), None, lengths, other=other)
        tree: DraftTree | None = None
        if s.template is not None:
            tree = StaticTree(s.template, context.rows, context.device)
        elif s.tree != "none":
            tree = shape_of(self.name, s.tree, s.length, s.children, s.nodes, s.beam, context)
        if tree is not None:
            ahead, children = tree.ahead, tree.children
        drafter = context.draft(self.draft_model(context), ahead=ahead, children=children)
        # Mask tokens work for chains without a grammar: a grammar must know each draft token before the next token is drafted.
        mask = drafter.mask_token if tree is None and context.guide is None else None
        if tree is not None and tree.least_children > drafter.children:
            raise SettingsError(
                f"the template needs the {tree.children} best continuations of a node, but the vocabulary has {drafter.vocab_size} "
                "tokens"
            )
        return _State(drafter, tree, lengths, other=other, mask=mask)

    def other_vocabulary(self, context: Context) -> OtherVocabulary | None:
        """The vocabularies of draft model and target if they differ; None if they are equal or there are no tokenizers to compare."""
        return context.vocabulary_of(self.draft_model(context))

    def _alignment(self, other: OtherVocabulary) -> str:
        """The value of the setting `alignment`, with ``"auto"`` replaced by ``"tokens"`` or ``"strings"``.

        Raises:
            UnsupportedError: the settings are ``alignment="strings"``, which drafts chains only, and a tree.
        """
        s: SpeculativeSettings = self.settings
        if s.alignment == "strings" and s.tree != "none":
            raise UnsupportedError(
                "a draft model that drafts text (alignment='strings') drafts chains only: take tree='none'"
            )
        if s.alignment != "auto":
            return s.alignment
        return "strings" if s.tree == "none" and other.shared < NEARLY_ALL else "tokens"

    def keeps_rows(self, state: _State) -> bool:
        return not isinstance(state.drafter, TextDrafter)  # a TextDrafter keeps texts and cache of the former rows

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        s: ShapeSettings = self.settings
        if state.tree is not None:
            state.tree = state.tree.of_rows(context.rows, context.device)
        lengths = state.lengths[rows.clamp(min=0)] if len(state.lengths) else rows
        state.lengths = torch.where(rows >= 0, lengths, s.length)
        return state

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        drafter = state.drafter
        if isinstance(drafter, TextDrafter):
            draft = drafter.draft(sequences, self._length(state, sequences))
        else:
            drafter.begin(sequences)
            draft = self._chain(state, drafter, sequences) if state.tree is None else state.tree.draft(drafter)
        state.own_nodes = draft.tokens.shape[1] + 1
        return draft

    def observe(self, state: _State, step: Step) -> None:
        s: ShapeSettings = self.settings
        if not isinstance(state.drafter, TextDrafter):
            displaced = state.tree.depth if state.tree is not None else 0
            if state.mask is not None:  # in the draft model's cache, the slots of draft tokens hold masks
                displaced = state.own_nodes - 1
            state.drafter.observe(step, state.own_nodes, displaced=displaced)
        if s.schedule == "heuristic":
            whole = step.accepted >= state.lengths
            state.lengths = torch.where(whole, state.lengths + 2, state.lengths - 1).clamp(1, s.max_length)

    def limit(self, state: _State, tokens: int) -> None:
        state.limit = tokens

    def details(self, state: _State) -> Mapping[str, Any]:
        if state.other is None:
            return {}
        facts = {"alignment": self._alignment(state.other), "shared_tokens": round(state.other.shared, 3)}
        return facts | ({"draft_passes": state.drafter.passes} if isinstance(state.drafter, TextDrafter) else {})

    def _length(self, state: _State, sequences: Sequences) -> int:
        """The number of tokens to draft in this step."""
        s: ShapeSettings = self.settings
        length = s.length
        if s.schedule == "heuristic":  # all rows draft as many tokens as the longest draft needs
            length = int(torch.where(sequences.finished, 1, state.lengths).max())
        return length if state.limit is None else min(length, state.limit)

    def _chain(self, state: _State, drafter: Drafter, sequences: Sequences) -> Draft:
        s: ShapeSettings = self.settings
        length, varies = self._length(state, sequences), s.schedule == "heuristic"
        if state.mask is not None:
            passes = [drafter.root(), *_places(drafter, state.mask, sequences, length)]
            tokens = torch.cat([p.tokens[:, :, 0] for p in passes], dim=1)
        else:
            passes = [drafter.extend() for _ in range(length)]
            tokens = drafter.drafted(length)
        if varies:
            index = torch.arange(length, device=tokens.device)
            tokens = torch.where(index < state.lengths[:, None], tokens, -1)
        drawn_from = [p.scores for p in passes if p.scores is not None]
        draft = Draft.chain(tokens, torch.cat(drawn_from, dim=1) if drawn_from else None)
        return replace(draft, grades=grades_of(torch.cat([p.weights[:, :, 0] for p in passes], dim=1)))


def _places(drafter: Drafter, mask: int, sequences: Sequences, length: int) -> list[Expansion]:
    """The continuations for all tokens of a chain but the first. A PARD draft model computes them in one pass over mask tokens."""
    if length == 1:
        return []
    rows, index = len(sequences.length), torch.arange(length, device=sequences.length.device)
    offsets, visible = index.expand(rows, length), (index <= index[:, None]).expand(rows, length, length)
    tree = TreeTensors((offsets - 1).clamp(min=0), offsets, visible, visible)
    return [drafter.expand(torch.full_like(offsets[:, 1:], mask), tree)]
