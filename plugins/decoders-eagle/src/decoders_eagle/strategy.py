"""EAGLE (Li et al. 2024, arXiv 2401.15077): a small network drafts a chain or a tree, token by token, from hidden states."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from decoders import Context, Sequences, Strategy, TreeTensors, hookimpl
from decoders.drafters import DraftVocabulary
from decoders.errors import SettingsError, UnsupportedError
from decoders.heads.network_files import find_network
from decoders.strategies.draft_tree import GRADE_RATES, DraftTree, TreeForm, TreeSettings, levels_of, shape_of
from decoders.strategies.feature_drafter import FeatureDrafter, FeatureState, ReadsFeatures, dtype_of, tokens_from

from .network import NAME, Network, load


class TinyEagleSettings(TreeSettings):
    """The network, and the length and shape of its drafts."""

    network: str | None = Field(
        None, description="Folder of the network. None: the folder `tiny_eagle` beside the model."
    )
    length: int | None = Field(
        None,
        ge=1,
        le=32,
        description="Tokens drafted per path. None: 5, or fewer if the costs of a step allow fewer nodes.",
    )
    tree: TreeForm = "dynamic"


class TinyEagle(ReadsFeatures):
    """Drafts with the network. The network's predictions replace hidden states that the target has not computed yet."""

    name = NAME
    summary = "A small layer drafts from the target's hidden states: an example of a feature drafter."
    needs = "network"
    settings_class = TinyEagleSettings
    hints = {"num_assistant_tokens": "length"}
    grade_rates = GRADE_RATES

    def start(self, context: Context) -> FeatureState:
        s: TinyEagleSettings = self.settings
        if context.level > 0:
            raise UnsupportedError(f"{NAME} cannot draft for a draft model: it reads the target's hidden states")
        folder = find_network(s.network, context.model.config, NAME, "a network", "network")
        network = load(folder, context.device, dtype_of(context))
        width = context.model.config.get_text_config(decoder=True).hidden_size
        if network.config.hidden_size != width:
            raise SettingsError(
                f"{NAME}: the network in {folder} is for hidden size {network.config.hidden_size}, this target has {width}"
            )
        depth = levels_of(context, s.length, 5)
        tree = shape_of(NAME, s.tree, depth, s.children, s.nodes, s.beam, context)
        return FeatureState(TinyEagleDrafter(context, network, depth, tree), tree)


class TinyEagleDrafter(FeatureDrafter):
    """Runs the network in one call. Slot ``j`` reads token ``j + 1`` and the target's hidden state of token ``j``. If the target has
    not computed this state yet, slot ``j`` reads the network's output at slot ``j - 1`` instead. A node at depth ``d`` is in slot
    ``length - 2 + d``.
    """

    def __init__(self, context: Context, network: Network, depth: int, tree: DraftTree) -> None:
        vocabulary = DraftVocabulary(context.vocab_size)
        super().__init__(context, network.config.hidden_size, depth + 1, 0, vocabulary, tree.children)
        self.embed, self.head = context.embed, context.head
        example = self.window[:1, :1]
        self.module = context.module(network, ahead=tree.ahead + self.width, example=(example, example))

    def own_parts(self) -> Any:
        return self.module

    def read(self, base: Tensor, features: Tensor, sequences: Sequences) -> None:
        tokens = tokens_from(sequences, base + 1, features.shape[1]).clamp(max=self.most_id)
        self.states = self.module(base, self.embed(tokens), features)[
            :, -1:
        ]  # the root's state; `further` appends the states of the nodes that it runs

    def first(self) -> Tensor:
        return self.head(self.states)

    def further(self, nodes: Tensor, tree: TreeTensors) -> Tensor:
        parents = tree.parents[:, -nodes.shape[1] :, None].expand(-1, -1, self.states.shape[-1])
        states = self.module(self.sequences.length - 2, self.embed(nodes), self.states.gather(1, parents), tree=tree)
        self.states = torch.cat([self.states, states], dim=1)
        return self.head(states)


@hookimpl
def decoders_strategies() -> list[type[Strategy]]:
    return [TinyEagle]
