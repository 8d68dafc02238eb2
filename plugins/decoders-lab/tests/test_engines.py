"""Other engines: requests for them, the files that are written for them, and their tokens if they are installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders_lab import engines, gguf_files
from decoders_lab.engines import EngineMissingError, Request, beside_methods, check_installed, requests
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from decoders import bench, demo
from decoders.bench import EngineOutput
from decoders.bench.tables import identical
from decoders.cli import app
from decoders.errors import SettingsError, UnknownNameError

NEW = 10
needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="the extra gguf is not installed")
PROMPTS = [("one", "code", "a b c a b c"), ("two", "code", "x = 1; y = x;")]

needs_llama = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")
needs_openvino = pytest.mark.skipif(find_spec("openvino_genai") is None, reason="the extra openvino is not installed")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # large weights, so that the likeliest token is far ahead of the others
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def compared(
    wanted: list[str], tokenizer: Any, folder: Path, rows: int = 1, draft: Any = None
) -> dict[str, bench.Record]:
    model = llama()
    asked = [request for text in wanted for request in requests(text, draft is not None)]
    # OpenVINO's speculative decoding needs a tokenizer, but OpenVINO cannot convert the tests' tokenizer. Prompts are token ids.
    complete = AutoTokenizer.from_pretrained(Path(demo.__file__).parent / "models" / "draft")
    others = beside_methods(asked, model, folder, draft, complete, ["float32"])
    methods = [*bench.transformers_methods(model, names=[]), *others]
    records = bench.summarise(
        bench.measure(methods, bench.workloads(tokenizer, PROMPTS, rows), new_tokens=NEW, repeats=1)
    )
    for method in others:
        if method.engine is not None:
            method.engine.close()
    return {record.method: record for record in records}


@needs_llama
def test_llama_cpp_writes_the_tokens_of_the_same_weights(tokenizer: Any, tmp_path: Path) -> None:
    names = ["llama.cpp[f32]", "llama.cpp[f32,lookup]", "llama.cpp[f32,draft]"]
    records = compared(names, tokenizer, tmp_path, draft=llama(seed=1))
    for name in names:
        record = records[name]
        assert record.status == "ok" and record.engine == "llama.cpp" and record.settings["weights"] == "f32", (
            record.reason
        )
        assert record.identical, record.difference


@needs_llama
def test_llama_cpp_decodes_several_rows(tokenizer: Any, tmp_path: Path) -> None:
    records = compared(["llama.cpp[f32]", "llama.cpp[f32,lookup]"], tokenizer, tmp_path, rows=2)
    assert records["llama.cpp[f32]"].identical, records["llama.cpp[f32]"].difference
    assert records["llama.cpp[f32,lookup]"].status == "skipped"
    assert "one row" in records["llama.cpp[f32,lookup]"].reason


@needs_llama
@pytest.mark.parametrize("number_format", [name for name in gguf_files.FORMATS if name != "f16"])
def test_llama_cpp_reads_every_number_format(number_format: str, tokenizer: Any, tmp_path: Path) -> None:
    record = compared([f"llama.cpp[{number_format}]"], tokenizer, tmp_path)[f"llama.cpp[{number_format}]"]
    assert record.status == "ok", record.reason
    assert record.identical is not None and record.tokens_per_second is not None


@needs_llama
def test_llama_cpp_itself_quantizes_to_four_bits(tmp_path: Path) -> None:
    gguf_files.write(llama(), tmp_path / "m.gguf", "q4_0")
    import gguf

    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "Q4_0" and types["token_embd.weight"] == "Q8_0", "the head has more bits"
    assert 4.5 < gguf_files.bits_per_weight(tmp_path / "m.gguf") < 8.5


@needs_openvino
def test_openvino_writes_the_tokens_of_the_same_weights(tokenizer: Any, tmp_path: Path) -> None:
    names = ["openvino[f32]", "openvino[f32,lookup]", "openvino[f32,draft]"]
    records = compared(names, tokenizer, tmp_path, draft=llama(seed=1))
    for name in names:
        record = records[name]
        assert record.status == "ok" and record.engine == "openvino", record.reason
        assert record.identical, record.difference


@needs_openvino
def test_openvino_decodes_several_rows(tokenizer: Any, tmp_path: Path) -> None:
    record = compared(["openvino[f32]"], tokenizer, tmp_path, rows=2)["openvino[f32]"]
    assert record.identical, record.difference


@needs_openvino
@pytest.mark.parametrize("number_format", ["bf16", "int8", "int4"])
def test_openvino_holds_the_rounded_weights(number_format: str, tmp_path: Path) -> None:
    import numpy as np
    import openvino as ov
    from decoders_lab import openvino_files

    model = llama()
    openvino_files.write(model, tmp_path, number_format)
    compiled = ov.Core().compile_model(
        tmp_path / "openvino_model.xml",
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
    )
    ids = torch.arange(3, 12)[None]
    inputs = {
        "input_ids": ids.numpy(), "attention_mask": np.ones((1, 9), np.int64), "position_ids": np.arange(9)[None],
        "beam_idx": np.zeros(1, np.int32),
    }  # fmt: skip
    logits = torch.tensor(next(iter(compiled.create_infer_request().infer(inputs).values())))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(_rounded(weight, number_format, "embed" in name))
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def _rounded(weight: torch.Tensor, number_format: str, embedding: bool) -> torch.Tensor:
    if number_format == "bf16":
        return weight.bfloat16().float()
    small = number_format == "int4" and not embedding
    group = next(width for width in (128, 64, 32) if weight.shape[1] % width == 0)
    groups = weight.reshape(weight.shape[0], -1, group if small else weight.shape[1])
    scale = groups.abs().amax(-1, keepdim=True) / (7 if small else 127)
    return ((groups / scale).round() * scale).reshape(weight.shape)


@needs_gguf
def test_the_gguf_file_says_what_the_model_says(tmp_path: Path) -> None:
    model = llama()
    gguf_files.write(model, tmp_path / "m.gguf", "f32")
    import gguf

    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 + 2 * 9, "tied embeddings once"
    down = tensors["blk.1.ffn_down.weight"]
    assert torch.equal(torch.tensor(down.data), model.model.layers[1].mlp.down_proj.weight.detach())
    # Interleaved halves: row 1 of the file is row 16 of the head.
    query = model.model.layers[0].self_attn.q_proj.weight.detach()
    assert torch.equal(torch.tensor(tensors["blk.0.attn_q.weight"].data)[:4], query[[0, 16, 1, 17]])


@pytest.mark.parametrize(
    ("text", "draft", "names"),
    [
        ("openvino[int4,lookup]", False, ["openvino[int4,lookup]"]),
        ("llama.cpp[file=a/b.gguf]", False, ["llama.cpp[b.gguf]"]),
        ("openvino", False, [f"openvino[{f}{m}]" for f in ("f32", "bf16", "int8", "int4") for m in ("", ",lookup")]),
        ("llama.cpp[q8_0,draft]", False, ["llama.cpp[q8_0,draft]"]),
    ],
)
def test_engines_are_asked_for_by_name(text: str, draft: bool, names: list[str]) -> None:
    assert [request.name for request in requests(text, draft)] == names


def test_an_engine_alone_drafts_where_there_is_a_draft_model() -> None:
    assert "llama.cpp[bf16,draft]" in [request.name for request in requests("llama.cpp", draft=True)]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("lama.cpp", UnknownNameError, "llama.cpp"),
        ("openvino[int3]", UnknownNameError, "int4"),
        ("llama.cpp[q8_0,q4_0]", SettingsError, "one number format"),
        ("llama.cpp[lookup]", SettingsError, "one number format"),
    ],
)
def test_mistakes_in_names_are_told(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        requests(text, False)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineMissingError, match=r"decoders-lab\[openvino\]"):
        check_installed("openvino")
    done = run("bench", "beside", "-e", "llama.cpp[f32]")
    assert done.exit_code == 2 and "decoders-lab[llamacpp]" in "".join(done.output.split())


def test_another_design_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, intermediate_size=8, num_attention_heads=1, attention_bias=True,
    ))  # fmt: skip
    with pytest.raises(gguf_files.ExportError, match="biases"):
        gguf_files.write(model, tmp_path / "m.gguf", "f32")


def test_figures_stand_in_the_nearest_table() -> None:
    both = ["float32", "bfloat16"]
    assert [engines.table_dtype(name, both) for name in ("f32", "bf16", "q8_0", "int4")] == [
        "float32", "bfloat16", "bfloat16", "bfloat16"
    ]  # fmt: skip
    assert engines.table_dtype("q8_0", ["float32"]) == "float32"


class Counting:
    """An engine that counts on from the prompt's last token, and goes wrong after three tokens."""

    def __init__(self) -> None:
        self.closed = False

    def generate(self, prompts: Any, new_tokens: int, stops: Any, on_tokens: Any = None) -> EngineOutput:
        rows = [[(prompt[-1] + i) % 7 for i in range(new_tokens)] for prompt in prompts]
        for tokens in zip(*rows, strict=True):
            if on_tokens is not None and not on_tokens(list(tokens)):
                break
        return EngineOutput(rows, steps=2)

    def close(self) -> None:
        self.closed = True


def test_any_engine_is_measured_as_ours_are(
    model: Any, methods: list[Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "_opened", lambda *_: (Counting(), 4.5))
    monkeypatch.setattr(engines, "check_installed", lambda engine: None)
    (other,) = beside_methods([Request("openvino", "int4")], model, tmp_path, dtypes=["float32"])
    entries = bench.measure([*methods, other], bench.workloads(tokenizer, PROMPTS, 2), new_tokens=6, repeats=2)
    record = bench.summarise(entries)[-1]
    assert record.status == "ok", record.reason
    assert record.identical is False and identical(record).plain == "no" and "new token" in record.difference
    assert record.first_token is not None, "a call ends at its first token without passing through the engine"
    assert record.tokens_per_second is not None and record.ratio is not None
    ours = next(r for r in bench.summarise(entries) if r.method == "autoregressive")
    assert record.weight_bytes == int((ours.weight_bytes or 0) * 4.5 / 32)
