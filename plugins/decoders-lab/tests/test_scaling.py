"""Models padded to a large model's size: the same logits, the large model's bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders_lab.scaled_shapes import SHAPES, ScaledShape, ScalingError, draft_shape, shape_named
from decoders_lab.scaling import scaled
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from decoders import bench, demo, enable
from decoders.bench.tables import subject
from decoders.bench.timed_call import vocabulary_size
from decoders.cli import app, bench_run
from decoders.errors import SettingsError, UnknownNameError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


#: Wider heads, more key heads, more layers, more tokens: everything that is padded.
WIDE = ScaledShape(hidden=96, layers=5, intermediate=160, heads=8, kv_heads=4, head=16, vocabulary=200)


def small(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**{
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
    } | sizes)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms other than 1, and weights that are large enough to matter
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def pair() -> tuple[LlamaForCausalLM, Any]:
    model = small()
    return model, scaled(model, WIDE)


def test_logits_are_the_small_models(pair: tuple[Any, Any]) -> None:
    model, wide = pair
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, found = model(ids).logits, wide(ids).logits
    torch.testing.assert_close(found[..., :61], expected, rtol=1e-5, atol=2e-5)


def test_added_tokens_lie_below_every_real_one(pair: tuple[Any, Any]) -> None:
    _, wide = pair
    ids = torch.randint(61, (4, 60), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = wide(ids).logits
    assert (logits[..., 61:].amax(-1) < logits[..., :61].amin(-1) - 100).all()
    assert logits.softmax(-1)[..., 61:].max() == 0, "never drawn at temperature 1"
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "shape",
    [
        ScaledShape(40, 3, 64, 4, 2, 8, 61),  # nothing but wider
        ScaledShape(96, 4, 100, 4, 4, 24, 64),  # a key head for each query head: original key heads occur twice
        ScaledShape(96, 7, 64, 12, 3, 16, 100),  # four query heads per key head
    ],
)
def test_every_way_of_widening_keeps_the_logits(shape: ScaledShape) -> None:
    model = small(seed=5)
    ids = torch.randint(61, (1, 30), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        difference = model(ids).logits - scaled(model, shape)(ids).logits[..., :61]
    assert difference.abs().max() < 2e-5


def test_plain_decoding_writes_the_same_tokens(pair: tuple[Any, Any]) -> None:
    model, wide = pair
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(7))
    arguments: dict[str, Any] = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    expected = model.generate(ids, **arguments)
    assert torch.equal(wide.generate(ids, **arguments), expected)
    enable(wide)
    assert torch.equal(
        wide.generate(ids, strategy="prompt_lookup", decoders_config={"compile": False}, **arguments), expected
    )


def test_added_weights_are_numbers_of_the_usual_size() -> None:
    # Zeros are a smaller share of a larger shape, so this test takes a large one.
    model = small()
    wide = scaled(model, ScaledShape(320, 12, 640, 20, 4, 16, 2000))
    weights = torch.cat([p.flatten() for p in wide.parameters() if p.ndim > 1])
    assert (weights == 0).float().mean() < 0.1
    tiny = torch.finfo(torch.float32).tiny
    assert not ((weights != 0) & (weights.abs() < tiny)).any(), "denormal numbers are slow"


def test_a_dtype_is_what_the_weights_are_stored_in() -> None:
    wide = scaled(small(), WIDE, torch.bfloat16)
    assert wide.dtype == torch.bfloat16
    assert torch.isfinite(wide(torch.tensor([[1, 2, 3]])).logits).all()


def test_shapes_have_the_parameters_that_they_say(pair: tuple[Any, Any]) -> None:
    _, wide = pair
    assert sum(p.numel() for p in wide.parameters()) == WIDE.parameters
    millions = {name: round(shape.parameters / 1e6) for name, shape in SHAPES.items()}
    assert millions == {"110m": 110, "0.5b": 494, "1b": 1284, "3b": 3285}


def test_every_shape_takes_the_demo_models() -> None:
    from decoders_lab.demo.shapes import SHAPES as DEMO

    with torch.device("meta"):
        target, draft = DEMO["target"].model(), DEMO["draft"].model()
    for shape in SHAPES.values():
        other = draft_shape(shape, target, draft)
        assert other.hidden % 64 == 0 and other.hidden % other.heads == 0
        assert 2 < shape.parameters / other.parameters < 12, "the demo draft is an eighth of its target"


def test_random_prompts_have_tokens_of_the_small_vocabulary(pair: tuple[Any, Any]) -> None:
    _, wide = pair
    assert vocabulary_size(wide) == 61


def test_figures_say_what_was_scaled(pair: tuple[Any, Any]) -> None:
    model, wide = pair
    assert not hasattr(model.config, "cost_scaled")
    assert wide.config.cost_scaled == "cost-scaled to 0.00B"
    methods = bench.strategy_methods(wide, ["autoregressive"], decoders_config={"compile": False})
    entries = bench.measure(methods, bench.random_workloads(61, [6]), new_tokens=3, repeats=1)
    (record,) = bench.summarise(entries)
    assert record.scaled == "cost-scaled to 0.00B" and record.as_dict()["scaled"] == record.scaled
    assert subject(record) == "demo target, cost-scaled to 0.00B"


@pytest.mark.parametrize(
    ("sizes", "shape", "said"),
    [
        ({}, ScaledShape(32, 5, 160, 8, 4, 16, 200), "too small: hidden 32 < 33"),
        ({}, ScaledShape(96, 2, 160, 8, 4, 16, 200), "layers 2 < 3"),
        ({}, ScaledShape(96, 5, 160, 8, 4, 12, 200), "heads of 8 do not divide heads of 12"),
        ({}, ScaledShape(96, 5, 160, 6, 4, 16, 200), "not a multiple of 4 key heads"),
        ({}, ScaledShape(100, 5, 160, 8, 4, 16, 200), "not a multiple of 8 heads"),
        ({"tie_word_embeddings": False}, WIDE, "not tied"),
        ({"attention_bias": True}, WIDE, "biases"),
    ],
)
def test_a_model_that_does_not_fit_is_told_why(sizes: dict[str, Any], shape: ScaledShape, said: str) -> None:
    with pytest.raises(ScalingError, match=said):
        scaled(small(**sizes), shape)


def test_the_command_pads_target_and_draft_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, tmp_path: Path
) -> None:
    def load(name: str = "target", dtype: Any = None, directory: Any = None) -> Any:
        return small(seed=name == "draft", vocab_size=128).to(dtype), tokenizer

    monkeypatch.setattr(demo, "load", load)
    monkeypatch.setattr(demo, "prompts", lambda kind=None: [demo.Prompt("code-01", "code", "a b a b", "nowhere.py")])
    monkeypatch.setitem(SHAPES, "1b", ScaledShape(128, 4, 160, 8, 4, 16, 300))
    done = run(
        "bench", "beside", "--scale", "1b", "--no-compile", "-n", "4", "--repeats", "1", "--baseline", "transformers",
        "-s", "speculative", "--prompts", "code", "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "demo target, cost-scaled to 0.00B" in done.output
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [(r["method"], r["scaled"]) for r in records] == [
        (name, "cost-scaled to 0.00B") for name in ("transformers", "speculative")
    ]
    assert records[1]["identical"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scale", "2b"), "0.5b"),
        (("--scale", "1b", "--shape", "llama-110m"), "No such option"),
        (("-e", "vllm"), "llama.cpp"),
        (("-e", "llama.cpp[f32]", "--temperature", "1"), "draw other tokens"),
    ],
)
def test_mistakes_end_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = run("bench", "beside", *arguments)
    assert done.exit_code == 2 and said in done.output


def test_an_unknown_size_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"0\.5b"):
        shape_named("0.5")


def test_a_scaled_model_is_loaded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise SettingsError("enough")

    monkeypatch.setattr(bench_run.Subjects, "load", load)
    assert "loading demo at the size of 1b in float32" in run("bench", "beside", "--scale", "1b").stderr
