"""DFlash draft models on disk, in the formats of the authors, DeepSpec, SpecForge, LiLiCorr, `speculators` and transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common.files import write_whole
from ..drafters import DraftVocabulary
from ..errors import SettingsError, UnsupportedError
from .block_heads import MARKOV_FIELDS, BlockHead, DominoHead, HeadFields, MarkovHead, PathSelector
from .dflash import DFlashConfig, DFlashNetwork
from .eagle3_files import layer_fields, read_vocabulary, speculators_fields, vocabulary_tables
from .lattice_head import LatticeHead
from .network_files import (
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

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
#: Modules that fuse the target's hidden states: name in transformers' format → name in the authors' format.
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
#: Classes of heads in published checkpoints. The first class that a config describes is used.
HEADS: tuple[type[BlockHead], ...] = (LatticeHead, PathSelector, MarkovHead, DominoHead)
#: For each ``speculators_model_type``, the defaults of fields that configs in the format of `speculators` may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash2": dict(
        sliding_window_non_causal=True, conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16
    ),
    "dspark": dict(markov_rank=256, enable_confidence_head=True, confidence_head_with_markov=True),
}


@dataclass(frozen=True)
class DFlashFiles:
    """A loaded draft model.

    Attributes:
        head: the head that chooses tokens; None: the network's likeliest tokens are drafted.
        embed: the draft model's own embedding; None: the target's is used.
        lm_head: the draft model's own output head; None: the target's is used.
        vocabulary: the tokens that the draft model can draft; None: all.
    """

    config: DFlashConfig
    network: DFlashNetwork
    head: BlockHead | None = None
    embed: nn.Embedding | None = None
    lm_head: nn.Linear | None = None
    vocabulary: DraftVocabulary | None = None


class _LayerConfig(WindowedLayerConfig):
    """Config fields of the decoder layers. In the format of `speculators` they are in a separate section of the config."""

    intermediate_size: Count
    num_hidden_layers: Whole


class _Config(FileConfig):
    """All fields of a config, in any of the formats, except the fields of the decoder layers."""

    block_size: Annotated[Whole, Field(ge=2)]
    mask_token_id: Whole
    target_layer_ids: list[Whole] | None = None
    num_target_layers: Whole | None = None
    aux_hidden_state_layer_ids: list[Whole] | None = None
    dflash_config: dict[str, Any] | None = None
    draft_vocab_size: Count | None = None
    sample_from_anchor: bool | None = None
    shift_label: bool = False
    causal_head: bool | None = None
    causal: bool | None = None
    is_causal: bool | None = None
    sliding_window_non_causal: bool = False
    conv_kernel_size: Annotated[Whole, Field(ge=0)] = 0
    conv_group_size: Annotated[Whole, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _convolution_is_whole(self) -> Self:
        if bool(self.conv_kernel_size) != bool(self.conv_group_size) or self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size} and conv_group_size {self.conv_group_size}: set both to 0, or both to 1 "
                "or more, and conv_kernel_size to at most block_size"
            )
        return self


class _Index(FileConfig):
    """The index of a sharded checkpoint: which file holds which tensor."""

    weight_map: dict[str, str]


def find_draft_model(named: str | None, config: Any) -> Path:
    """The folder of the draft model for a target with this `config`: `named`, or else the target's subfolder ``dflash``.

    Raises:
        UnsupportedError: no folder is named, and the target's folder has no subfolder ``dflash``.
    """
    return find_network(named, config, "dflash", "a draft model", "draft_model", "`decoders train dflash` makes one")


def read_config(folder: str | Path) -> DFlashConfig:
    """Reads the ``config.json`` of a draft model, in any of the formats.

    Raises:
        SettingsError: there is no config, it does not describe a DFlash draft model, or a field has a wrong value.
        UnsupportedError: the config describes a design that is not supported.
    """
    path = Path(folder).expanduser() / CONFIG
    place, kind = f"dflash: {path}", "config of a DFlash draft model"
    raw = read_json(path, f"there is no draft model at {str(folder)!r}", "dflash")
    apart = raw.get("dflash_config") if isinstance(raw, dict) else None
    if isinstance(apart, dict):  # the authors' format has some fields in a separate section
        raw = raw | {name: value for name, value in apart.items() if value is not None}
    nested = raw.get("transformer_layer_config") if isinstance(raw, dict) else None
    if isinstance(raw, dict):
        raw = _DEFAULTS.get(str(raw.get("speculators_model_type")), {}) | raw
    own = _Config.of(raw, place, kind)
    within = place if nested is None else f"{place}, transformer_layer_config"
    of_layer = _LayerConfig.of(raw if nested is None else nested, within, kind)
    speculators = nested is not None
    transformers = not speculators and own.dflash_config is None and "markov_rank" not in raw
    windows, count = of_layer.windows(within, everywhere=transformers), of_layer.num_hidden_layers
    # In `speculators` all nodes of a block share one window of context tokens. LlamaConfig cannot say so, hence DFlashConfig.windows.
    seen = () if speculators else windows
    layer = of_layer.llama(
        within, num_hidden_layers=count,
        layer_types=["sliding_attention" if w else "full_attention" for w in seen or (None,) * count],
        # A window of LlamaConfig includes the token itself, a window in the DFlash format of transformers does not.
        sliding_window=next((w + transformers for w in seen if w), None),
    )  # fmt: skip
    layers = own.target_layer_ids or _authors_choice(own.num_target_layers, layer.num_hidden_layers)
    if own.aux_hidden_state_layer_ids:  # `speculators` numbers the inputs of layers: 2 is the output of layer 1
        layers = [layer - 1 for layer in own.aux_hidden_state_layer_ids]
    if not layers:
        raise SettingsError(f"{place} is not a {kind}: it has no target_layer_ids")
    if min(layers) < 0:
        raise UnsupportedError(
            f"{place}: the draft model reads the target's embeddings as a feature, which is not supported"
        )
    if own.conv_group_size and layer.hidden_size % own.conv_group_size:
        raise SettingsError(
            f"{place}: conv_group_size is {own.conv_group_size}, which does not divide hidden_size, {layer.hidden_size}"
        )
    # Two fields can say that the last committed token's node drafts the first token. In DSpark this is the default.
    from_last = own.shift_label if own.sample_from_anchor is None else own.sample_from_anchor
    if own.sample_from_anchor is None and "markov_rank" in raw:
        from_last = True
    config = DFlashConfig(
        layer, own.block_size, own.mask_token_id, tuple(layers), _causal(own, windows, count, speculators), from_last,
        own.conv_kernel_size, own.conv_group_size, draft_vocab_size=own.draft_vocab_size,
        windows=windows if speculators else (),
    )  # fmt: skip
    return replace(config, head=HeadFields(raw, place, layer, config.places, own.draft_vocab_size or layer.vocab_size))


def _causal(own: _Config, windows: tuple[int | None, ...], count: int, speculators: bool) -> tuple[bool, ...]:
    """For each layer, whether it masks later nodes of a block. Default: only layers with a window in the format of `speculators`."""
    causal = next((flag for flag in (own.causal_head, own.is_causal, own.causal) if flag is not None), None)
    if causal is not None or not (speculators and windows):
        return (bool(causal),) * count
    return tuple(bool(window) and not own.sliding_window_non_causal for window in windows)


def _authors_choice(depth: int | None, count: int) -> list[int] | None:
    """The layers that the authors' draft models read by default: evenly spaced indices. None if `depth` or `count` is 0 or None.

    Args:
        depth: number of the target's layers.
        count: number of the draft model's layers.
    """
    if not depth or not count:
        return None
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def load_draft_model(
    folder: str | Path, device: torch.device, dtype: torch.dtype, heads: tuple[type[BlockHead], ...] = HEADS
) -> DFlashFiles:
    """Loads a draft model from a folder, and caches it until its files change. No code in the files is run.

    Args:
        heads: the classes of heads that the draft model may have.

    Raises:
        SettingsError: files are missing, unreadable, or hold no draft model.
        UnsupportedError: see :func:`read_config`.
    """
    path = Path(folder).expanduser()
    files = sorted([path / CONFIG, path / INDEX, *path.glob("*.safetensors")])
    return _load(path.absolute(), stamp_of(files), device, dtype, heads)


@lru_cache(maxsize=4)
def _load(
    path: Path, stamp: Stamp, device: torch.device, dtype: torch.dtype, heads: tuple[type[BlockHead], ...]
) -> DFlashFiles:
    config, state = read_config(path), {}
    for name, tensor in _read(path).items():
        for theirs, ours in _RENAMED.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        state[name] = tensor
    vocabulary = _vocabulary(config, state, path, device)
    embedding, output = (state.pop(f"{name}.weight", None) for name in ("embed_tokens", "lm_head"))
    # New modules get random weights. Drawing them must not advance the caller's random generator.
    with torch.random.fork_rng(devices=[]):
        network = DFlashNetwork(config)
        head = head_of(config, heads)
    parts = set() if head is None else {name.partition(".")[0] for name in head.state_dict()}
    of_head = {name: state.pop(name) for name in list(state) if name.partition(".")[0] in parts}
    filled(network, state, path, "dflash", device, dtype)
    if head is not None:
        filled(head, of_head, path, "dflash", device, dtype)
    return DFlashFiles(
        config, network, head,
        None if embedding is None else nn.Embedding.from_pretrained(embedding.to(device, dtype)),
        None if output is None else _linear(output.to(device, dtype)),
        vocabulary,
    )  # fmt: skip


def head_of(config: DFlashConfig, heads: tuple[type[BlockHead], ...] = HEADS) -> BlockHead | None:
    """Creates a head of the first class in `heads` that the config describes, without weights; None if it describes none."""
    fields = config.head
    return None if fields is None else next((head for kind in heads if (head := kind.of(fields)) is not None), None)


def save_draft_model(
    config: DFlashConfig, network: DFlashNetwork, head: BlockHead | None, folder: Path, model: PreTrainedModel,
    ids: Tensor | None = None, output: Tensor | None = None, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Writes a draft model for the target `model` in the format of `speculators`, with a Markov head or without a head.

    Each file is written atomically, the config last, because a folder with a config is taken for a complete draft model. No embedding
    is written: the draft model uses the target's.

    Args:
        ids: ``[D]`` int64, ascending, the tokens of a reduced vocabulary; None: all tokens. A reduced vocabulary needs an `output`.
        output: ``[D, H]``, the draft model's own output head; None: the target's is used.
        dtype: dtype of the written weights.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors.torch import save

    state = network.state_dict() | ({} if head is None else head.state_dict())
    if output is not None:
        state["lm_head.weight"] = output
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}
    state |= vocabulary_tables(ids, config.layer.vocab_size)
    kind, markov = ("dflash", {}) if head is None or config.head is None else ("dspark", config.head.raw)
    fields = {
        "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[kind]],
        **speculators_fields(kind, model, config.places),
        # `speculators` numbers the inputs of layers: 2 is the output of layer 1.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.layer.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.from_last,
        "transformer_layer_config": layer_fields(config.layer, "qwen3"),
        **{name: markov[name] for name in MARKOV_FIELDS if name in markov},
        "dtype": str(dtype).removeprefix("torch."),
    }
    write_whole(folder / WEIGHTS, save(state, metadata={"format": "pt"}))
    write_whole(folder / CONFIG, (json.dumps(fields, indent=2) + "\n").encode())


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _vocabulary(
    config: DFlashConfig, state: dict[str, Tensor], path: Path, device: torch.device
) -> DraftVocabulary | None:
    """The reduced vocabulary, or None if all tokens can be drafted. Removes the vocabulary's tables from `state`."""
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    size, drafted = config.layer.vocab_size, config.draft_vocab_size
    if drafted is None or drafted == size:
        return None
    if "lm_head.weight" not in state:
        raise SettingsError(f"dflash: {path}: a reduced vocabulary ({drafted} of {size} tokens) needs its own lm_head")
    return read_vocabulary(d2t, t2d, size, drafted, f"dflash: {path}", device)


def _read(path: Path) -> dict[str, Tensor]:
    """All weights in a folder by name, from one file or several."""
    names = [WEIGHTS]
    if (path / INDEX).is_file():
        raw = read_json(path / INDEX, f"{path / INDEX} cannot be read", "dflash")
        names = sorted(set(_Index.of(raw, f"dflash: {path / INDEX}", "index of weights").weight_map.values()))
    if missing := [name for name in names if not (path / name).is_file()]:
        raise SettingsError(f"dflash: {path} has no weights: {', '.join(missing)} is missing")
    state: dict[str, Tensor] = {}
    for name in names:
        state |= read_tensors(path / name, "dflash")
    return state
