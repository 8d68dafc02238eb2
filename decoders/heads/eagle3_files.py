"""Reads and writes EAGLE heads (EAGLE to EAGLE-4, P-EAGLE) in the authors' formats, some also in the format of `speculators`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from ..common.files import write_whole
from ..drafters import DraftVocabulary
from ..errors import SettingsError, UnsupportedError, amount
from .eagle3 import Eagle3Config, Eagle3Head, EagleConfig, EagleHead
from .network_files import (
    CONFIG,
    Count,
    FileConfig,
    Stamp,
    Whole,
    WindowedLayerConfig,
    filled,
    find_network,
    read_json,
    read_tensors,
    stamp_of,
)

Format = Literal["speculators", "authors"]
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Config fields of the decoder layer.
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "initializer_range", "rope_parameters", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class Eagle3Files:
    """A loaded head and the tokens that it can propose."""

    head: Eagle3Head | EagleHead
    vocabulary: DraftVocabulary


def find_head(named: str | None, config: Any) -> Path:
    """The folder of the head for a target with this `config`: `named`, or else the target's subfolder ``eagle3``.

    Raises:
        UnsupportedError: no folder is named, and the target's folder has no subfolder ``eagle3``.
    """
    return find_network(named, config, "eagle3", "a head", "head", "`decoders train eagle3` makes one")


class _LayerConfig(WindowedLayerConfig):
    """Config fields of the decoder layers. In the format of `speculators` they are in a separate section of the config."""

    vocab_size: Count
    model_type: str = "llama"
    partial_rotary_factor: float = 1.0


class _SpecForge(FileConfig):
    """Fields that SpecForge writes in addition to the authors' fields."""

    eagle_aux_hidden_state_layer_ids: list[Whole] | None = None


class _Candidates(FileConfig):
    """Config fields of EAGLE-4's low-rank output head, which chooses candidates: the tokens that get logits."""

    type: Literal["low_rank", "weighted_low_rank"] = "low_rank"
    rank: Count
    num_candidates: Count


#: Config fields and values of EAGLE-4 that are not supported. :func:`read_config` raises an error for them.
_UNREAD: dict[str, Any] = {
    "attn_norm": True, "enable_post_mlp_norm": True, "enable_moe": True, "enable_2hs": True, "enable_defa": True,
    "use_rope": False, "position_embedding_type": "none",
}  # fmt: skip


class _HeadConfig(FileConfig):
    """All fields of a config, in any of the formats, except the fields of the decoder layers."""

    transformer_layer_config: dict[str, Any] | None = None
    architectures: list[str] = []
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    eagle_aux_hidden_state_layer_ids: list[Whole] | None = None
    eagle_config: _SpecForge = _SpecForge()
    norm_before_residual: bool = False
    norm_output: bool = False
    bias: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    enable_fc_norm: bool = False
    efficient_lm_head_config: _Candidates | None = None
    speculators_model_type: str | None = None
    parallel_drafting: bool = False
    mask_token_id: Whole | None = None
    pard_token: Whole | None = None
    ptd_token_id: Whole | None = None

    @property
    def mask(self) -> int | None:
        """The mask token of a head that drafts all tokens in one pass; None for other heads."""
        named = (self.pard_token, self.ptd_token_id, self.mask_token_id)
        parallel = (
            self.parallel_drafting
            or self.speculators_model_type == "peagle"
            or named[0] is not None
            or named[1] is not None
        )
        return next((token for token in named if token is not None), None) if parallel else None

    def layers(self, place: str) -> tuple[int, ...] | None:
        """The decoder layers of the target whose outputs the head reads; None if the config names none.

        `speculators` and vLLM number the *inputs* of layers (2 is the output of layer 1); SpecForge and SGLang number the outputs.
        """
        into, out_of = self.eagle_aux_hidden_state_layer_ids, self.eagle_config.eagle_aux_hidden_state_layer_ids
        if into and min(into) < 1:
            raise UnsupportedError(
                f"{place}: eagle_aux_hidden_state_layer_ids has {min(into)}: the head reads the target's embeddings as a feature, "
                "which is not supported"
            )
        return tuple(layer - 1 for layer in into) if into else tuple(out_of) if out_of else None


