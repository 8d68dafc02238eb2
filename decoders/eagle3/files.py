"""Heads read from disk: EAGLE-3 in the authors' format and that of vLLM's `speculators`, EAGLE and EAGLE-2 in the authors'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from ..common.weights import Stamp, filled, read_json, read_tensors, stamp_of
from ..drafting import DraftVocabulary
from ..errors import SettingsError, UnsupportedError
from .eagle1 import EagleConfig, EagleHead
from .head import Eagle3Config, Eagle3Head

#: Where a head lies beside a model's own files, and the name of the one that comes with the demo model.
FOLDER, DEMO = "eagle3", "demo"
CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Of a decoder layer's config; all else is of no use to it.
_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size",
    "hidden_act", "attention_bias", "mlp_bias", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Eagle3Files:
    """A head and what it can propose."""

    head: Eagle3Head | EagleHead
    vocabulary: DraftVocabulary


def find_head(named: str | None, config: Any) -> Path:
    """The folder of the head for a model with this `config`: the one that is named, or ``eagle3`` beside the model's own files.

    Raises:
        UnsupportedError: none is named, and none lies beside the model.
    """
    if named == DEMO:
        return Path(__file__).parent.parent / "demo" / "models" / "target" / FOLDER
    if named is not None:
        return Path(named).expanduser()
    own = getattr(config, "name_or_path", "")
    if own and (Path(own) / FOLDER / CONFIG).is_file():
        return Path(own) / FOLDER
    raise UnsupportedError(
        "eagle3 needs a head that was trained for the model: name its folder as head=, or keep it as 'eagle3' in the model's own "
        "folder; `decoders train eagle3` makes one"
    )


def read_config(folder: str | Path) -> Eagle3Config | EagleConfig:
    """What the ``config.json`` of a head says, in any of the formats.

    Raises:
        SettingsError: there is none, or it is none of an EAGLE-3 head. UnsupportedError: a design that is not had here.
    """
    path = Path(folder).expanduser() / CONFIG
    raw = read_json(path, f"there is no head at {str(folder)!r}", "eagle3")
    nested = raw.get("transformer_layer_config")
    layer = nested if isinstance(nested, dict) else raw
    missing = [name for name in ("hidden_size", "num_attention_heads", "vocab_size") if name not in layer]
    if missing or not isinstance(raw, dict):
        raise SettingsError(f"eagle3: {path} is no config of an EAGLE-3 head: it has no {', '.join(missing)}")
    if layer.get("model_type", "llama") != "llama" or layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedError(
            f"eagle3: {path}: {layer.get('num_hidden_layers', 1)} layers of {layer.get('model_type')!r}; only one Llama layer fits"
        )
    for name in ("norm_before_fc", "fc_norm"):
        if raw.get(name):
            raise UnsupportedError(f"eagle3: {path} asks for {name}, which is not supported")
    config = LlamaConfig(
        **{name: layer[name] for name in _LAYER_FIELDS if layer.get(name) is not None}, num_hidden_layers=1
    )
    if layer is raw and "draft_vocab_size" not in raw and "Eagle3" not in "".join(raw.get("architectures") or ()):
        return EagleConfig(config, bias=bool(raw.get("bias", True)))
    return Eagle3Config(
        layer=config,
        draft_vocab_size=int(raw.get("draft_vocab_size") or config.vocab_size),
        target_hidden_size=int(raw.get("target_hidden_size") or config.hidden_size),
        layers=_layers(raw),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def _layers(raw: dict[str, Any]) -> tuple[int, ...] | None:
    """The decoder layers whose outputs a head reads.

    `speculators` numbers what goes *into* a layer, as vLLM does: its 2 is what comes out of layer 1. Heads trained with SpecForge
    keep them in ``eagle_config`` and number what comes out, as SGLang does.
    """
    into = raw.get("eagle_aux_hidden_state_layer_ids")
    if into:
        if min(into) < 1:
            raise UnsupportedError(
                "eagle3: the head reads the target's embeddings as a feature, which is not supported"
            )
        return tuple(int(layer) - 1 for layer in into)
    out_of = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(map(int, out_of)) if out_of else None


def load_head(folder: str | Path, device: torch.device, dtype: torch.dtype) -> Eagle3Files:
    """A head from a folder; read once while unchanged. No code in the files is run.

    Raises:
        SettingsError: the files are not there, not readable, or no such head. UnsupportedError: see :func:`read_config`.
    """
    path = Path(folder).expanduser()
    return _load(path.absolute(), stamp_of(path / name for name in (CONFIG, *WEIGHTS)), device, dtype)


@lru_cache(maxsize=4)
def _load(path: Path, stamp: Stamp, device: torch.device, dtype: torch.dtype) -> Eagle3Files:
    config, names = read_config(path), {name for name, *_ in stamp}
    weights = next((path / name for name in WEIGHTS if name in names), None)
    if weights is None:
        raise SettingsError(f"eagle3: {path} holds no weights: {' or '.join(WEIGHTS)} is looked for")
    # The same layer is called `midlayer` by the authors and `layers.0` by speculators.
    state = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in read_tensors(weights, "eagle3").items()
    }
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    if isinstance(config, EagleConfig):
        config = replace(config, bias="fc.bias" in state)
        with torch.random.fork_rng(devices=[]):  # modules draw their first weights, which are not kept
            eagle = EagleHead(config, embeds="embed_tokens.weight" in state)
        vocabulary = DraftVocabulary(config.layer.vocab_size)
        return Eagle3Files(filled(eagle, state, weights, "eagle3", device, dtype), vocabulary)
    if d2t is None and t2d is None and config.draft_vocab_size != config.layer.vocab_size:
        raise SettingsError(f"eagle3: {weights} has a reduced vocabulary, and neither d2t nor t2d to tell which")
    vocabulary = DraftVocabulary.of(config.layer.vocab_size, d2t, t2d)
    ids = vocabulary.ids.to(device) if vocabulary.ids is not None else None
    with torch.random.fork_rng(devices=[]):
        head = Eagle3Head(config, embeds="embed_tokens.weight" in state)
    return Eagle3Files(filled(head, state, weights, "eagle3", device, dtype), DraftVocabulary(vocabulary.size, ids))
