"""Tiny random models of many designs (architectures), built from transformers' own configs in milliseconds, without a download.

The weights make greedy output depend on the context, so that tests of equal tokens do not pass by luck. The likeliest token is the
likeliest by far, so that the tests do not fail by rounding. Sliding windows and chunks are shorter than the texts of tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from ..errors import UnknownNameError

#: Vocabulary size of every tiny model.
VOCAB = 128
#: Number of tokens in a sliding window, and in a chunk of chunked attention.
WINDOW = 8
CHUNK = 12

_SMALL: dict[str, Any] = dict(hidden_size=32)
_TWO_LAYERS: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=4)
_LLAMA_LIKE: dict[str, Any] = dict(
    **_SMALL, **_TWO_LAYERS, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=512
)
_NO_GQA = {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}
_GPT_LIKE = dict(n_embd=32, n_layer=2, n_head=4, n_positions=512)
_SLIDING_FULL = ["sliding_attention", "full_attention"]
_DROPLESS = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


@dataclass(frozen=True)
class Architecture:
    """Builds one tiny model.

    Attributes:
        model_type: transformers' name of the design.
        options: config values.
        embedding: scale of the embeddings. The scale must be small if the embeddings are tied to the output head, or if the model
            scales them. With large embeddings, the likeliest next token would always be the text's last token.
        seq2seq: whether it is an encoder-decoder model.
    """

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    embedding: float = 1.0
    seq2seq: bool = False

    def __call__(self, seed: int = 0, **others: Any) -> PreTrainedModel:
        """Creates the model, in evaluation mode. Equal seeds give equal weights. The global random generator is not changed.

        Args:
            others: config values that replace the design's own.
        """
        options = (
            dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=0) | dict(self.options) | others
        )
        auto = AutoModelForSeq2SeqLM if self.seq2seq else AutoModelForCausalLM
        return created(auto, AutoConfig.for_model(self.model_type, **options), self.embedding, seed)


def created(auto: Any, config: PreTrainedConfig, embedding: float, seed: int) -> PreTrainedModel:
    """A model of `config`, in evaluation mode. auto: transformers' auto class of the model. embedding: see :class:`Architecture`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
        _spread(model, embedding)
    # There is no end-of-sequence token by default, so that texts are as long as a test needs.
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


