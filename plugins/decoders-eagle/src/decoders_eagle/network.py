"""The network: one decoder layer reads, side by side, a token's embedding and the target's hidden state at the preceding token."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from decoders.drafters import cache_keyword
from decoders.heads.network_files import CONFIG, LlamaLayerConfig, Stamp, filled, read_json, read_tensors, stamp_of

NAME, WEIGHTS = "tiny_eagle", "model.safetensors"


class Network(nn.Module):
    """Predicts the next tokens' hidden states ``[B, N, H]``, from which the target's output head computes logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(config)
        self.cache_keyword = cache_keyword(self.layer)

    def forward(
        self, embedded: Tensor, features: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any = None
    ) -> Tensor:
        states = self.fuse(torch.cat([embedded, features], dim=-1))
        return self.layer(
            states, position_embeddings=self.rotary(states, position_ids), attention_mask=attention_mask,
            **{self.cache_keyword: cache},
        )  # fmt: skip


def save(network: Network, folder: Path) -> None:
    """Writes a network that :func:`load` reads."""
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, folder / WEIGHTS)
    network.config.to_json_file(folder / CONFIG)


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> Network:
    """Loads a network, which is cached until its files change. Raises SettingsError if files are missing, damaged or do not fit."""
    return _load(folder, stamp_of([folder / CONFIG, folder / WEIGHTS]), device, dtype)


@lru_cache(maxsize=2)
def _load(folder: Path, stamp: Stamp, device: torch.device, dtype: torch.dtype) -> Network:
    file = folder / CONFIG
    raw = read_json(file, f"there is no network at {str(folder)!r}", NAME)
    config = LlamaLayerConfig.of(raw, f"{NAME}: {file}", "config of a tiny EAGLE").llama(f"{NAME}: {file}")
    with torch.random.fork_rng(devices=[]):  # initial weights are random, and must not advance the caller's generator
        network = Network(config)
    return filled(network, read_tensors(folder / WEIGHTS, NAME), folder / WEIGHTS, NAME, device, dtype)
