"""Writes docs/reference/models.md: ``python docs/generate_models.py [FILE]``. It takes some minutes.

Every causal design of the installed transformers is made tiny and random, and decodes texts of several lengths, longer than windows
and than a bucket of the prompt: with strategies it writes what it writes without, or is refused.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, SiglipVisionConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import decoders
from decoders.testing import RECURRENT
from decoders.testing.images import BLIND, HEARING, SEEING, image_prompts, tiny_seeing_model

PAGE = Path(__file__).parent / "reference" / "models.md"
LENGTHS, NEW = (20, 150, 280), 10
WINDOW, VOCAB = 32, 128
#: Parameters of the largest model that is made: what these values leave larger has sizes of its own that they do not know.
MOST = 50_000_000

#: Values by what transformers' configs call them.
VALUES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim", "embedding_size",
                     "hidden_size_global"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
         "num_encoder_layers", "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads", "num_experts",
         "num_local_experts", "n_routed_experts", "moe_num_experts", "swa_num_attention_heads"), 4,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts",
         "swa_num_key_value_heads"), 2,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size",
         "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "dim_ff",
         "expert_ffn_hidden_size"), 48,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("head_dim", "swa_head_dim", "hidden_size_per_layer_input", "index_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "global_head_dim": 16, "floor_scale": 64, "rotary_dim": 4, "index_n_heads": 2, "query_pre_attn_scalar": 8, "is_decoder": True,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

#: What designs need besides, or otherwise.
_ALTERNATE = ["sliding_attention", "full_attention"] * 2
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_SHARED_KEYS = {"num_kv_shared_layers": 2, "layer_types": _ALTERNATE}
_NOTHING_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}
TOWER = SiglipVisionConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14,
    vocab_size=8, vocab_offset=VOCAB, rms_norm_eps=1e-6,
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_experts": 4, "num_experts_per_tok": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 4},
    "cohere_compass_text": {"layer_types": _ALTERNATE, "rope_parameters": dict.fromkeys(_ALTERNATE, _ROTARY)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2, "layer_types": None},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": _SHARED_KEYS | {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    "gemma4_assistant": {"text_config": _NOTHING_PER_LAYER},
    "gemma4_text": _SHARED_KEYS,
    "gemma4_unified_text": _SHARED_KEYS,
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "inkling_text": {"unpadded_vocab_size": VOCAB},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 4,
        "ple_embed_dim": 8,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (16, 32),
        "attn_layers": ("local", "lsh", "local", "lsh"),
        "num_buckets": 4,
    },
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


TITLES = {
    "equal": "## Same tokens as transformers", "refused": "## Refused", "differs": "## Other tokens", "raises": "## Raw errors",
    "untried": "## Not tried",
}  # fmt: skip
#: Of the part about prompts with images or sounds.
SEEING_TITLE = "## Prompts with images or sounds"


@dataclass(frozen=True)
class Outcome:
    """How a design went.

    Attributes:
        verdict: "equal", "refused", "untried" where transformers makes no such model of these values, "differs" or "raises".
        why: one sentence, empty where texts are equal.
    """

    verdict: str
    why: str = ""


def designs() -> list[str]:
    """transformers' names of all causal designs."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def values_of(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Values for the fields of a config and of those inside it; lists by layer are cut so that each kind of layer stays."""
    own = OWN.get(kind.model_type, {})
    usual, values = kind(**{name: value for name, value in own.items() if isinstance(value, dict)}), dict[str, Any]()
    fields = usual.to_dict()
    layers = next((n for name, n in fields.items() if VALUES.get(name) == 4 and "layers" in name), None)
    for name, value in fields.items():
        if isinstance(inner := vars(usual).get(name), PreTrainedConfig):
            values[name] = values_of(type(inner))
        elif name in VALUES:
            values[name] = VALUES[name]
        elif isinstance(value, list) and len(value) == layers:
            first = [entry for place, entry in enumerate(value) if entry not in value[:place]]
            values[name] = (first + value)[:4] if len(first) <= 4 else value[:4]
    if "kv_lora_rank" in values:  # latent attention has no groups
        values["num_key_value_heads"] = 4
    return merged(values, own)


