"""Writes a model of the Llama design as an OpenVINO model for GenAI's pipelines: stateful, with fused attention.

optimum-intel, which usually writes these files, pins an older transformers than this package needs, and GenAI's GGUF reader lacks
float32. So the graph is built here, operation by operation, from the weights in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decoders.errors import UnknownNameError

from .gguf_files import check_exportable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Number formats of matrices, as in ``openvino[int8]``. All but ``f32`` compute in bfloat16 where the processor can.
FORMATS = ("f32", "bf16", "int8", "int4")
#: Bits per weight of a matrix, scales included. For int4 this is rough, because the embedding has eight bits.
BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.25}
#: Number of weights of a row that share a scale in int4: the first of these numbers that divides the row's length.
GROUPS = (128, 64, 32)


def write(model: PreTrainedModel, folder: Path, number_format: str) -> None:
    """Writes ``openvino_model.xml`` and its companion files to `folder`.

    Raises:
        UnknownNameError: no such number format.
        ExportError: see :func:`~decoders_lab.gguf_files.check_exportable`.
    """
    import openvino as ov

    if number_format not in FORMATS:
        raise UnknownNameError("number format", number_format, FORMATS)
    check_exportable(model)
    graph = _Graph(model, number_format).build()
    folder.mkdir(parents=True, exist_ok=True)
    ov.save_model(graph, folder / "openvino_model.xml", compress_to_fp16=False)
    config: Any = model.config
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": config.vocab_size}))


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes `tokenizer` beside the model in `folder`, because GenAI's speculative decoding compares target's and draft's tokenizer."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer

    parts = convert_tokenizer(tokenizer, with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        ov.save_model(part, folder / f"openvino_{name}.xml")


class _Graph:
    """The graph of one model. Methods add operations and return the output of the last operation."""

    def __init__(self, model: PreTrainedModel, number_format: str) -> None:
        from openvino import opset13 as ops

        self.ops, self.config, self.number_format = ops, model.config, number_format
        self.state = {name: t.detach() for name, t in model.state_dict().items()}
        config: Any = self.config
        self.head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.sinks: list[Any] = []
        self.variables: list[Any] = []

    def build(self) -> Any:
        import openvino as ov

        ops, config = self.ops, self.config
        ids = self._input("input_ids", [-1, -1], np.int64)
        mask = self._input("attention_mask", [-1, -1], np.int64)
        positions = self._input("position_ids", [-1, -1], np.int64)
        self.beams = self._input("beam_idx", [-1], np.int32)
        shape = ops.shape_of(ids)
        self.rows = ops.gather(shape, self._const([0]), self._const(0))
        # A tied head reads this table, too.
        table = self._matrix("model.embed_tokens.weight", embedding=True)
        hidden = ops.gather(table, ops.convert(ids, "i32"), self._const(0))
        self.cos, self.sin = self._rotation(positions)
        self.bias = self._causal(ids, mask)
        for layer in range(config.num_hidden_layers):
            hidden = self._layer(hidden, layer)
        tied = config.tie_word_embeddings
        head = table if tied else self._matrix("lm_head.weight", embedding=True)
        logits = ops.matmul(self._norm(hidden, "model.norm.weight"), head, False, True)
        logits.output(0).set_names({"logits"})
        inputs = [ids, mask, positions, self.beams]
        model = ov.Model([ops.result(logits)], self.sinks, inputs, self.variables, "llama")
        return model

    def _input(self, name: str, shape: list[int], dtype: Any) -> Any:
        parameter = self.ops.parameter(shape, dtype)
        parameter.set_friendly_name(name)  # GenAI finds this name to insert paged attention
        parameter.output(0).set_names({name})
        return parameter

    def _const(self, value: Any, dtype: Any = np.int64) -> Any:
        return self.ops.constant(np.array(value, dtype))

    def _layer(self, hidden: Any, layer: int) -> Any:
        ops, name = self.ops, f"model.layers.{layer}"
        read = self._norm(hidden, f"{name}.input_layernorm.weight")
        query = self._rotate(self._split(self._linear(read, f"{name}.self_attn.q_proj"), self.heads))
        key = self._rotate(self._split(self._linear(read, f"{name}.self_attn.k_proj"), self.kv_heads))
        value = self._split(self._linear(read, f"{name}.self_attn.v_proj"), self.kv_heads)
        key, value = self._cached(key, f"{layer}.key"), self._cached(value, f"{layer}.value")
        attention = ops.scaled_dot_product_attention(query, self._shared(key), self._shared(value), self.bias)
        merged = ops.reshape(
            ops.transpose(attention, self._const([0, 2, 1, 3])), self._const([0, 0, self.heads * self.head]), True
        )
        hidden = ops.add(hidden, self._linear(merged, f"{name}.self_attn.o_proj"))
        read = self._norm(hidden, f"{name}.post_attention_layernorm.weight")
        gate = ops.swish(self._linear(read, f"{name}.mlp.gate_proj"))
        product = ops.multiply(gate, self._linear(read, f"{name}.mlp.up_proj"))
        return ops.add(hidden, self._linear(product, f"{name}.mlp.down_proj"))

    def _norm(self, x: Any, name: str) -> Any:
        ops = self.ops
        squares = ops.reduce_mean(ops.power(x, self._const(2.0, np.float32)), self._const([-1]), True)
        root = ops.sqrt(ops.add(squares, self._const(self.config.rms_norm_eps, np.float32)))
        scaled = ops.multiply(x, ops.divide(self._const(1.0, np.float32), root))
        return ops.multiply(scaled, ops.constant(self.state[name].float().cpu().numpy()))

    def _linear(self, x: Any, name: str) -> Any:
        return self.ops.matmul(x, self._matrix(f"{name}.weight"), False, True)

    def _split(self, x: Any, heads: int) -> Any:
        """``[B, S, heads · D]`` as ``[B, heads, S, D]``."""
        split = self.ops.reshape(x, self._const([0, 0, heads, self.head]), True)
        return self.ops.transpose(split, self._const([0, 2, 1, 3]))

    def _rotation(self, positions: Any) -> tuple[Any, Any]:
        """Cosines and sines of the rotary angles, ``[B, 1, S, D]`` each."""
        ops = self.ops
        base = self.config.rope_parameters["rope_theta"]
        inverse = 1.0 / (base ** (np.arange(0, self.head, 2, dtype=np.float32) / np.float32(self.head)))
        # As in exported models: the pass that inserts paged attention looks for the position ids after this operation.
        row = ops.convert(ops.unsqueeze(positions, self._const(1)), "f32")
        column = ops.constant(inverse.astype(np.float32).reshape(1, -1, 1))
        angles = ops.unsqueeze(
            ops.transpose(ops.matmul(column, row, False, False), self._const([0, 2, 1])), self._const(1)
        )
        both = ops.concat([angles, angles], -1)
        return ops.cos(both), ops.sin(both)

    def _rotate(self, x: Any) -> Any:
        ops, half = self.ops, self.head // 2
        parts = ops.variadic_split(x, self._const(-1), self._const([half, half]))
        turned = ops.concat([ops.multiply(parts.output(1), self._const(-1.0, np.float32)), parts.output(0)], -1)
        return ops.add(ops.multiply(x, self.cos), ops.multiply(turned, self.sin))

    def _cached(self, x: Any, name: str) -> Any:
        """The cache's content followed by `x`. The graph also appends `x` to the cache."""
        import openvino as ov
        from openvino.op import util

        ops = self.ops
        info = util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, self.kv_heads, -1, self.head])
        info.data_type, info.variable_id = ov.Type.f32, f"past.{name}"
        variable = util.Variable(info)
        self.variables.append(variable)
        shape = ops.concat([self.rows, self._const([self.kv_heads, 0, self.head])], 0)
        past = ops.read_value(ops.broadcast(self._const(0.0, np.float32), shape), variable)
        both = ops.concat([ops.gather(past, self.beams, self._const(0)), x], 2)
        self.sinks.append(ops.assign(both, variable))
        return both

    def _shared(self, x: Any) -> Any:
        """Keys or values with each head repeated for every query head that reads it."""
        repeats = self.heads // self.kv_heads
        if repeats == 1:
            return x
        ops = self.ops
        shape = ops.shape_of(x)
        front = ops.gather(shape, self._const([0, 1]), self._const(0))
        back = ops.gather(shape, self._const([2, 3]), self._const(0))
        target = ops.concat([front, self._const([repeats]), back], 0)
        wide = ops.broadcast(ops.unsqueeze(x, self._const([2])), target, "BIDIRECTIONAL")
        return ops.reshape(wide, self._const([0, self.heads, -1, self.head]), True)

    def _causal(self, ids: Any, mask: Any) -> Any:
        """The attention bias ``[B, 1, S, T]``: 0 where a token may attend, float32's least number elsewhere."""
        ops = self.ops
        zero, one = self._const(0), self._const(1)
        new = ops.gather(ops.shape_of(ids), one, zero)
        total = ops.gather(ops.shape_of(mask), one, zero)
        queries = ops.range(ops.subtract(total, new), total, one, "i64")
        keys = ops.range(zero, total, one, "i64")
        causal = ops.less_equal(ops.unsqueeze(keys, self._const([0])), ops.unsqueeze(queries, self._const([1])))
        present = ops.unsqueeze(ops.not_equal(mask, zero), self._const([1, 2]))
        allowed = ops.logical_and(ops.unsqueeze(causal, self._const([0, 1])), present)
        return ops.select(allowed, self._const(0.0, np.float32), self._const(np.finfo(np.float32).min, np.float32))

    def _matrix(self, name: str, embedding: bool = False) -> Any:
        """The weight `name`, stored in ``self.number_format`` and converted to float32 for the operations."""
        ops, weight = self.ops, self.state[name].float().cpu()
        if self.number_format == "f32":
            return ops.constant(weight.numpy())
        if self.number_format == "bf16":
            bits = weight.to(torch.bfloat16).view(torch.int16).numpy()
            return ops.convert(_stored(bits, list(weight.shape), "bf16"), "f32")
        group = next((g for g in GROUPS if weight.shape[1] % g == 0), None)
        # The embedding, which is also the head, is stored in eight bits even for int4, as in other exported models.
        if self.number_format == "int8" or embedding or group is None:
            return self._integers(weight, 127, "i8")
        grouped = self._integers(weight.reshape(weight.shape[0], -1, group), 7, "i4")
        return ops.reshape(grouped, self._const(list(weight.shape)), False)

    def _integers(self, weight: torch.Tensor, highest: int, kind: str) -> Any:
        """`weight` quantized to symmetric integers up to `highest`, with a scale for each vector along the last axis."""
        scale = (weight.abs().amax(-1, keepdim=True) / highest).clamp_min(torch.finfo(torch.float32).tiny)
        values = (weight / scale).round().clamp(-highest - 1, highest).to(torch.int8).numpy()
        if kind == "i4":  # two per byte, the first in the low half
            halves = values.reshape(-1, 2).astype(np.uint8) & 15
            stored = _stored(halves[:, 0] | halves[:, 1] << 4, list(weight.shape), "i4")
        else:
            stored = self.ops.constant(values)
        return self.ops.multiply(self.ops.convert(stored, "f32"), self.ops.constant(scale.numpy()))


def _stored(values: np.ndarray, shape: list[int], kind: str) -> Any:
    """A constant of the type `kind`, which numpy lacks. values: its bytes, as an array of any type."""
    import openvino as ov

    tensor = ov.Tensor(getattr(ov.Type, kind), ov.Shape(shape))
    tensor.data.reshape(-1).view(np.uint8)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return ov.op.Constant(tensor)