def read_config(folder: str | Path) -> Eagle3Config | EagleConfig:
    """Reads the ``config.json`` of a head, in any of the formats.

    Raises:
        SettingsError: there is no config, it does not describe an EAGLE head, or a field has a wrong value.
        UnsupportedError: the config describes a design that is not supported.
    """
    path = Path(folder).expanduser() / CONFIG
    place, kind = f"eagle3: {path}", "config of an EAGLE-3 head"
    raw = read_json(path, f"there is no head at {str(folder)!r}", "eagle3")
    own = _HeadConfig.of(raw, place, kind)
    nested = own.transformer_layer_config
    within = place if nested is None else f"{place}, transformer_layer_config"
    layer = _LayerConfig.of(raw if nested is None else nested, within, kind)
    named = "".join(own.architectures)
    eagle = nested is None and "draft_vocab_size" not in raw and "Eagle3" not in named and "Eagle4" not in named
    if layer.model_type != "llama" or not layer.num_hidden_layers or (eagle and layer.num_hidden_layers > 1):
        fits = "one Llama layer" if eagle else "Llama layers"
        raise UnsupportedError(
            f"{place}: {amount(layer.num_hidden_layers, 'layer')} of {layer.model_type!r}; only {fits} can be read"
        )
    unread = [f"{name} is {json.dumps(raw[name])}" for name, value in _UNREAD.items() if raw.get(name) == value]
    if layer.partial_rotary_factor != 1:
        unread.append(f"partial_rotary_factor is {layer.partial_rotary_factor}")
    if unread:
        raise UnsupportedError(
            f"{place}: {', '.join(unread)}: only Llama layers with one MLP and rotary positions on whole heads can be read"
        )
    each = own.fc_norm or own.enable_fc_norm
    if own.norm_before_fc and each:
        raise SettingsError(f"{place}: norm_before_fc and fc_norm are both true; at most one may be true")
    if own.mask is None and (own.parallel_drafting or own.speculators_model_type == "peagle"):
        raise SettingsError(f"{place}: the head drafts all tokens in one pass, which needs a mask_token_id")
    config = layer.llama(within, num_hidden_layers=layer.num_hidden_layers)
    windows = layer.windows(within, everywhere="Eagle4" in named)
    if eagle and windows:
        raise UnsupportedError(f"{place}: EAGLE and EAGLE-2 heads with a sliding window are not supported")
    if eagle:
        return EagleConfig(config, bias=own.bias)
    drafted, low = own.draft_vocab_size or layer.vocab_size, own.efficient_lm_head_config
    return Eagle3Config(
        layer=config,
        draft_vocab_size=drafted,
        target_hidden_size=own.target_hidden_size or layer.hidden_size,
        layers=own.layers(place),
        norm_before_residual=own.norm_before_residual,
        norm_output=own.norm_output,
        norm_features="whole" if own.norm_before_fc else "each" if each else None,
        mask_token_id=own.mask,
        windows=windows,
        rank=low.rank if low else 0,
        candidates=min(low.num_candidates, drafted) if low else 0,
    )


def load_head(folder: str | Path, device: torch.device, dtype: torch.dtype) -> Eagle3Files:
    """Loads a head from a folder, and caches it until its files change. No code in the files is run.

    Raises:
        SettingsError: files are missing, unreadable, or hold no EAGLE head.
        UnsupportedError: see :func:`read_config`.
    """
    path = Path(folder).expanduser()
    return _load(path.absolute(), stamp_of(path / name for name in (CONFIG, *WEIGHTS)), device, dtype)


@lru_cache(maxsize=4)
def _load(path: Path, stamp: Stamp, device: torch.device, dtype: torch.dtype) -> Eagle3Files:
    config, names = read_config(path), {name for name, *_ in stamp}
    weights = next((path / name for name in WEIGHTS if name in names), None)
    if weights is None:
        raise SettingsError(f"eagle3: {path} has no weights: there is no {' or '.join(WEIGHTS)}")
    state = {_our_name(name): tensor for name, tensor in read_tensors(weights, "eagle3").items()}
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    if isinstance(config, EagleConfig):
        config = replace(config, bias="fc.bias" in state)
        # New modules get random weights. Drawing them must not advance the caller's random generator.
        with torch.random.fork_rng(devices=[]):
            eagle = EagleHead(config, embeds="embed_tokens.weight" in state)
        vocabulary = DraftVocabulary(config.layer.vocab_size)
        return Eagle3Files(filled(eagle, state, weights, "eagle3", device, dtype), vocabulary)
    if "efficient_lm_head.weight" not in state:  # the checkpoint has no low-rank head, so all tokens get logits
        config = replace(config, rank=0)
    vocabulary = read_vocabulary(
        d2t, t2d, config.layer.vocab_size, config.draft_vocab_size, f"eagle3: {weights}", device
    )
    with torch.random.fork_rng(devices=[]):
        head = Eagle3Head(config, embeds="embed_tokens.weight" in state)
    return Eagle3Files(filled(head, state, weights, "eagle3", device, dtype), vocabulary)


