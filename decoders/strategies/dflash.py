"""DFlash (arXiv 2602.06036) and its family: a small network drafts a block of tokens in one pass, from hidden states of the target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..drafters import DraftVocabulary, Expansion, ModulePasses
from ..errors import SettingsError, UnsupportedError, amount
from ..heads.block_heads import BlockHead, DraftedBlock
from ..heads.dflash import embedding_of
from ..heads.dflash_files import HEADS, DFlashFiles, find_draft_model, load_draft_model, read_config
from ..strategy import Context, PromptChunk, Sequences, Step
from ..tree import TreeTensors
from .draft_tree import GRADE_RATES, Beam, Children, NodeBudget, TreeForms, levels_of, shape_of
from .feature_drafter import BlockDrafter, FeatureState, ReadsFeatures, dtype_of, embeddings_of


class DFlashSettings(TreeForms):
    """The network that drafts, and the length and shape of its drafts."""

    draft_model: str | None = Field(
        None,
        description="Folder of the draft model, in the format of the authors (DFlash, DFlash2, JetSpec), DeepSpec (DSpark), "
        "SpecForge (Domino), LiLiCorr, speculators or transformers. None: the subfolder `dflash` of the model's "
        "folder.",
    )
    length: int | None = Field(
        None,
        ge=1,
        le=127,
        description="Number of tokens drafted per forward pass, at most as many as the draft model was trained for. None: as "
        "many as in training, or fewer if the measured costs of a step allow fewer.",
    )
    tree: Literal["none", "static", "dynamic"] = Field(
        "none",
        description="Shape of a draft. none: a chain of the best token at each position. static: a tree of fixed shape, of "
        "the best tokens at each position. dynamic: a tree of the likeliest paths, chosen in every step.",
    )
    nodes: NodeBudget = None
    children: Children = 4
    beam: Beam = 4


@dataclass
class _State(FeatureState):
    """The state of a call.

    Attributes:
        of_head: for each target layer that the network reads, whether it is the last layer, whose output is read after the final norm.
    """

    of_head: tuple[bool, ...]


class DFlash(ReadsFeatures):
    """A small network drafts a block of tokens. The network computes keys and values from the target's hidden states.

    The network's input is a block: the last committed token and mask tokens, which attend to each other and to these keys and values.
    One pass predicts the token at the place of every mask. A draft model may have a head that makes each token fit the previous token:
    a path selector (DFlash2), a Markov head (DSpark), a recurrent correction (Domino) or a correlator (LiLiCorr). A draft model
    without an embedding or output head of its own uses the target's.

    When sampling with the coupled verifier, drafts are drawn with the target's noise, so that both often draw the same token.

    Attributes:
        heads: classes of heads that a draft model may have. The first class that the draft model's config describes is used.
    """

    name = "dflash"
    summary = "A trained network drafts a block of tokens in one pass, over the target's hidden states."
    needs = "network"
    settings_class = DFlashSettings
    hints = {"num_assistant_tokens": "length"}
    grade_rates = GRADE_RATES
    heads: ClassVar[tuple[type[BlockHead], ...]] = HEADS

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        folder = find_draft_model(self.settings.draft_model, config)
        layers = read_config(folder).layers
        if not all(0 <= layer < count for layer in layers):
            raise SettingsError(
                f"dflash: the draft model in {folder} reads layers {', '.join(map(str, layers))} of a target that has {count} layers"
            )
        return layers

    def start(self, context: Context) -> _State:
        s: DFlashSettings = self.settings
        folder = find_draft_model(s.draft_model, context.model.config)
        files = load_draft_model(folder, context.device, dtype_of(context), self.heads)
        config, most = files.config, files.config.places
        _check_fit(files, context, folder)
        length = levels_of(context, s.length, most)
        if length > most:
            raise SettingsError(
                f"dflash: length is {length}, but the draft model in {folder} was trained to draft {amount(most, 'token')}: "
                f"set length to {most} at most"
            )
        offered = [len(files.vocabulary or DraftVocabulary(context.vocab_size)), s.children]
        if files.head is not None and files.head.candidates is not None:
            offered.append(files.head.candidates)
        tree = shape_of(self.name, s.tree, length, min(offered), s.nodes, s.beam, context)
        drafter = DFlashDrafter(context, files, length, tree.children)
        last = context.decoder_layers - 1
        return _State(drafter, tree, tuple(layer == last for layer in config.layers))

    def features(self, state: _State, given: Step | PromptChunk) -> Tensor:
        layers = given.layers
        assert layers is not None
        if not any(state.of_head):
            return layers.flatten(2)
        parts = zip(state.of_head, layers.unbind(2), strict=True)
        return torch.cat([given.hidden if of_head else part for of_head, part in parts], dim=-1)


class DFlashDrafter(BlockDrafter):
    """The network with its own KV cache. Keys and values in slot ``j`` come from the target's hidden states of token ``j``.

    A block begins at the last token, which the target has not read yet. The next block or window overwrites the cache
    slots of the block.

    Without a head, all nodes of a tree level have the same continuations, because the network does not see the tokens chosen for other
    places. Rejection rules stay exact: the draws of a level are independent of draws and acceptances above it.
    """

    def __init__(self, context: Context, files: DFlashFiles, length: int, children: int) -> None:
        network, config = files.network, files.config
        vocabulary = files.vocabulary or DraftVocabulary(context.vocab_size)
        super().__init__(context, network.fc.in_features, length + 1, 0, vocabulary, children)
        self.chooser, self.mask_token = files.head, config.mask_token_id
        self.embed = embedding_of(context.model, context.embed) if files.embed is None else files.embed
        self.head = context.head if files.lm_head is None else files.lm_head
        self.first = int(not config.from_last)  # index of the block's node that drafts the first token
        block = length + self.first
        self._make_block(context.rows, block)
        example = self.window.new_zeros(1, 1, config.layer.hidden_size)
        self.module: ModulePasses = context.module(network, ahead=block + self.width, example=(example,))

    def _make_block(self, rows: int, block: int) -> None:
        """Builds the mask tokens and the attention mask of every row's block. The last token and the masks attend to each other."""
        device = self.window.device
        self.masks = torch.full((rows, block - 1), self.mask_token, device=device)
        offsets = torch.arange(block, device=device).expand(rows, block)
        everything = torch.ones(rows, block, block, dtype=torch.bool, device=device)
        self.block = TreeTensors((offsets - 1).clamp(min=0), offsets, everything, everything)

    def rebatch(self, rows: Tensor, context: Context) -> None:
        super().rebatch(rows, context)
        self._make_block(context.rows, len(self.block))

    def own_parts(self) -> Any:
        return self.masks, self.block, self.module

    def read(self, base: Tensor, features: Tensor, sequences: Sequences) -> None:
        self.context = self.module(base, features, context=True)[:, -1]

    def root(self) -> Expansion:
        self.read_window()
        read = torch.cat([self.sequences.last, self.masks], dim=1)
        states = self.module(self.sequences.length - 1, self.embed(read), tree=self.block)[:, self.first :]
        logits = self.head(states)
        if self.chooser is None:
            return self.opened(logits)
        self.drafted = DraftedBlock(logits, states, self.context, self.sequences.length > 1, self.embed)
        self.level, self.begun = 0, self.chooser.begin(self.drafted)
        self.paths: Tensor | None = None  # the head's states at all nodes expanded so far
        return self._chosen(self.sequences.last, None)

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        if self.chooser is None:
            return super().expand(nodes, tree)
        self.level += 1
        above = None
        if self.paths is not None:
            parents = tree.parents[:, -nodes.shape[1] :, None]
            above = self.paths.gather(1, parents.expand(-1, -1, self.paths.shape[-1]))
        return self._chosen(nodes.clamp(0, self.most_id), above)

    def _chosen(self, nodes: Tensor, above: Tensor | None) -> Expansion:
        """The continuations of `nodes` ``[B, Q]`` with the best scores of the head. above: the head's states at the nodes' parents."""
        assert self.chooser is not None
        choice = self.chooser.choose(self.drafted, self.begun, self.level, nodes, above)
        if choice.state is not None:
            self.paths = choice.state if self.paths is None else torch.cat([self.paths, choice.state], dim=1)
        expansion = self.best(choice.logits, self.level)
        if choice.confidence is None:
            return expansion
        # The best continuation gets the head's confidence as its probability; the ratios between continuations stay the same.
        sure = choice.confidence.clamp(1e-6, 1)[..., None].log()
        return replace(expansion, weights=expansion.weights - expansion.weights[..., :1] + sure)


def _check_fit(files: DFlashFiles, context: Context, folder: Path) -> None:
    """Raises SettingsError if the draft model is for another target, UnsupportedError if the strategy drafts for a draft model."""
    config = files.config
    if context.level > 0:
        raise UnsupportedError("dflash cannot draft for a draft model: its network reads the target's hidden states")
    name, width = type(context.model).__name__, context.model.config.get_text_config(decoder=True).hidden_size
    if config.layer.hidden_size != width:
        raise SettingsError(
            f"dflash: the draft model in {folder} is for hidden size {config.layer.hidden_size}, this {name} has hidden "
            f"size {width}"
        )
    embeddings = embeddings_of(context)
    if not 0 <= config.mask_token_id < embeddings:
        raise SettingsError(
            f"dflash: the draft model in {folder} embeds token {config.mask_token_id} as its mask, but this {name} "
            f"has only {embeddings} embeddings"
        )
    if config.layer.sliding_window is not None and config.layer.sliding_window < config.block_size:
        raise UnsupportedError(
            f"dflash: the draft model in {folder} has a block of {config.block_size} tokens, but a sliding window of "
            f"only {config.layer.sliding_window}, which is not supported"
        )
