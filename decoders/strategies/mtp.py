"""Multi-token prediction (Gloeckle et al. 2024; DeepSeek-V3): extra layers of the model predict the tokens after the next token."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ..drafters import DraftVocabulary, ModulePasses
from ..errors import SettingsError, UnsupportedError, amount
from ..strategy import Context, Sequences
from ..tree import TreeTensors
from .draft_tree import Beam, Children, NodeBudget, TreeForm, TreeForms, levels_of, shape_of
from .feature_drafter import FeatureDrafter, FeatureState, ReadsFeatures, dtype_of, tokens_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpModel

_TOO_OLD = "mtp needs a newer transformers, one that has MtpModel.forward_layer (5.23 has)"
#: The model's attribute that holds its MTP layers. The loop's copies of the model leave out attributes ``decoders_…``.
ATTRIBUTE = "decoders_mtp_layers"


class MtpSettings(TreeForms):
    """Depth and shape of drafts."""

    length: int | None = Field(
        None,
        ge=1,
        le=32,
        description="Number of tokens drafted per path, at most one per MTP layer of the model. None: one per layer, or fewer "
        "if the measured costs of a step allow fewer.",
    )
    tree: TreeForm = "none"
    nodes: NodeBudget = None
    children: Children = 4
    beam: Beam = 4


class Mtp(ReadsFeatures):
    """Drafts with the model's layers for multi-token prediction (MTP), one token per layer.

    MTP layer k reads the hidden states of layer k-1 (for layer 0: of the target), and the embedding of the next token. From these,
    layer k predicts the token after the next token. The layers come from the model's checkpoint, through transformers' ``MtpModel``,
    or from :func:`use_mtp_layers`.

    When sampling with the coupled verifier, drafts are drawn with the target's noise, so that both often draw the same token.
    """

    name = "mtp"
    summary = "The model's own layers for multi-token prediction draft a chain or a tree."
    needs = "MTP layers"
    settings_class = MtpSettings
    hints = {"num_assistant_tokens": "length"}

    def start(self, context: Context) -> FeatureState:
        s: MtpSettings = self.settings
        if context.level > 0:
            raise UnsupportedError("mtp cannot draft for a draft model: its layers read the target's hidden states")
        layers = mtp_layers(context.model)
        depth = levels_of(context, s.length, layers.num_mtp_layers)
        if depth > layers.num_mtp_layers:
            raise SettingsError(
                f"mtp: length is {depth}, but the model predicts {amount(layers.num_mtp_layers, 'token')} ahead: set length to "
                f"{layers.num_mtp_layers} at most"
            )
        tree = shape_of(self.name, s.tree, depth, s.children, s.nodes, s.beam, context)
        drafter = MtpDrafter(context, layers, depth, tree.children, tree.ahead)
        if tree.least_children > drafter.children:
            raise SettingsError(
                f"mtp: children must be at most {context.vocab_size}, the size of the vocabulary, not {tree.children}"
            )
        return FeatureState(drafter, tree)


class MtpDrafter(FeatureDrafter):
    """The MTP layers, each with its own keys and values.

    Slot ``j`` of layer ``k`` reads the embedding of token ``j + 1 + k`` and predicts token ``j + 2 + k``. The last ``k`` slots of the
    layer are for draft tokens: a node at depth ``d`` of the draft is in slot ``length - 2 - k + d`` of layer ``k``. The layer runs
    all nodes up to depth ``k``. Each node reads the hidden state that layer ``k - 1`` computed for the node's parent.
    """

    def __init__(self, context: Context, layers: MtpModel, depth: int, children: int, ahead: int) -> None:
        width = context.model.config.get_text_config(decoder=True).hidden_size
        super().__init__(context, width, depth + 1, depth - 1, DraftVocabulary(context.vocab_size), children)
        self.depth, self.head = depth, context.head
        example = torch.zeros(1, 1, dtype=torch.int64, device=context.device), self.window[:1, :1]
        try:
            self.module: ModulePasses = context.module(
                single_layers(layers, context), ahead=ahead + self.width, example=example
            )
        except (TypeError, ValueError, AttributeError) as error:  # MtpModel does not support this model's layers
            raise UnsupportedError(
                f"mtp: transformers' MtpModel cannot run its layers of {type(context.model).__name__}: {error}"
            ) from error

    def own_parts(self) -> Any:
        return self.depth, self.module

    def read(self, base: Tensor, features: Tensor, sequences: Sequences) -> None:
        states, count = features, features.shape[1]
        self.ends = []
        for layer in range(self.depth):
            tokens = tokens_from(sequences, base + 1 + layer, count)
            states = self.module(base, tokens, states, layer=layer)
            # The state of the last slot that reads a committed token: the later slots are for tokens that are not drafted yet.
            self.ends.append(states[:, max(count - 1 - layer, 0)][:, None])

    def first(self) -> Tensor:
        self.level, self.nodes, self.states = 0, self.sequences.tokens[:, :0], self.ends[0]
        return self.head(self.states)

    def further(self, nodes: Tensor, tree: TreeTensors) -> Tensor:
        self.level, self.nodes = self.level + 1, torch.cat([self.nodes, nodes], dim=1)
        layer = self.level
        above = self.states.gather(1, tree.parents[:, 1:, None].expand(-1, -1, self.states.shape[-1]))
        base = self.sequences.length - 2 - layer
        states = self.module(base, self.nodes, above, tree=tree, layer=layer)
        self.states = torch.cat([self.ends[layer], states], dim=1)
        return self.head(states[:, -nodes.shape[1] :])


class _SingleLayers(nn.Module):
    """Runs one layer of an ``MtpModel``, or all layers one after the other if `layer` is None. Returns hidden states ``[B, N, H]``.

    Args:
        layers: the ``MtpModel``, prepared by :func:`fitted`.
    """

    def __init__(self, layers: MtpModel) -> None:
        super().__init__()
        layers.__class__ = _with_ready_masks(type(layers))  # type: ignore[arg-type]  # classes are hashable
        self.layers = layers

    def forward(
        self, tokens: Tensor, states: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any,
        layer: int | None = None,
    ) -> Tensor:  # fmt: skip
        cache.ready_mask = attention_mask
        for number in range(self.layers.num_mtp_layers) if layer is None else (layer,):
            # Each layer reads tokens that are one position later than the tokens of the layer before.
            places = position_ids + (1 + number)
            states = self.layers.forward_layer(number, states, places, cache, input_ids=tokens)
        return states


@functools.cache
def _with_ready_masks(kind: type) -> type:
    """A subclass of `kind`, a class of ``MtpModel``. Its layers use the attention mask of the pass, instead of creating masks."""

    def ready(
        self: Any, layer_idx: int, inputs_embeds: Tensor, mtp_cache: Any, position_ids: Tensor
    ) -> dict[str, Tensor]:
        return {"attention_mask": mtp_cache.ready_mask}

    return type(kind.__name__, (kind,), {"create_masks_for_mtp_layer": ready})


#: For each model, the arguments with which its layers were prepared (layers, embedding, dtype, device), and the prepared layers.
_made_ready: weakref.WeakKeyDictionary[nn.Module, tuple[tuple, _SingleLayers]] = weakref.WeakKeyDictionary()


def single_layers(layers: MtpModel, context: Context) -> nn.Module:
    """The module for :attr:`Context.module`. The same layers, dtype and device always give the same object."""
    model, dtype, device = context.model, dtype_of(context), context.device
    alike = matrix_dtype(layers) == dtype and {tensor.device for tensor in layers.layers.parameters()} == {device}
    origin = (layers, model.get_input_embeddings(), dtype, device)
    made_from, ready = _made_ready.get(model, (None, None))
    if ready is None or made_from != origin or not (alike or converted(layers, ready.layers)):
        ready = _SingleLayers(fitted(layers, model, None if alike else (device, dtype)))
        _made_ready[model] = origin, ready
    return ready


def fitted(layers: MtpModel, model: PreTrainedModel, place: tuple[torch.device, torch.dtype] | None) -> MtpModel:
    """A copy of `layers` that uses the embedding and the rotary embedding of `model`.

    Args:
        place: device and dtype to which the layers' own modules are copied. None: the copy shares these modules with `layers`.
    """
    shared = (layers.config, *layers.children())
    twin = copy.deepcopy(layers, {id(part): part for part in shared})
    twin.tie_with_main_model(model)
    if place is not None:
        for name, module in own_children(twin).items():
            setattr(twin, name, copy.deepcopy(module).to(*place))
    return twin


def own_children(layers: MtpModel) -> dict[str, nn.Module]:
    """The modules of an ``MtpModel`` that are its own, not the main model's, by name: the layers, and in some designs a norm."""
    tied = ("embed_tokens", "shared_head", "rotary_emb")
    return {name: module for name, module in layers.named_children() if name not in tied}


