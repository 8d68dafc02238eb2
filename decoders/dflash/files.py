"""DFlash draft models on disk: the authors' format and that of transformers, read only."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import LlamaConfig

from ..common.network_files import (
    Count,
    FileConfig,
    LlamaLayerConfig,
    Stamp,
    Whole,
    filled,
    read_json,
    read_tensors,
    stamp_of,
)
from ..errors import SettingsError, UnsupportedError
from .network import DFlashConfig, DFlashNetwork

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
#: What transformers calls the parts that fuse the target's hidden states, and what the authors do.
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


class _Config(LlamaLayerConfig):
    """Either format's. The authors keep two fields apart in ``dflash_config``; transformers puts them beside the others."""

    intermediate_size: Count
    num_hidden_layers: Whole
    block_size: Annotated[Whole, Field(ge=2)]
    mask_token_id: Whole
    target_layer_ids: list[Whole] | None = None
    num_target_layers: Whole | None = None
    layer_types: list[str] | None = None
    sliding_window: Annotated[Whole, Field(ge=0)] | None = None
    dflash_config: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _side_by_side(cls, raw: dict[str, Any]) -> dict[str, Any]:
        apart = raw.get("dflash_config")
        return raw | {n: v for n, v in apart.items() if v is not None} if isinstance(apart, dict) else raw


class _Index(FileConfig):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


def read_config(folder: str | Path) -> DFlashConfig:
    """What the ``config.json`` of a draft model says, in either format.

    Raises:
        SettingsError: there is none, it is none of a DFlash draft model, or a field has a value that it cannot have.
        UnsupportedError: a design that is not had here.
    """
    path = Path(folder).expanduser() / CONFIG
    place, kind = f"dflash: {path}", "config of a DFlash draft model"
    own = _Config.of(read_json(path, f"there is no draft model at {str(folder)!r}", "dflash"), place, kind)
    layers = own.target_layer_ids or _authors_choice(own.num_target_layers, own.num_hidden_layers)
    if not layers:
        raise SettingsError(f"{place} is no {kind}: it has no target_layer_ids")
    return DFlashConfig(_layer(own, place), own.block_size, own.mask_token_id, tuple(layers))


def _authors_choice(depth: int | None, count: int) -> list[int] | None:
    """Layers of the target, spread evenly: the authors' where a config names none."""
    if not depth or not count:
        return None
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def _layer(own: _Config, place: str) -> LlamaConfig:
    count, window = own.num_hidden_layers, own.sliding_window or 0
    authors = own.dflash_config is not None
    types = own.layer_types or ["full_attention" if authors or not window else "sliding_attention"] * count
    if set(types) - {"full_attention", "sliding_attention"} or len(types) != count or not count:
        raise UnsupportedError(
            f"{place}: num_hidden_layers is {count}, and layer_types are {', '.join(types) or 'none'}: there is one layer or more, and "
            "each is full_attention or sliding_attention"
        )
    if "sliding_attention" in types and not window:
        raise SettingsError(f"{place} has layers with a sliding window, and no sliding_window")
    # The authors see a window of so many tokens, the token itself included; transformers as many before it.
    seen = (window if authors else window + 1) if "sliding_attention" in types else None
    return own.llama(place, num_hidden_layers=count, layer_types=types, sliding_window=seen)


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
        raw = read_json(path / INDEX, f"{path / INDEX} cannot be read", "dflash")
        names = sorted(set(_Index.of(raw, f"dflash: {path / INDEX}", "index of weights").weight_map.values()))
    if missing := [name for name in names if not (path / name).is_file()]:
        raise SettingsError(f"dflash: {path} holds no {', '.join(missing)}, where weights are looked for")
    state: dict[str, Tensor] = {}
    for name in names:
        state |= read_tensors(path / name, "dflash")
    return state
