"""Training in small: it learns, stops when it learns no more, and an interrupted run ends where a whole one does."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from decoders.errors import SettingsError, TrainingError
from decoders.heads.medusa import HeadsConfig, MedusaHeads, load_heads
from decoders.testing import tiny_model
from decoders.training import texts as texts_module
from decoders.training.feature_heads import Teacher
from decoders.training.medusa import HeadsLearner, config_of, train_medusa
from decoders.training.recipes import HeadsTraining
from decoders.training.texts import Job, Texts, hold_out, own_texts, read_files, rows_of_text
from decoders.training.trainer import Trainer

SMALL = HeadsTraining(
    heads=2, tokens=24 * 24, length=24, own_share=0.5, epochs=3, rows=2, rate=3e-3, bf16=False, checks=2, patience=50
)


@pytest.fixture(scope="module")
def texts():
    """Forty texts that count on in steps of their own."""
    return [
        " ".join(f"w{1 + (start + step * i) % 127}" for i in range(60)) for start in range(10) for step in range(1, 5)
    ]


def train(model, tokenizer, texts, out, run=SMALL, tree=True, nodes=63, given=None, **options):
    job = Job(texts, out, dtype=torch.float32, **options)
    return train_medusa(model, tokenizer, job, run=run, tree=tree, nodes=nodes, given=given)


def a_learner(model, texts, run=SMALL):
    heads = MedusaHeads(config_of(run, 32, 128), model.get_output_embeddings().weight)
    return HeadsLearner(run, heads, Teacher(model, (), run.bf16), texts, texts)


def weights(folder):
    return load_heads(folder).state_dict()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_trained_heads_load_with_tree_and_card(tmp_path, model, tokenizer, texts):
    log = io.StringIO()
    figures = train(model, tokenizer, texts, tmp_path, test=texts[:8], console=Console(file=log, width=150), nodes=20)
    heads = load_heads(tmp_path)
    assert heads.config.heads == 2 and heads.config.hidden_size == 32 and heads.config.projection == "tied"
    assert heads.config.tree is not None and len(heads.config.tree) == figures["trees"]["nodes"] <= 20
    assert figures["trees"]["searched"] >= figures["trees"]["default"]
    assert {"text", "own"} == set(figures["held"]) == set(figures["test"])
    card = (tmp_path / "README.md").read_text()
    for part in ("held out, files", "test files, own", "token 2", "default tree"):
        assert part in card
    assert "drafts accepted up to token 1, 2" in log.getvalue()
    assert not (tmp_path / "training").exists()


def test_training_teaches_the_heads(tmp_path, model, tokenizer):
    counting = [" ".join(f"w{1 + (start + i) % 127}" for i in range(60)) for start in range(0, 120, 3)]
    options = vars(SMALL) | {"tokens": 2000, "own_share": 0.0, "projection": "full", "rate": 1e-2}
    before = train(model, tokenizer, counting, tmp_path / "a", HeadsTraining(**{**options, "epochs": 1, "rate": 0.0}))
    after = train(model, tokenizer, counting, tmp_path / "b", HeadsTraining(**{**options, "epochs": 25}))
    assert after["held"]["text"]["reached"][0] > before["held"]["text"]["reached"][0] + 0.1


def test_the_model_is_left_as_it_was(tmp_path, tokenizer, texts):
    model = tiny_model("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, tokenizer, texts, tmp_path)
    assert same(before, model.state_dict())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_an_interrupted_run_ends_as_a_whole_one(tmp_path, model, tokenizer, texts, monkeypatch):
    train(model, tokenizer, texts, tmp_path / "whole")

    class Stop(Exception):
        pass

    def steps(trainer, steps=Trainer.steps):
        for step in steps(trainer):
            yield step
            if step.done == 7:
                raise Stop

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Trainer, "steps", steps)
        with pytest.raises(Stop):
            train(model, tokenizer, texts, tmp_path / "cut", checkpoint_minutes=0)
    assert not (tmp_path / "cut" / "config.json").exists(), "half-trained heads are not offered"
    train(model, tokenizer, texts, tmp_path / "cut", checkpoint_minutes=0)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_tree_is_searched_for_heads_that_exist(tmp_path, model, tokenizer, texts):
    train(model, tokenizer, texts, tmp_path / "a", tree=False)
    heads = load_heads(tmp_path / "a")
    assert heads.config.tree is None
    train(model, tokenizer, texts, tmp_path / "b", given=heads, nodes=7)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert len(load_heads(tmp_path / "b").config.tree) <= 7
    wider = MedusaHeads(HeadsConfig(heads=1, layers=1, hidden_size=64, vocab_size=128, projection="tied"))
    with pytest.raises(SettingsError, match="hidden size 64 .* hidden size 32"):
        train(model, tokenizer, texts, tmp_path / "c", given=wider)
    assert "Not trained here" in (tmp_path / "b" / "README.md").read_text()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["model_type"] == "decoders_medusa"


def test_heads_are_judged_by_the_targets_choices_one_place_later_each(model):
    """An untrained head is the target's output head: right where the target chooses the same token one or two places later."""
    ids = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    learner = a_learner(model, texts := own_texts(model, ids, 1.0, 8))
    learner.stops = []
    accepted, ranks = learner.acceptance(texts), learner.ranks(texts)
    with torch.no_grad():
        best = model(texts.ids).logits.argmax(-1)[:, 6:]  # from the place before the prompt's last token on
    right = torch.stack([best[:, :-2] == best[:, k + 1 : best.shape[1] - 1 + k] for k in range(2)], -1).flatten(0, 1)
    assert accepted.drafts == len(ranks) == len(right)
    assert torch.equal(ranks == 0, right)
    assert accepted.rates == pytest.approx(right.double().mean(0).tolist())