def converted(layers: MtpModel, twin: MtpModel) -> bool:
    """Whether the weights of the converted copy `twin` still equal the weights of `layers`, which training may have changed."""
    modules = [nn.ModuleDict(own_children(model)) for model in (layers, twin)]
    pairs = zip(*(module.parameters() for module in modules), strict=True)
    return all(torch.equal(own.to(other), other) for own, other in pairs)


def matrix_dtype(layers: MtpModel) -> torch.dtype:
    """The dtype of the layers' largest matrix. A norm, or the bias of a router, may have another dtype."""
    return max((p for p in layers.layers.parameters() if p.is_floating_point()), key=torch.numel).dtype


def use_mtp_layers(model: PreTrainedModel, layers: MtpModel | None) -> None:
    """Lets ``strategy="mtp"`` draft for `model` with `layers` that you have built or trained. None removes them again.

    The layers use the model's embedding and output head. If their dtype or device differs from the model's, a copy is used. Without a
    call of this function, the layers are read once from the model's checkpoint.

    Raises:
        SettingsError: `layers` is no ``MtpModel``, holds no layer, or has another hidden size than the model.
        UnsupportedError: this version of transformers has no ``MtpModel.forward_layer``.
    """
    if layers is not None:
        _check_fit(layers, model)
        vars(model)[ATTRIBUTE] = layers
    else:
        vars(model).pop(ATTRIBUTE, None)
        _made_ready.pop(model, None)