def read_vocabulary(
    d2t: Tensor | None, t2d: Tensor | None, size: int, drafted: int, place: str, device: torch.device
) -> DraftVocabulary:
    """The draft vocabulary of a checkpoint.

    Args:
        d2t, t2d: the tables of the checkpoint, as :meth:`DraftVocabulary.of` takes them.
        size: number of the target's tokens.
        drafted: number of tokens in the draft vocabulary.
        place: the strategy and the file, for error messages.

    Raises:
        SettingsError: a reduced vocabulary has no table, or the tables' token count is not `drafted`.
        UnsupportedError: the tables have another shape, disagree, are empty, or name a token that the target lacks.
    """
    if d2t is None and t2d is None and drafted != size:
        raise SettingsError(f"{place} has a reduced vocabulary, but neither d2t nor t2d lists its tokens")
    try:
        vocabulary = DraftVocabulary.of(size, d2t, t2d)
    except UnsupportedError as error:
        raise UnsupportedError(f"{place}: {error}") from error
    if len(vocabulary) != drafted:
        raise SettingsError(
            f"{place}: d2t and t2d name {len(vocabulary)} tokens, but draft_vocab_size in {CONFIG} is {drafted}"
        )
    return DraftVocabulary(size, vocabulary.ids.to(device) if vocabulary.ids is not None else None)


def _our_name(name: str) -> str:
    """The name in :class:`Eagle3Head` of a checkpoint's weight `name`. The layer `midlayer` is ``model.layers.0`` in some formats."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
    part, _, rest = name.removeprefix("layers.").partition(".")
    return f"deeper.{int(part) - 1}.{rest}" if name.startswith("layers.") and part.isdigit() else name


def save_head(
    head: Eagle3Head, ids: Tensor | None, folder: Path, model: PreTrainedModel, depth: int, form: Format = "speculators",
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Writes config and weights of a head that drafts for `model`.

    Each file is written atomically, the config last, because a folder with a config is taken for a complete head. No embedding is
    written: this package, vLLM and the authors' code use the target's.

    Args:
        ids: ``[D]`` int64, ascending, the tokens that the head can propose; None: all.
        depth: number of draft tokens per step that the config recommends to other software.
        form: the format of the config.
        dtype: dtype of the written weights.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors.torch import save

    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()}
    if form == "speculators":
        state = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in state.items()}
    state |= vocabulary_tables(ids, head.head_config.layer.vocab_size)
    config = (_speculators if form == "speculators" else _authors)(head, model, depth)
    config["dtype" if form == "speculators" else "torch_dtype"] = str(dtype).removeprefix("torch.")
    write_whole(folder / WEIGHTS[0], save(state, metadata={"format": "pt"}))
    write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def vocabulary_tables(ids: Tensor | None, size: int) -> dict[str, Tensor]:
    """A checkpoint's tables d2t and t2d for `ids` (``[D]`` int64, ascending), the draft tokens, out of `size` tokens; {} for None."""
    if ids is None:
        return {}
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(size), ids)}


def layer_fields(config: LlamaConfig, kind: str = "llama") -> dict[str, Any]:
    """Config fields of the decoder layers, with the model type `kind`. Rotary positions are written for transformers 5 and 4."""
    layer = config.to_dict()
    fields = {"model_type": kind, **{name: layer[name] for name in _FIELDS if name in layer}}
    rope = layer.get("rope_parameters") or {}
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return fields


def speculators_fields(kind: str, model: PreTrainedModel, tokens: int) -> dict[str, Any]:
    """The fields that every config in the format of `speculators` has. kind: type of the speculator. tokens: draft tokens per step."""
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": _public_name(model), "architectures": [type(model).__name__]},
        },
        "tie_word_embeddings": False,
    }


def _speculators(head: Eagle3Head, model: PreTrainedModel, depth: int) -> dict[str, Any]:
    config = head.head_config
    assert config.layers is not None
    return {
        "architectures": ["Eagle3Speculator"],
        **speculators_fields("eagle3", model, depth),
        "draft_vocab_size": config.draft_vocab_size,
        # `speculators` numbers the inputs of layers: 2 is the output of layer 1.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": config.target_hidden_size,
        "transformer_layer_config": layer_fields(config.layer),
    }


def _public_name(model: PreTrainedModel) -> str | None:
    """The target's name on the Hub, which tells users what the head is for; None if there is no name or it is a local folder."""
    name = getattr(model.config, "name_or_path", None)
    return name if name and not Path(name).exists() else None


def _authors(head: Eagle3Head, model: PreTrainedModel, depth: int) -> dict[str, Any]:
    config = head.head_config
    assert config.layers is not None
    return {
        **layer_fields(config.layer),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        # SGLang reads this field. The authors' code ignores the field, so its heads always read the default layers.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.layers), "use_aux_hidden_state": True},
    }
