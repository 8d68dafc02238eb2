"""Merges the drafts of several strategies into one tree: ``strategy="prompt_lookup+medusa"``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ..costs import node_budget
from ..errors import SettingsError, UnsupportedError, amount
from ..settings import Settings
from ..strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy, check_draft, finish_all, merged_traits
from ..tree import NO_PARENT, Topology, TreeTensors

#: Greatest number of nodes of the joint tree, root included, if the costs of a step have not been measured.
NODES = 64


class MergedSettings(Settings):
    """The size of the joint tree."""

    nodes: int | None = Field(
        None,
        ge=2,
        le=1024,
        description="Most nodes of the joint tree, root included. Earlier drafters get nodes first, so a large first draft (Medusa's "
        "has 63 nodes) leaves none for the others. None: as many as the measured costs of a step allow, or 64 without costs.",
    )


@dataclass
class MergedState:
    """The state of a call.

    Attributes:
        parts: the state of each part. A part is one of the merged strategies.
        owned: for each part, the indices of its draft's nodes in the joint block.
        nodes: greatest number of nodes of the joint block, root included.
        layers: indices of the hidden layers that each part reads.
    """

    parts: list[Any]
    owned: list[range]
    nodes: int
    layers: tuple[tuple[int, ...], ...] = ()


def union(layers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The indices of all layers that any of several strategies reads. layers: for each strategy, the indices of its layers."""
    return tuple(dict.fromkeys(layer for own in layers for layer in own))


def layers_of_part(layers: Tensor | None, every: tuple[int, ...], own: tuple[int, ...]) -> Tensor | None:
    """The hidden states of the layers `own`, from `layers` ``[B, N, T, H]``, the states of the layers `every`; None without layers."""
    if layers is None or every == own:
        return layers
    return torch.stack([layers[:, :, every.index(layer)] for layer in own], dim=2) if own else None


