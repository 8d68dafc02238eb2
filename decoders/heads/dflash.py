"""DFlash (arXiv 2602.06036): decoder layers that draft a block of tokens at once, over the target's hidden states; and their files.

Read are the authors' format and that of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ..common.network_files import (
    CONFIG,
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
from ..common.transformers_compat import attention_of
from ..errors import SettingsError, UnsupportedError

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
#: What transformers calls the parts that fuse the target's hidden states, and what the authors do.
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


@dataclass(frozen=True)
class DFlashConfig:
    """What a checkpoint says of a draft model.

    Attributes:
        layer: of its decoder layers: how many, hidden size ``H``, heads, rotary positions, which of them have a window.
        block_size: tokens of a block in training: the last committed one, and masks.
        mask_token_id: what is embedded where a token is to be drafted.
        layers: decoder layers of the target whose outputs it reads.
    """

    layer: LlamaConfig
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]


class DFlashNetwork(nn.Module):
    """Called by :attr:`decoders.strategy.Context.module`.

    What the target has computed for a token is fused by `fc` to one vector, from which every layer makes a key and a value: they
    are the context, and nothing else is computed of it. A block is the embedding of the last committed token and of masks; its
    nodes see the context and each other, in both directions.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        c = config.layer
        self.fc = nn.Linear(len(config.layers) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.layers = nn.ModuleList([_Layer(c, index) for index in range(c.num_hidden_layers)])
        self.norm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(c)

    def forward(
        self, states: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any, context: bool = False
    ) -> Tensor:  # fmt: skip
        """What the target's head reads, ``[B, N, H]``, for a block; of a context only its keys and values are kept.

        Args:
            states: ``[B, N, H]``, embeddings of a block; with `context` ``[B, N, T·H]``, hidden states of the target.
        """
        if context:
            states = self.hidden_norm(self.fc(states))
        rotary = self.rotary_emb(states, position_ids)
        for layer in cast(list[_Layer], self.layers):
            if context:
                layer.self_attn.remember(states, rotary, cache)
            else:
                states = layer(states, rotary, attention_mask, cache)
        return states if context else self.norm(states)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), rotary, mask, cache)
        return states + self.mlp(self.post_attention_layernorm(states))


class _Attention(nn.Module):
    """Attention whose keys and values may come from states that ask for nothing. Queries and keys are normed per head."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, index, False
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        width, queries, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, queries * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries * self.head_dim, width, bias=config.attention_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def remember(self, states: Tensor, rotary: tuple[Tensor, Tensor], cache: Any) -> tuple[Tensor, Tensor]:
        """Stores keys and values of `states`, and gives all that there are, ``[B, heads, L, d]``."""
        keys = _turned(self.k_norm(self._heads(self.k_proj(states))), rotary)
        return cache.update(keys, self._heads(self.v_proj(states)), self.layer_idx)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        queries = _turned(self.q_norm(self._heads(self.q_proj(states))), rotary)
        keys, values = self.remember(states, rotary, cache)
        attend = ALL_ATTENTION_FUNCTIONS[attention_of(self.config)]
        attended, _ = attend(self, queries, keys, values, mask, scaling=self.head_dim**-0.5, dropout=0.0)
        return self.o_proj(attended.flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _turned(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """With rotary positions; states ``[B, heads, N, d]``."""
    cos, sin = (part[:, None] for part in rotary)
    return states * cos + rotate_half(states) * sin


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