def _check_fit(layers: MtpModel, model: PreTrainedModel) -> None:
    kind, name = _mtp_model(), type(model).__name__
    if not isinstance(layers, kind):
        raise SettingsError(
            f"mtp: use_mtp_layers for {name} takes an MtpModel of transformers or None, not {type(layers).__name__}: {layers!r:.60}"
        )
    if not layers.num_mtp_layers:
        raise SettingsError(f"mtp: the MtpModel given for {name} holds no layer: num_mtp_layers must be at least 1")
    own, width = (part.config.get_text_config(decoder=True).hidden_size for part in (layers, model))
    if own != width:
        raise SettingsError(f"mtp: the layers given are for hidden size {own}, this {name} has hidden size {width}")


def _mtp_model() -> type[MtpModel]:
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UnsupportedError(_TOO_OLD) from error
    if not hasattr(MtpModel, "forward_layer"):
        raise UnsupportedError(_TOO_OLD)
    return MtpModel


def mtp_layers(model: PreTrainedModel) -> MtpModel:
    """The multi-token-prediction layers of `model`.

    Raises:
        UnsupportedError: the model has no MTP layers, its checkpoint lacks them, or transformers is too old to build them.
    """
    if ATTRIBUTE in vars(model):
        return vars(model)[ATTRIBUTE]
    name, kind = type(model).__name__, _mtp_model()
    if not getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None):
        raise UnsupportedError(f"{name} has no multi-token-prediction layers: its config has no num_mtp_layers above 0")
    try:
        layers = kind.from_pretrained(model, device_map={"": model.device})
    except Exception as error:  # files, keys and shapes raise many kinds of errors
        raise UnsupportedError(
            f"mtp: the layers of {name} cannot be loaded from {model.config.name_or_path!r}: {error}. To use layers that you have "
            "built, call decoders.strategies.mtp.use_mtp_layers"
        ) from error
    vars(model)[ATTRIBUTE] = layers.eval()
    return layers
