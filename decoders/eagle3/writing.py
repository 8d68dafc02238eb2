"""Heads written to disk: in the format of vLLM's `speculators`, or the authors'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..common.files import write_whole
from .files import CONFIG, WEIGHTS
from .head import Eagle3Head

Format = Literal["speculators", "authors"]
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "initializer_range", "rope_parameters", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def save_head(
    head: Eagle3Head, ids: Tensor | None, folder: Path, model: PreTrainedModel, depth: int, form: Format = "speculators",
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Writes a head for `model`; each file is written whole, the config last: it is what makes a folder one of a head.

    The embedding, which is the target's, is not among the weights: vLLM and the authors' code take the target's.

    Args:
        ids: ``[D]`` int64, ascending, the tokens it can propose; None: all.
        depth: tokens that a chain should draft.
        dtype: of the weights.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save

    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()}
    if form == "speculators":
        state = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in state.items()}
    if ids is not None:
        state["d2t"] = ids - torch.arange(len(ids))
        state["t2d"] = torch.isin(torch.arange(head.head_config.layer.vocab_size), ids)
    config = (_speculators if form == "speculators" else _authors)(head, model, depth)
    config["dtype" if form == "speculators" else "torch_dtype"] = str(dtype).removeprefix("torch.")
    write_whole(folder / WEIGHTS[0], save(state, metadata={"format": "pt"}))
    write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _layer(head: Eagle3Head) -> dict[str, Any]:
    """Of the decoder layer, rotary positions as transformers 5 writes them and as earlier versions do."""
    layer = head.head_config.layer.to_dict()
    fields = {"model_type": "llama", **{name: layer[name] for name in _FIELDS if name in layer}}
    rope = layer.get("rope_parameters") or {}
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return fields


def _speculators(head: Eagle3Head, model: PreTrainedModel, depth: int) -> dict[str, Any]:
    config = head.head_config
    assert config.layers is not None
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"name_or_path": _public_name(model), "architectures": [type(model).__name__]},
        },
        "draft_vocab_size": config.draft_vocab_size,
        # Layers are numbered by what goes into them.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(head),
    }


def _public_name(model: PreTrainedModel) -> str | None:
    """Of the target, for those who load the head; a folder of this machine is none."""
    name = getattr(model.config, "name_or_path", None)
    return name if name and not Path(name).exists() else None


def _authors(head: Eagle3Head, model: PreTrainedModel, depth: int) -> dict[str, Any]:
    config = head.head_config
    assert config.layers is not None
    return {
        **_layer(head),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        # Not read by the authors' code, which takes layers of its own choice; SGLang reads it.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.layers), "use_aux_hidden_state": True},
    }
