"""Draft models: cut out of a target or made anew, distilled, resumed, measured, and loaded as ``assistant_model=``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import decoders
from decoders.errors import SettingsError, TrainingError
from decoders.testing import tiny_model
from decoders.training.draft_model import DraftLearner, cut, measure, new_draft, train_draft
from decoders.training.recipes import DraftTraining
from decoders.training.texts import Job, Texts, workplace
from decoders.training.trainer import soft_cross_entropy

SMALL = DraftTraining(
    count=1, tokens=24 * 24, length=24, own_share=0.5, epochs=2, rows=4, rate=1e-3, bf16=False, patience=50
)


def run(**changes) -> DraftTraining:
    return DraftTraining(**{**vars(SMALL), **changes})


def train(model, tokenizer, texts, out, training=SMALL, **options):
    job = Job(texts, out, dtype=torch.float32, **options)
    return train_draft(model, tokenizer, job, run=training)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
def test_all_layers_kept_are_the_target_itself(name) -> None:
    """Under any names of modules and configs, those with a list entry per layer too."""
    model, ids = tiny_model(name), torch.arange(5, 17)[None]
    count = model.config.num_hidden_layers
    same = cut(model, range(count))
    torch.testing.assert_close(same(ids).logits, model(ids).logits)
    one = cut(model, [count - 1])
    assert one.config.num_hidden_layers == 1 and one(ids).logits.shape == model(ids).logits.shape
    assert sum(p.numel() for p in one.parameters()) < sum(p.numel() for p in model.parameters())


def test_layers_may_differ_in_more_than_lists_say() -> None:
    model, ids = tiny_model("gemma4", num_kv_shared_layers=0, hidden_size_per_layer_input=0), torch.arange(5, 17)[None]
    for layers, widths in (((1, 2), [16, 8]), ((0,), [8]), ((3,), [16])):
        kept = cut(model, layers)
        assert [layer.head_dim for layer in kept.config.per_layer_config] == widths
        assert kept(ids).logits.shape == model(ids).logits.shape
    with pytest.raises(SettingsError, match="differ in head_dim.*origin='layers'"):
        new_draft(model, run(origin="scratch"))
    with pytest.raises(TrainingError, match="Gemma4ForCausalLM cannot be built from these layers alone: "):
        cut(tiny_model("gemma4"), (0,))  # its keys and values would be those of a layer that is gone


def test_a_matrix_that_holds_something_of_every_layer_cannot_be_cut() -> None:
    with pytest.raises(TrainingError, match="embed_tokens_per_layer.weight, .* hold values for every layer"):
        cut(tiny_model("gemma4", num_kv_shared_layers=0), (0, 1))


def test_kept_layers_are_spread_over_the_target() -> None:
    assert run(count=4).layers_of(30) == (0, 10, 19, 29) and run(count=None).layers_of(12) == (0, 11)
    assert run(count=1).layers_of(30) == (0,) and run(count=None, keep=(0, 1, -1)).layers_of(30) == (0, 1, 29)
    for wrong in (
        dict(keep=(0,)),
        dict(hidden=16),
        dict(origin="nothing"),
        dict(count=None, keep=(1,), origin="scratch"),
    ):
        with pytest.raises(SettingsError):
            run(**wrong)
    with pytest.raises(SettingsError, match="from -2 to 1, not .4."):
        run(count=None, keep=(4,)).layers_of(2)
    with pytest.raises(SettingsError, match="count must be at most 2, the number of the target.s layers, not 3"):
        run(count=3).layers_of(2)


def test_a_model_from_scratch_keeps_the_size_of_heads(model) -> None:
    config = new_draft(model, run(origin="scratch", hidden=16)).config
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (16, 2, 1)
    assert config.head_dim == model.config.head_dim and config.vocab_size == model.config.vocab_size
    assert config.num_attention_heads % config.num_key_value_heads == 0
    with pytest.raises(SettingsError, match="hidden must be a multiple of 8"):
        new_draft(model, run(origin="scratch", hidden=13))


def test_the_loss_and_its_gradient_are_cross_entropy_with_a_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 11, generator=generator).requires_grad_()
    target, weights = torch.randn(2, 5, 11, generator=generator).softmax(-1), torch.rand(2, 5, generator=generator)
    expected = (F.cross_entropy(scores.flatten(0, 1), target.flatten(0, 1), reduction="none") * weights.flatten()).sum()
    expected.backward()
    loss, gradient = soft_cross_entropy(scores.detach(), target, weights)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, scores.grad)


@pytest.mark.parametrize("origin", ["layers", pytest.param("scratch", marks=pytest.mark.slow)])
def test_what_is_written_drafts_for_the_target(tmp_path, model, tokenizer, texts, origin) -> None:
    figures = train(
        model,
        tokenizer,
        texts,
        tmp_path,
        run(origin=origin),
        test=texts[:6],
        command="decoders train draft --model tiny",
    )
    assert not (tmp_path / "training").exists() and not (tmp_path / ".partial").exists()
    assert "generate" not in vars(model), "the target is left as it was"
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("w3 w4")["input_ids"] == [3, 4]
    assert draft.config.num_hidden_layers == 1
    card = (tmp_path / "README.md").read_text()
    for name in ("greedy", "sampled"):
        assert f"| {figures[name]['tokens_per_step']:.2f} |" in card
    assert "decoders train draft --model tiny" in card and f"{figures['steps']} steps" in card
    own = decoders.enable(tiny_model("llama"))
    ids = torch.arange(3, 9)[None]
    options = dict(max_new_tokens=10, do_sample=False, decoders_config={"compile": False})
    out = own.generate(ids, strategy="speculative", assistant_model=draft, **options)
    assert torch.equal(out, own.generate(ids, strategy="autoregressive", **options))


@pytest.mark.slow  # of heads, with the same trainer: tests/training/test_eagle3_training.py
def test_training_teaches(tmp_path, model, tokenizer, texts) -> None:
    figures = train(model, tokenizer, texts, tmp_path / "after", run(epochs=12, tokens=4000, rate=3e-3, own_share=1.0))
    before = train(model, tokenizer, texts, tmp_path / "before", run(epochs=1, rate=0.0, own_share=1.0))
    assert figures["held"]["own"]["reached"][0] > before["held"]["own"]["reached"][0] + 0.2
    assert figures["greedy"]["tokens_per_step"] > 1.2


def test_the_card_tells_what_speculative_reports(model, tokenizer) -> None:
    """A draft that is the target is always right."""
    rows = torch.randint(1, 128, (3, 40), generator=torch.Generator().manual_seed(0))
    figures = measure(model, cut(model, (0, 1)), tokenizer, rows)
    assert figures["prompts"] == 3
    for name in ("greedy", "sampled"):
        assert figures[name]["tokens_per_step"] == pytest.approx(6.0) and figures[name]["reached"] == [1.0] * 5


def test_what_cannot_be_trained_says_why(tmp_path, model, tokenizer) -> None:
    with pytest.raises(TrainingError, match="the text has"):
        train(model, tokenizer, ["w1 w2"], tmp_path)
    with pytest.raises(TrainingError, match="held out: 1 row of 24 tokens, too few to measure progress"):
        train(model, tokenizer, [" ".join(f"w{i % 90 + 1}" for i in range(600))], tmp_path)


def test_a_short_context_is_enough_for_the_measurements(tmp_path, tokenizer, texts) -> None:
    model = tiny_model("gpt2", n_positions=SMALL.length)
    job = Job(texts, tmp_path, dtype=torch.float32)
    assert train_draft(model, tokenizer, job, run=run(epochs=1))["new_tokens"] == 18
    (tmp_path / "long" / "training").mkdir(parents=True)
    (state := tmp_path / "long" / "training" / "checkpoint.pt").touch()
    with pytest.raises(SettingsError, match="length must be at most 24, the model.s context, not 25"):
        train_draft(model, tokenizer, Job(texts, tmp_path / "long", resume=False), run=run(length=25))
    assert state.exists(), "a call that is refused destroys no earlier run"


def test_low_precision_trains(model) -> None:
    rows = Texts(torch.randint(1, 128, (4, 24), generator=torch.Generator().manual_seed(1)), torch.full((4,), 24))
    losses = [
        DraftLearner(run(bf16=bf16), cut(model, (0,)), model, rows, rows).learn(0).item() for bf16 in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_run_destroys_no_files_but_its_own(tmp_path) -> None:
    target = tmp_path / "target"
    tiny_model("llama").save_pretrained(target)
    with pytest.raises(SettingsError, match=r"target has other files \(config.json\), .*: name an empty folder"):
        workplace(target, True)
    assert not (target / "training").exists()

    notes = tmp_path / "training" / "train.json"
    notes.parent.mkdir()
    notes.write_text("mine")
    for resume in (True, False):
        with pytest.raises(SettingsError, match=r"training has other files \(train.json\)"):
            workplace(tmp_path, resume)
    assert notes.read_text() == "mine"

    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="file cannot be written: Not a directory"):
        workplace(tmp_path / "file", True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / ".gitattributes").touch()
    (workplace(tmp_path / "own", True) / "checkpoint.pt").touch()
    (tmp_path / "own" / "model.safetensors").touch()  # a run was interrupted after it had written its model
    assert list(workplace(tmp_path / "own", True).iterdir())
    assert not list(workplace(tmp_path / "own", False).iterdir())
    with pytest.raises(SettingsError, match="model.safetensors"):
        workplace(tmp_path / "own", True)