def merged(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`values` with those of `own`, in the configs inside them too."""
    inner = {n: merged(values[n], v) for n, v in own.items() if isinstance(v, dict) and isinstance(values.get(n), dict)}
    return values | own | inner


@torch.no_grad()
def made(design: str) -> PreTrainedModel:
    """A tiny random model; its texts have no end."""
    kind = CONFIG_MAPPING[design]
    known = next((tiny.options for tiny in RECURRENT.values() if tiny.model_type == design), {})
    config = kind(**merged(values_of(kind) | dict(known), OWN.get(design, {})))
    if design == "gemma3n":  # its own tower is one of timm's
        vars(config)["vision_config"] = TOWER
    make, own = AutoModelForCausalLM.from_config, MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    parts = [
        part for name, part in vars(config).items() if name != "text_config" and isinstance(part, own.config_class)
    ]
    if parts and not isinstance(config, own.config_class):  # it is one of several models in the config
        make, config = own._from_config, parts[0]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(config).parameters())
    if size > MOST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = make(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        elif parameter.is_floating_point():  # zeros in them would switch parts of a design off
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def outcome(design: str) -> Outcome:
    """Decodes with a design, plainly and with strategies."""
    given = {"max_new_tokens": NEW, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, texts = made(design), list[torch.Tensor]()
            for length in LENGTHS:
                half = torch.randint(5, 100, (1, length // 2), generator=torch.Generator().manual_seed(length))
                texts.append(half.repeat(1, 2))  # so that prompt lookup finds something
        except Exception as error:  # a config or a model that refuses these values
            return Outcome("untried", said(error))
        try:
            expected = [model.generate(text, **given) for text in texts]
        except Exception:  # it needs more than text, and with a strategy it must say so
            expected = [text[:, :0] for text in texts]
        return compared(model, [{"input_ids": text} for text in texts], expected)


def seeing_outcome(design: str) -> Outcome:
    """Decodes prompts with images, or sounds: one, and a batch with two, none and one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, prompts = tiny_seeing_model(design), [image_prompts(design, images) for images in ((1,), (2, 0, 1))]
        return compared(model, prompts, [model.generate(**prompt, max_new_tokens=NEW) for prompt in prompts])


def compared(model: PreTrainedModel, prompts: list[dict[str, torch.Tensor]], expected: list[torch.Tensor]) -> Outcome:
    """Whether the model writes what is expected with strategies. prompts: arguments of ``generate``."""
    decoders.enable(model)
    for prompt, wanted in zip(prompts, expected, strict=True):
        for strategy in ("autoregressive", "prompt_lookup"):
            given = {"max_new_tokens": NEW, "do_sample": False, "decoders_config": {"compile": False}}
            try:
                written = model.generate(**prompt, strategy=strategy, **given)
            except decoders.DecodersError as error:
                return Outcome("refused", sentence(error))
            except Exception as error:
                return Outcome("raises", said(error))
            if not torch.equal(written, wanted):
                return Outcome("differs", f"{strategy}, {prompt['input_ids'].shape[1]} tokens")
    return Outcome("equal")


def said(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def sentence(error: Exception) -> str:
    """A refusal, without its advice and its figures."""
    text = re.sub(r" by [\d.e+-]+ \(largest logit [\d.e+-]+\)", "", str(error))
    return text.removesuffix(" Call generate without strategy=.")


def page(outcomes: dict[str, Outcome], seeing: dict[str, Outcome]) -> str:
    return "\n".join([*_lines(outcomes), *_seeing_lines(seeing)]) + "\n"


def _lines(outcomes: dict[str, Outcome]) -> Iterator[str]:
    def named(verdict: str) -> list[str]:
        return [name for name, result in outcomes.items() if result.verdict == verdict]

    yield "<!-- Made by docs/generate_models.py from measurements. Do not edit. -->"
    yield ""
    yield "# Designs of transformers"
    yield ""
    yield (
        f"Measured with transformers {transformers.__version__}: each of its {len(outcomes)} causal designs as "
        f"a tiny random model in float32, on the CPU. Prompts have {', '.join(map(str, LENGTHS))} tokens, windows and chunks "
        f"{WINDOW}; with `autoregressive` and `prompt_lookup` a design writes what transformers writes, or is refused. The loop asks a "
        "model what it can do and checks its logits before anything is decoded, so designs that are not named here are treated alike."
    )
    for verdict, title in TITLES.items():
        if not named(verdict):
            continue
        yield ""
        yield f"{title} ({len(named(verdict))})"
        yield ""
        if verdict == "equal":
            yield ", ".join(f"`{name}`" for name in named(verdict)) + "."
            continue
        if verdict == "untried":
            yield "transformers makes no tiny model of them: they want other sizes, or packages that are not installed."
            yield ""
        yield "| Design | Why |"
        yield "|---|---|"
        for name in named(verdict):
            yield f"| `{name}` | {cell(outcomes[name].why)} |"


def _seeing_lines(outcomes: dict[str, Outcome]) -> Iterator[str]:
    yield from ("", SEEING_TITLE, "")
    yield (
        "Tiny random models that see or hear, likewise, with prompts of one image or one sound, and in batches with two, none and one. "
        "Designs that are not named here are checked at their first such prompt."
    )
    yield from ("", "| Design | |", "|---|---|")
    for name, result in outcomes.items():
        yield f"| `{name}` | {TITLES[result.verdict].removeprefix('## ').lower()}{': ' * bool(result.why)}{cell(result.why)} |"


def verdict_in(text: str, design: str) -> str | None:
    """What the page says of a design."""
    verdict = None
    for line in text.partition(SEEING_TITLE)[0].splitlines():
        verdict = next((name for name, title in TITLES.items() if line.startswith(title)), verdict)
        if verdict and f"`{design}`" in (line.split("|")[1] if line.startswith("|") else line):
            return verdict
    return None


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    transformers.logging.set_verbosity_error()
    target, outcomes = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, {}
    for design in designs():
        outcomes[design] = outcome(design)
        sys.stderr.write(f"{design}: {outcomes[design].verdict}\n")
    seeing = {design: seeing_outcome(design) for design in (*SEEING, *HEARING, *BLIND)}
    target.write_text(page(outcomes, seeing), encoding="utf-8")


if __name__ == "__main__":
    main()