def test_positions_before_the_models_own_text_and_after_its_end_do_not_count(model):
    ids = torch.tensor([[5, 9, 6, 7, 8, 9, 3, 4]])  # 9 is the end of sequence; the model writes from place 3 on
    learner = a_learner(model, Texts(ids, torch.tensor([3])), HeadsTraining(**{**vars(SMALL), "heads": 1}))
    learner.stops = [9]
    (_, lesson), *_ = learner.lessons(learner.train)
    assert learner._whole(lesson)[0].tolist() == [False, True, True, True, False, False, False]


def test_heads_of_no_numbers_are_never_right(model):
    learner = a_learner(model, Texts(torch.full((3, 12), 5), torch.full((3,), 12)))
    learner.output = torch.full_like(learner.output, float("nan"))
    assert (learner.ranks(learner.train) == 128).all()


def test_own_text_is_greedy(model):
    ids = torch.randint(3, 128, (5, 20), generator=torch.Generator().manual_seed(0))
    texts = own_texts(model, ids, 0.4, 6)
    assert texts.own.tolist() == [6, 6, 20, 20, 20] and torch.equal(texts.ids[2:], ids[2:])
    plain = model.generate(ids[:2, :6], do_sample=False, max_new_tokens=14)
    assert torch.equal(texts.ids[:2], plain)


def test_text_must_be_there_and_enough(tmp_path, tokenizer, model):
    with pytest.raises(TrainingError, match="no file or folder"):
        read_files([tmp_path / "nowhere"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TrainingError, match="there is no text"):
        read_files([tmp_path])
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    assert read_files([tmp_path]) == read_files([tmp_path / "a.txt"]) == ["w1 w2 w3"]
    with pytest.raises(TrainingError, match="the text has 4 tokens"):
        rows_of_text(tokenizer, ["w1 w2 w3"], 32, 5, 0)


def test_a_twentieth_is_held_out_and_nothing_is_in_both_parts():
    learnt, held = hold_out([f"text {i}" for i in range(40)], 0)
    assert len(held) == 2 and len(learnt) == 38 and not set(learnt) & set(held)
    (learnt,), (held,) = hold_out(["x" * 95 + "y" * 5], 0)
    assert (learnt, held) == ("x" * 95, "y" * 5)


def test_text_to_judge_by_can_be_given(tmp_path, model, tokenizer, texts, monkeypatch):
    monkeypatch.setattr(texts_module, "hold_out", lambda *args: 1 / 0)
    figures = train(model, tokenizer, texts, tmp_path, held=texts[:8], checkpoint_minutes=0)
    assert figures["held"]["text"]["drafts"] > 0


def test_senseless_settings_are_refused_before_the_work(tmp_path, model, tokenizer, texts):
    with pytest.raises(SettingsError, match="for 4 heads, length must be at least 6 tokens, not 5"):
        HeadsTraining(heads=4, length=5)
    with pytest.raises(SettingsError, match="'tied', 'low_rank' or 'full'"):
        train(model, tokenizer, texts, tmp_path / "a", HeadsTraining(**{**vars(SMALL), "projection": "none"}))
    assert not (tmp_path / "a").exists()
