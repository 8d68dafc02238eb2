"""DFlash draft models on disk: the authors' format and that of transformers, read only."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from ..common.weights import Stamp, filled, read_json, read_tensors, stamp_of
from ..errors import SettingsError, UnsupportedError
from .network import DFlashConfig, DFlashNetwork

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
#: Of a decoder layer's config; all else is of no use to it.
_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "hidden_act", "attention_bias", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "block_size")
#: What transformers calls the parts that fuse the target's hidden states, and what the authors do.
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def read_config(folder: str | Path) -> DFlashConfig:
    """What the ``config.json`` of a draft model says, in either format.

    Raises:
        SettingsError: there is none, or it is none of a DFlash draft model. UnsupportedError: a design that is not had here.
    """
    path = Path(folder).expanduser() / CONFIG
    raw = read_json(path, f"there is no draft model at {str(folder)!r}", "dflash")
    missing = [name for name in _NEEDED if not isinstance(raw, dict) or raw.get(name) is None]
    # The authors keep these two apart; transformers puts them beside the others.
    own = {} if missing else raw | (raw.get("dflash_config") or {})
    missing += [name for name in ("mask_token_id",) if own.get(name) is None and own]
    layers = own.get("target_layer_ids") or _authors_choice(own)
    if missing or not layers:
        raise SettingsError(
            f"dflash: {path} is no config of a DFlash draft model: it has no {', '.join(missing) or 'target_layer_ids'}"
        )
    return DFlashConfig(_layer(own, path), int(own["block_size"]), int(own["mask_token_id"]), tuple(map(int, layers)))


def _authors_choice(raw: dict[str, Any]) -> list[int] | None:
    """Layers of the target, spread evenly: the authors' where a config names none."""
    depth, count = raw.get("num_target_layers"), raw.get("num_hidden_layers")
    if not depth or not count:
        return None
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def _layer(raw: dict[str, Any], path: Path) -> LlamaConfig:
    count, window = raw["num_hidden_layers"], raw.get("sliding_window") or 0
    authors = "dflash_config" in raw
    types = raw.get("layer_types") or ["full_attention" if authors or not window else "sliding_attention"] * count
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != count:
        raise UnsupportedError(f"dflash: {path}: {count} layers, whose types are {', '.join(types)}")
    if "sliding_attention" in types and not window:
        raise SettingsError(f"dflash: {path} has layers with a sliding window, and no sliding_window")
    # The authors see a window of so many tokens, the token itself included; transformers as many before it.
    seen = (window if authors else window + 1) if "sliding_attention" in types else None
    fields = {name: raw[name] for name in _LAYER_FIELDS if raw.get(name) is not None}
    return LlamaConfig(**fields | {"layer_types": types, "sliding_window": seen})


def load_network(folder: str | Path, device: torch.device, dtype: torch.dtype) -> tuple[DFlashConfig, DFlashNetwork]:
    """A draft model from a folder; read once while unchanged. No code in the files is run.

    Raises:
        SettingsError: the files are not there, not readable, or no such model. UnsupportedError: see :func:`read_config`.
    """
    path = Path(folder).expanduser()
    files = sorted([path / CONFIG, path / INDEX, *path.glob("*.safetensors")])
    return _load(path.absolute(), stamp_of(files), device, dtype)


@lru_cache(maxsize=4)
def _load(path: Path, stamp: Stamp, device: torch.device, dtype: torch.dtype) -> tuple[DFlashConfig, DFlashNetwork]:
    config, state = read_config(path), {}
    for name, tensor in _read(path).items():
        for theirs, ours in _RENAMED.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        state[name] = tensor
    with torch.random.fork_rng(devices=[]):  # modules draw their first weights, which are not kept
        network = DFlashNetwork(config)
    return config, filled(network, state, path, "dflash", device, dtype)


def _read(path: Path) -> dict[str, Tensor]:
    """All weights of a folder, which may be in several files."""
    names = [WEIGHTS]
    if (path / INDEX).is_file():
        names = sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    if missing := [name for name in names if not (path / name).is_file()]:
        raise SettingsError(f"dflash: {path} holds no {', '.join(missing)}, where weights are looked for")
    state: dict[str, Tensor] = {}
    for name in names:
        state |= read_tensors(path / name, "dflash")
    return state
