"""Several drafters, one tree: ``strategy="prompt_lookup+medusa"``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field

from ..errors import SettingsError
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import NO_PARENT, Topology


class MergedSettings(Settings):
    """How large the joint tree may grow."""

    nodes: int = Field(
        64, ge=2, le=1024, description="Node budget of the joint tree, root included; earlier drafters first."
    )


@dataclass
class MergedState:
    """State of every part, and for each the order of the joint block that puts its own nodes first."""

    parts: list[Any]
    orders: list[list[int]]


class Merged(Strategy):
    """Puts the proposals of several strategies under one root and verifies them together.

    Every part observes the whole joint block, its own nodes first, in its own order: a part that reads its nodes by
    index works unchanged.
    """

    name = "merged"
    summary = "The proposals of several strategies, verified as one tree."
    settings_class = MergedSettings

    def __init__(self, parts: Sequence[Strategy], settings: MergedSettings | None = None) -> None:
        super().__init__(settings or MergedSettings())
        if len({part.name for part in parts}) < len(parts):
            raise SettingsError(f"a strategy can be merged only once: {'+'.join(p.name for p in parts)}")
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in parts)
        self.exact = all(part.exact for part in parts)
        self.needs_assistant = any(part.needs_assistant for part in parts)
        self.on_device = all(part.on_device for part in parts)

    def start(self, context: Context) -> MergedState:
        return MergedState([part.start(context) for part in self.parts], [])

    def propose(self, state: MergedState, sequences: Sequences) -> Draft:
        topology, tokens, owned = Topology.chain(0), [], []
        for part, own in zip(self.parts, state.parts, strict=True):
            draft = part.propose(own, sequences)
            if not isinstance(draft.topology, Topology):
                raise SettingsError(f"{part.name} proposes trees of varying shape, which cannot be merged yet")
            kept = draft.topology.head(self.settings.nodes - len(topology) + 1)
            if kept.parents.count(NO_PARENT) < draft.topology.parents.count(NO_PARENT):
                raise SettingsError(
                    f"{part.name} needs {len(draft.topology)} nodes, of which guesses alone can be left out; a budget of "
                    f"{self.settings.nodes} nodes leaves it {len(kept)}"
                )
            owned.append(range(len(topology), len(topology) + kept.width))
            tokens.append(draft.tokens[:, : kept.width])
            topology = topology.merge(kept)
        everything = range(1, len(topology))
        state.orders = [[0, *mine, *(n for n in everything if n not in mine)] for mine in owned]
        return Draft(torch.cat(tokens, dim=1), topology)

    def observe(self, state: MergedState, step: Step) -> None:
        for part, own, order in zip(self.parts, state.parts, state.orders, strict=True):
            if type(part).observe is not Strategy.observe:
                # The block may be padded behind the joint tree.
                part.observe(own, _reordered(step, order + list(range(len(order), step.nodes.shape[1]))))


def _reordered(step: Step, order: list[int]) -> Step:
    """The same step with its nodes in another order."""
    index = torch.tensor(order, device=step.nodes.device)
    rank = torch.empty_like(index)
    rank[index] = torch.arange(len(order), device=index.device)
    return replace(
        step,
        nodes=step.nodes[:, index],
        chosen=step.chosen[:, index],
        path=rank[step.path],
        logits=step.logits[:, index],
        hidden=step.hidden[:, index],
    )
