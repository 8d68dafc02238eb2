"""Writes a model of the Llama design as a GGUF file for llama.cpp.

Prompts and texts are passed as token ids, so the file needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decoders.errors import DecodersError, UnknownNameError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

#: The names of file types in the library ``gguf``, by the names of number formats in brackets, as in ``llama.cpp[q8_0]``.
FORMATS = {
    "f32": "ALL_F32", "bf16": "MOSTLY_BF16", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0",
    "q4_1": "MOSTLY_Q4_1",
}  # fmt: skip
#: The names of a layer's parts in the file, by their names in transformers.
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class ExportError(DecodersError, ValueError):
    """A model cannot be written for another engine."""


def check_exportable(model: PreTrainedModel) -> None:
    """Checks that `model` can be written for another engine.

    Raises:
        ExportError: the design is not Llama's, or the model has an option of the design that is not supported here.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        f"its design is {config.model_type!r}, and only 'llama' is written": config.model_type != "llama",
        "its projections have biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        f"its rotary embedding is {rope.get('rope_type')!r}": rope.get("rope_type", "default") != "default",
    }
    for reason, holds in reasons.items():
        if holds:
            raise ExportError(f"{config.name_or_path or 'the model'} cannot be written for other engines: {reason}")


def write(
    model: PreTrainedModel, path: Path, number_format: str, tokens: Sequence[str] = (), merges: Sequence[str] = ()
) -> None:
    """Writes `model` to `path` with its matrices in `number_format` and its norms in float32.

    llama.cpp itself quantizes to 8 and 4 bits, so the file is what its users have: with 4 bits, the output head has more bits.

    Args:
        tokens, merges: tokens and merges of a byte-level tokenizer, in byte-level spelling; without tokens the file has no tokenizer.

    Raises:
        UnknownNameError: no such number format.
        ExportError: see :func:`check_exportable`; or llama.cpp cannot quantize the model.
    """
    if number_format not in FORMATS:
        raise UnknownNameError("number format", number_format, FORMATS)
    check_exportable(model)
    if number_format.startswith("q"):
        whole = path.with_suffix(".whole")
        write_uniformly(model, whole, "f32", tokens, merges)
        _quantize(whole, path, FORMATS[number_format])
        whole.unlink()
    else:
        write_uniformly(model, path, number_format, tokens, merges)


def write_uniformly(
    model: PreTrainedModel, path: Path, number_format: str, tokens: Sequence[str] = (), merges: Sequence[str] = ()
) -> None:
    """As :func:`write`, but with all matrices in the same format, and without llama.cpp."""
    import gguf

    config: Any = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind = gguf.GGMLQuantizationType[number_format.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(int(gguf.LlamaFileType[FORMATS[number_format]]))
    writer.add_tokenizer_model("gpt2" if tokens else "no_vocab")
    if tokens:
        writer.add_token_list(list(tokens))
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_merges(list(merges))
    for name, values in _tensors(model, head):
        if values.ndim < 2 or number_format == "f32":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantize(source: Path, to: Path, file_type: str) -> None:
    import gguf
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = gguf.LlamaFileType[file_type]
    if llama_cpp.llama_model_quantize(bytes(source), bytes(to), options):
        raise ExportError(f"llama.cpp does not quantize {source.name}")


def bits_per_weight(path: Path) -> float:
    """Bits per weight of the matrices in a GGUF file, including the scales of blocks."""
    import gguf

    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    return 8 * sum(int(each.n_bytes) for each in matrices) / sum(int(each.n_elements) for each in matrices)


def _tensors(model: PreTrainedModel, head: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor's name in the file and its float32 values; tied embeddings only once."""
    config: Any = model.config
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        values = tensor.detach().to("cpu", torch.float32).numpy()
        if module in _WHOLE:
            yield f"{_WHOLE[module]}.weight", values
            continue
        _, _, layer, part = module.split(".", 3)
        if part.endswith(("q_proj", "k_proj")):
            # llama.cpp rotates pairs of neighbouring dimensions; transformers pairs the two halves of a head.
            halves = values.reshape(-1, 2, head // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        yield f"blk.{layer}.{_PARTS[part]}.weight", values