@torch.no_grad()
def _spread(model: PreTrainedModel, scale: float) -> None:
    """Draws matrices with standard deviation ``gain/√fan_in``, and adds noise to vectors, so that logits differ widely."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            parameter.normal_(0.0, (4.0 if parameter is head else 2.0) * scale * parameter.shape[1] ** -0.5)
        elif parameter is head:
            parameter.normal_(0.0, 4.0 * parameter.shape[1] ** -0.5)
        elif parameter.dim() >= 2:
            # With peaked attention the output depends on single distant tokens, so that a wrong mask changes it.
            gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv", "c_attn", "query")) else 1.0
            parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if head is embedding:
        # If embeddings are small, the last norm makes logits large again.
        outer = [(name, m) for name, m in model.named_modules() if not any(map(str.isdigit, name))]
        norm = [m for name, m in outer if ("norm" in name or "ln_f" in name) and hasattr(m, "weight")][-1]
        gain = scale**-1
        zero_centred = norm.weight.mean().abs() < 0.5  # gemma's norms multiply by 1 + weight
        norm.weight.mul_(gain).add_(gain - 1 if zero_centred else 0.0)
        if getattr(norm, "bias", None) is not None:
            norm.bias.mul_(gain)


def _decoder(model_type: str, embedding: float = 1.0, **options: Any) -> Architecture:
    return Architecture(model_type, _LLAMA_LIKE | options, embedding)


def _gpt(model_type: str, embedding: float = 1.0, **options: Any) -> Architecture:
    return Architecture(model_type, _GPT_LIKE | _DROPLESS | options, embedding)


def _other(model_type: str, embedding: float = 1.0, **options: Any) -> Architecture:
    return Architecture(model_type, options, embedding)


#: Builders of the designs that the decoding loop supports, by name. A builder takes an optional seed.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": _decoder("llama"),
        "mistral": _decoder("mistral", sliding_window=WINDOW),
        "qwen2": _decoder("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        "qwen3": _decoder("qwen3", head_dim=8),
        "gemma": _decoder("gemma", 0.03, head_dim=8),
        # transformers 5.17 would choose SDPA, which ignores the soft cap.
        "gemma2": _decoder(
            "gemma2", 0.03, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, attn_implementation="eager"
        ),
        "gemma3": _decoder(
            "gemma3_text", 0.03, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=_SLIDING_FULL
        ),
        # The last layers read the keys and values of earlier layers.
        "gemma4": _decoder(
            "gemma4_text", 0.03, head_dim=8, global_head_dim=16, num_hidden_layers=4, sliding_window=WINDOW,
            layer_types=_SLIDING_FULL * 2, num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
        ),
        "phi": _decoder("phi"),
        "phi3": _decoder("phi3", sliding_window=WINDOW),
        "gpt2": _gpt("gpt2", 0.1),
        # GPT-Neo's attention modules have their own masks; every second module has a sliding window.
        "gpt_neo": _other(
            "gpt_neo", 0.1, **_SMALL, intermediate_size=48, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            window_size=WINDOW, max_position_embeddings=512,
        ),
        "gptj": _gpt("gptj", rotary_dim=4),
        "codegen": _gpt("codegen", rotary_dim=4),
        "gpt_neox": Architecture("gpt_neox", _NO_GQA),
        "opt": _other(
            "opt", 0.1, **_SMALL, **_TWO_LAYERS, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=512, dropout=0.0
        ),
        "falcon": _other("falcon", 0.1, **_SMALL, **_TWO_LAYERS, num_kv_heads=2, new_decoder_architecture=True),
        "falcon_multi_query": _other("falcon", 0.1, **_SMALL, **_TWO_LAYERS),
        "stablelm": _decoder("stablelm"),
        "mixtral": _decoder("mixtral", num_local_experts=4, num_experts_per_tok=2),
        "olmo2": _decoder("olmo2"),
        "granite": _decoder("granite"),
        "cohere": _decoder("cohere", 0.1, logit_scale=1.0),
        "cohere2": _decoder("cohere2", 0.1, logit_scale=1.0, sliding_window=WINDOW, layer_types=_SLIDING_FULL),
        "smollm3": _decoder("smollm3", 0.1, no_rope_layers=[1, 0]),
        "gpt_oss": _decoder(
            "gpt_oss", head_dim=8, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=131072
        ),
        "deepseek_v3": _decoder(
            "deepseek_v3", num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=4, n_group=2, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=12,
        ),
        "starcoder2": _decoder("starcoder2", 0.1, sliding_window=WINDOW),
        "glm4": _decoder("glm4", head_dim=8),
        "exaone4": _decoder("exaone4", sliding_window=WINDOW, sliding_window_pattern="LG", layer_types=_SLIDING_FULL),
        "hunyuan": _decoder("hunyuan_v1_dense", head_dim=8),
        "ministral": _decoder("ministral", head_dim=8, sliding_window=WINDOW, layer_types=_SLIDING_FULL),
        "llama4": _decoder(
            "llama4_text", head_dim=8, intermediate_size_mlp=48, num_local_experts=4, interleave_moe_layer_step=2,
            attention_chunk_size=CHUNK, no_rope_layers=[1, 0],
        ),
    }
)  # fmt: skip

_LAYERS: dict[str, Any] = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]
)
_DELTA: dict[str, Any] = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=3
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_MAMBA2: dict[str, Any] = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8
)  # fmt: skip
_MAMBA: dict[str, Any] = dict(mamba_d_state=8, mamba_d_conv=4, mamba_dt_rank=4, use_mamba_kernels=False)

#: Supported designs that have recurrent states besides attention: linear attention, state spaces, short convolutions.
RECURRENT: Mapping[str, Architecture] = MappingProxyType(
    {
        "qwen3_next": _decoder(
            "qwen3_next", head_dim=8, shared_expert_intermediate_size=24, decoder_sparse_step=2,
            **_LAYERS, **_DELTA, **_EXPERTS,
        ),
        "qwen3_5": _decoder("qwen3_5_text", head_dim=8, **_LAYERS, **_DELTA),
        "olmo_hybrid": _decoder("olmo_hybrid", **_LAYERS, **_DELTA | {"linear_num_key_heads": 4}),
        "granitemoehybrid": _decoder(
            "granitemoehybrid", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48, **_LAYERS, **_MAMBA2
        ),
        "bamba": _decoder("bamba", num_hidden_layers=3, attn_layer_indices=[1], **_MAMBA2),
        "falcon_h1": _decoder("falcon_h1", head_dim=8, mamba_d_ssm=64, **_MAMBA2),
        "nemotron_h": _decoder(
            "nemotron_h", num_hidden_layers=4, layers_block_type=["mamba", "attention", "mlp", "mamba"], mamba_num_heads=4,
            mamba_head_dim=16, ssm_state_size=8, n_groups=1, conv_kernel=4, chunk_size=8, head_dim=8,
        ),
        "zamba2": _decoder(
            "zamba2", num_hidden_layers=3, num_key_value_heads=4, layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=8,
            mamba_d_conv=4, n_mamba_heads=4, mamba_ngroups=1, chunk_size=8, adapter_rank=8, hybrid_layer_ids=[1], num_mem_blocks=1,
        ),
        # The recurrent layers of these designs read the beginning of a text in one pass, and later tokens one at a time.
        "jamba": _decoder(
            "jamba", num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            num_experts=4, num_experts_per_tok=2, **_MAMBA,
        ),
        "zamba": _decoder(
            "zamba", num_hidden_layers=5, num_key_value_heads=4, n_mamba_heads=2,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"], **_MAMBA,
        ),
        "kimi_linear": _decoder(
            "kimi_linear", num_key_value_heads=4, mlp_layer_types=["dense", "sparse", "dense"], linear_head_dim=8, linear_num_heads=4,
            kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, num_local_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=24, **_LAYERS,
        ),
        "lfm2": _decoder(
            "lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, block_ff_dim=48
        ),
        "lfm2_moe": _decoder(
            "lfm2_moe", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, num_dense_layers=1,
            **_EXPERTS,
        ),
    }
)  # fmt: skip

#: Designs that the decoding loop must reject: models with position biases, purely recurrent models, and encoder-decoder models.
UNSUPPORTED: Mapping[str, Architecture] = MappingProxyType(
    {
        "bloom": _other("bloom", **_SMALL, n_layer=2, n_head=4),
        "mpt": _other("mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
        "falcon_alibi": _other("falcon", **_SMALL, **_TWO_LAYERS, alibi=True),
        "mamba": _other("mamba", **_SMALL, num_hidden_layers=2, state_size=8),
        "recurrent_gemma": _decoder("recurrent_gemma", num_hidden_layers=3, lru_width=32, head_dim=8),
        "t5": Architecture(
            "t5",
            dict(
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=1,
                num_heads=4,
                decoder_start_token_id=0,
                is_encoder_decoder=True,
            ),
            seq2seq=True,
        ),
    }
)


@torch.no_grad()
def tiny_draft(name: str, seed: int = 0, noise: float = 0.05, **options: Any) -> PreTrainedModel:
    """A draft model that often agrees with ``tiny_model(name, seed, **options)``: the same weights times ``1 + noise·N(0, 1)``."""
    model = tiny_model(name, seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
    return model


def tiny_model(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """The tiny random model `name` of :data:`ARCHITECTURES`, :data:`RECURRENT` or :data:`UNSUPPORTED`.

    Args:
        options: config values that replace the design's own, such as ``num_hidden_layers=1``.

    Raises:
        UnknownNameError: there is no model `name`.
    """
    every = {**ARCHITECTURES, **RECURRENT, **UNSUPPORTED}
    if name not in every:
        raise UnknownNameError("tiny model", name, every)
    return every[name](seed, **options)
