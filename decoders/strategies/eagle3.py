"""EAGLE-3 (Li et al. 2025): a small network drafts from hidden states of three layers of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ..drafters import Expansion, ModulePasses
from ..errors import SettingsError, UnsupportedError
from ..heads.eagle3 import Eagle3Config, Eagle3Head, EagleConfig, EagleHead
from ..heads.eagle3_files import Eagle3Files, find_head, load_head, read_config
from ..strategy import Context, PromptChunk, Sequences, Step
from ..tree import TreeTensors
from .draft_tree import Beam, Children, NodeBudget, TreeForm, TreeForms, levels_of, shape_of
from .feature_drafter import BlockDrafter, FeatureDrafter, FeatureState, ReadsFeatures, dtype_of, tokens_from

#: Default number of levels of a draft.
LENGTH = 5


class Eagle3Settings(TreeForms):
    """The head that drafts, and the shape of its drafts."""

    head: str | None = Field(
        None,
        description="Folder of the head, in the format of the authors or of vLLM's speculators; `demo`: the demo model's "
        "head. None: the subfolder `eagle3` of the model's folder.",
    )
    layers: tuple[int, ...] | None = Field(
        None,
        description="Target layers whose hidden states the head reads; -1 is the last. None: the layers that the head's "
        "config names, else the authors' choice for the target's depth.",
    )
    length: int | None = Field(
        None,
        ge=1,
        le=32,
        description="Number of tokens drafted per path, one pass of the head for each; for a tree, its depth. None: 5, or "
        "fewer if the measured costs of a step allow fewer.",
    )
    tree: TreeForm = "dynamic"
    nodes: NodeBudget = None
    children: Children = 8
    beam: Beam = 8


class Eagle3(ReadsFeatures):
    """A head of one decoder layer (P-EAGLE: several) drafts from hidden states of the target.

    For every token, the head reads the token's embedding and the previous token's hidden states, fused from three target layers.
    (EAGLE and EAGLE-2 heads read the input of the target's output head instead of three layers.) From the second draft token on,
    the head's own output replaces these hidden states, because the target has not computed them yet. A P-EAGLE head reads masks
    instead, and drafts all tokens in one pass. The head's vocabulary may be a part of the target's.

    When sampling with the coupled verifier, drafts are drawn with the target's noise, so that both often draw the same token.
    """

    name = "eagle3"
    summary = "A trained layer drafts from the target's hidden states: a chain or a tree."
    needs = "head"
    settings_class = Eagle3Settings
    hints = {"num_assistant_tokens": "length"}

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        s: Eagle3Settings = self.settings
        folder = find_head(s.head, config)
        head, width = read_config(folder), config.get_text_config(decoder=True).hidden_size
        if isinstance(head, EagleConfig):
            if s.layers:
                raise SettingsError(
                    f"eagle3: layers={s.layers}, but the head in {folder} is an EAGLE or EAGLE-2 head, which reads only the "
                    "input of the target's output head: leave layers= out"
                )
            return ()
        if head.target_hidden_size != width:
            raise SettingsError(
                f"eagle3: the head in {folder} reads layers of hidden size {head.target_hidden_size}, this model's is {width}"
            )
        layers = s.layers or head.layers_of(count)
        if not s.layers and not all(0 <= layer < count for layer in layers):
            raise SettingsError(
                f"eagle3: the head in {folder} reads layers {', '.join(map(str, layers))} of a target that has {count} layers: "
                "name other layers as layers="
            )
        return layers

    def start(self, context: Context) -> FeatureState:
        s: Eagle3Settings = self.settings
        config = context.model.config
        folder = find_head(s.head, config)
        files = load_head(folder, context.device, dtype_of(context))
        _check_fit(files, context, len(self.layers_for(config, context.decoder_layers)), folder)
        head = files.head.head_config
        offered = len(files.vocabulary)
        if isinstance(head, Eagle3Config) and head.rank:
            offered = head.candidates
        children = min(s.children, offered)
        length = levels_of(context, s.length, LENGTH)
        tree = shape_of(self.name, s.tree, length, children, s.nodes, s.beam, context)
        parallel = isinstance(head, Eagle3Config) and head.mask_token_id is not None
        drafter = (ParallelDrafter if parallel else Eagle3Drafter)(context, files, length, tree.children, tree.ahead)
        return FeatureState(drafter, tree)

    def features(self, state: FeatureState, given: Step | PromptChunk) -> Tensor:
        """The outputs of the layers that the head reads, concatenated; for EAGLE and EAGLE-2, the input of the target's output head."""
        return given.hidden if given.layers is None else given.layers.flatten(2)


class Eagle3Drafter(FeatureDrafter):
    """The head with its own KV cache. Slot ``j`` reads token ``j + 1``, so a node at depth ``d`` is in slot ``length - 2 + d``."""

    def __init__(self, context: Context, files: Eagle3Files, depth: int, children: int, ahead: int) -> None:
        eagle = isinstance(files.head, EagleHead)
        width = files.head.head_config.layer.hidden_size if eagle else files.head.fc.in_features
        super().__init__(context, width, depth + 1, 0, files.vocabulary, children)
        table = files.head.embed_tokens
        self.embed = table if table is not None else context.embed
        self.most_id = min(self.most_id, files.head.head_config.layer.vocab_size - 1)
        # EAGLE uses the target's output head; an EAGLE-3 head has its own output head.
        self.head = context.head if eagle else lambda logits: logits
        self.windowed = isinstance(files.head, Eagle3Head) and bool(files.head.head_config.windows)
        one = torch.zeros(1, 1, files.head.fc.out_features, dtype=self.window.dtype, device=context.device)
        self.module: ModulePasses = context.module(
            files.head, ahead=ahead + self.width, example=(one, self.window[:1, :1])
        )

    def own_parts(self) -> Any:
        return self.module

    def read(self, base: Tensor, features: Tensor, sequences: Sequences) -> None:
        tokens = tokens_from(sequences, base + 1, features.shape[1]).clamp(max=self.most_id)
        states, self.last = self.module(base, self.embed(tokens), features)
        self.states = states[:, -1:]

    def first(self) -> Tensor:
        return self.head(self.last)

    def further(self, nodes: Tensor, tree: TreeTensors) -> Tensor:
        count = nodes.shape[1]
        above = self.states.gather(1, tree.parents[:, -count:, None].expand(-1, -1, self.states.shape[-1]))
        base = self.sequences.length - 2
        # For all draft tokens, the sliding windows end at the last token that the target has read, as in training.
        ends = (base[:, None].expand(-1, count),) if self.windowed else ()
        states, last = self.module(base, self.embed(nodes), above, *ends, tree=tree, logits=count, fuse=False)
        self.states = torch.cat([self.states, states], dim=1)
        return self.head(last)


class ParallelDrafter(BlockDrafter, Eagle3Drafter):
    """P-EAGLE (arXiv:2602.01469): drafts in one pass over mask tokens, with a learned state in place of the target's hidden states."""

    def __init__(self, context: Context, files: Eagle3Files, depth: int, children: int, ahead: int) -> None:
        super().__init__(context, files, depth, children, max(ahead, depth + 1))
        assert isinstance(files.head, Eagle3Head) and files.head.head_config.mask_token_id is not None
        self.masks, self.state = depth - 1, files.head.mask_hidden
        self.mask_token = self.prompts.tokens.new_full((1, 1), files.head.head_config.mask_token_id)

    def root(self) -> Expansion:
        self.read_window()
        logits, rows = self.first(), len(self.sequences.length)
        if self.masks:
            read = self.embed(self.mask_token).expand(rows, self.masks, -1)
            states = self.state.expand(rows, self.masks, -1)
            logits = torch.cat(
                [logits, self.module(self.sequences.length - 1, read, states, logits=self.masks)[1]], dim=1
            )
        return self.opened(logits)


def _check_fit(files: Eagle3Files, context: Context, layers: int, folder: Path) -> None:
    """Raises SettingsError if the head is for another target, UnsupportedError if the strategy drafts for a draft model."""
    if context.level > 0:
        raise UnsupportedError("eagle3 cannot draft for a draft model: its head reads the target's hidden states")
    config = files.head.head_config
    width = context.model.config.get_text_config(decoder=True).hidden_size
    if isinstance(files.head, EagleHead):
        if config.layer.hidden_size != width:
            raise SettingsError(
                f"eagle3: the head in {folder} is for hidden size {config.layer.hidden_size}, this {type(context.model).__name__} "
                f"has hidden size {width}"
            )
    elif layers * width != files.head.fc.in_features:
        raise SettingsError(
            f"eagle3: the head in {folder} reads {files.head.fc.in_features} numbers per token, and {layers} layers of this "
            f"{type(context.model).__name__} have {layers * width}"
        )
    if config.layer.vocab_size != context.vocab_size:
        raise SettingsError(
            f"eagle3: the head in {folder} is for a vocabulary of {config.layer.vocab_size}, this {type(context.model).__name__} has "
            f"{context.vocab_size}"
        )
    if files.head.embed_tokens is None and config.layer.hidden_size != width:
        raise SettingsError(
            f"eagle3: the head in {folder} uses the target's embedding, but its hidden size is {config.layer.hidden_size}, not {width}"
        )