class Merged(Strategy):
    """Merges the drafts of several strategies under one root. The target verifies them together.

    `observe` of every part gets the whole joint block. The nodes of the part's own draft are moved right after the root, in the
    draft's order, so that their indices are the same as in the draft.
    """

    name = "merged"
    summary = "The proposals of several strategies, verified as one tree."
    settings_class = MergedSettings

    def __init__(self, parts: Sequence[Strategy], settings: MergedSettings | None = None) -> None:
        super().__init__(settings or MergedSettings.parse({}))
        if len({part.name for part in parts}) < len(parts):
            raise SettingsError(f"a strategy can be merged only once: {'+'.join(p.name for p in parts)}")
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in parts)
        self.declare(**merged_traits(self.parts))

    def compose(self, resolve: Callable[..., Strategy], registered: Mapping[str, type[Strategy]]) -> None:
        for part in self.parts:
            part.compose(resolve, registered)
        self.declare(**merged_traits(self.parts))

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        return union(part.layers_for(config, count) for part in self.parts)

    def settings_in_force(self) -> dict[str, Any]:
        return {part.name: part.settings_in_force() for part in self.parts} | {Merged.name: super().settings_in_force()}

    def start(self, context: Context) -> MergedState:
        config, count = context.model.config, context.decoder_layers
        layers = tuple(part.layers_for(config, count) for part in self.parts)
        # `observe` may come before the first `propose`: until then no part has nodes in a block.
        owned = [range(1, 1)] * len(self.parts)
        state = MergedState([], owned, node_budget(context.costs, self.settings.nodes, NODES), layers)
        try:
            for part in self.parts:
                state.parts.append(part.start(context.part(part)))
        except BaseException as error:
            finish_all(zip(self.parts, state.parts, strict=False), error)
            raise
        return state

    def keeps_rows(self, state: MergedState) -> bool:
        return all(part.keeps_rows(own) for part, own in zip(self.parts, state.parts, strict=True))

    def rebatch(self, state: MergedState, rows: Tensor, context: Context) -> MergedState:
        state.parts = [
            part.rebatch(own, rows, context.part(part)) for part, own in zip(self.parts, state.parts, strict=True)
        ]
        return state

    def prefill(self, state: MergedState, chunk: PromptChunk) -> None:
        for part, own in zip(self.parts, state.parts, strict=True):
            if part.reads_prompt:
                logits = chunk.logits if part.prompt_logits else None
                part.prefill(own, replace(chunk, layers=self._layers(state, part, chunk.layers), logits=logits))

    def limit(self, state: MergedState, tokens: int) -> None:
        for part, own in zip(self.parts, state.parts, strict=True):
            part.limit(own, tokens)

    def details(self, state: MergedState) -> dict[str, Any]:
        """For each part's name, the details of the part. Parts without details are left out."""
        said = {part.name: dict(part.details(own)) for part, own in zip(self.parts, state.parts, strict=True)}
        return {name: details for name, details in said.items() if details}

    def finish(self, state: MergedState) -> None:
        finish_all(zip(self.parts, state.parts, strict=True))

    def _layers(self, state: MergedState, part: Strategy, layers: Tensor | None) -> Tensor | None:
        """The hidden states of the layers that `part` reads, selected from `layers`; None if `layers` is None."""
        if layers is None:
            return None
        return layers_of_part(layers, union(state.layers), state.layers[self.parts.index(part)])

    def propose(self, state: MergedState, sequences: Sequences) -> Draft:
        drafts, owned, size = [], [], 1
        for part, own in zip(self.parts, state.parts, strict=True):
            draft = part.propose(own, sequences)
            check_draft(draft, part.name, len(sequences.length))
            drafts.append(draft.head(self._room(part, draft, state.nodes - size + 1) - 1))
            end = size + drafts[-1].tokens.shape[1]
            owned.append(range(size, end))
            size = end
        state.owned = owned
        if not (on_host := all(draft.on_host for draft in drafts)):
            drafts = [draft.moved(sequences.length.device) for draft in drafts]
        tokens = torch.cat([draft.tokens for draft in drafts], dim=1)
        depth = max(draft.levels for draft in drafts)
        names = [part.name for part, own in zip(self.parts, owned, strict=True) for _ in own]
        topology = joined([draft.topology for draft in drafts], tokens)
        scores = self._scores(drafts)
        return Draft(tokens, topology, scores, depth, drafters=[names] * len(tokens), on_host=on_host)

    def _room(self, part: Strategy, draft: Draft, left: int) -> int:
        """The number of nodes of `draft` to verify, root included. left: number of nodes that the budget of the joint block still
        allows, root included.

        Nodes that are not draft tokens, such as lookahead's window, are never left out, even if they exceed a budget from costs.

        Raises:
            SettingsError: the user has set the budget, and it is too small for the nodes that cannot be left out.
        """
        shape = draft.topology
        needed = 1
        if isinstance(shape, Topology):
            needed = max(node + 1 for node, parent in enumerate(shape.parents) if parent == NO_PARENT)
        if needed > left and self.settings.nodes is not None:
            raise SettingsError(
                f"{part.name} needs {amount(len(shape), 'node')}, {needed} of which cannot be left out; a budget of "
                f"{amount(self.settings.nodes, 'node')} leaves this strategy {left}: raise nodes of merged"
            )
        return max(left, needed)

    def _scores(self, drafts: list[Draft]) -> Tensor | None:
        """The scores of the joint draft, in which a draft token without scores has probability 1; None if no draft has scores."""
        drawn = [draft.scores for draft in drafts if draft.scores is not None]
        if not drawn:
            return None
        if len(drawn) > 1:
            raise UnsupportedError(
                f"{self.name!r}: two of these strategies draw draft tokens with the same noise: only verifier='coupled' allows this"
            )
        vocabulary = torch.arange(drawn[0].shape[-1], device=drawn[0].device)
        return torch.cat(
            [
                draft.scores
                if draft.scores is not None
                else torch.where(draft.tokens[..., None] == vocabulary, 0.0, float("-inf"))
                for draft in drafts
            ],
            dim=1,
        )

    def observe(self, state: MergedState, step: Step) -> None:
        count = step.own_nodes
        for part, own, mine in zip(self.parts, state.parts, state.owned, strict=True):
            if not part.observes:
                continue
            if count is not None:  # only the first `count` nodes of this strategy's draft are in the block
                mine = range(min(mine.start, max(count, 1)), min(mine.stop, max(count, 1)))
            own_nodes = 0 if count == 0 else len(mine) + 1  # without nodes of the part's draft that `propose` left out
            layers = self._layers(state, part, step.layers)
            part.observe(own, _first(replace(step, layers=layers, own_nodes=own_nodes), mine))


def joined(trees: Sequence[Topology | TreeTensors], tokens: Tensor) -> Topology | TreeTensors:
    """Joins trees under one root. Returns a :class:`Topology` if all trees are topologies.

    Args:
        tokens: ``[B, N-1]``, the draft tokens of all trees; only the number of rows and the device are used.
    """
    fixed = [tree for tree in trees if isinstance(tree, Topology)]
    if len(fixed) == len(trees):
        return functools.reduce(Topology.merge, fixed)
    rows, device = len(tokens), tokens.device
    return functools.reduce(
        TreeTensors.merge, [t.tensors(rows, device) if isinstance(t, Topology) else t for t in trees]
    )


def _first(step: Step, mine: range) -> Step:
    """Returns `step` with the nodes `mine` right after the root. The host reads no tensors, so CUDA graphs can record it."""
    begin, end = mine.start, mine.stop
    if begin == 1:
        return step

    def moved(nodes: Tensor) -> Tensor:
        return torch.cat([nodes[:, :1], nodes[:, begin:end], nodes[:, 1:begin], nodes[:, end:]], dim=1)

    path = step.path
    inside, before = (path >= begin) & (path < end), (path >= 1) & (path < begin)
    return replace(
        step,
        nodes=moved(step.nodes),
        chosen=moved(step.chosen),
        path=torch.where(inside, path - begin + 1, torch.where(before, path + len(mine), path)),
        logits=moved(step.logits),
        hidden=moved(step.hidden),
        layers=moved(step.layers) if step.layers is not None else None,
    )
