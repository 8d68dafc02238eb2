"""A tiny Llama as a GGUF file, written tensor by tensor as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

#: Name of a part of a layer in transformers, and in the file.
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: PreTrainedModel, path: Path, quantized: bool = False) -> None:
    """Writes `model`, a Llama, with a tokenizer of single bytes; `quantized`: matrices in blocks of eight bits."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab_size - 2]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "ab", "cd"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b", "c d"])  # transformers 5.17 misreads lists of one
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        values = tensor.float().numpy()
        if module in WHOLE:
            target = WHOLE[module]
        else:
            _, _, layer, part = module.split(".", 3)
            target = f"blk.{layer}.{PARTS[part]}"
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
            for key, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
                if part.endswith(key):
                    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
                    values = halves.swapaxes(1, 2).reshape(values.shape)
        if quantized and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{target}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{target}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
