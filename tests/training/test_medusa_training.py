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
from decoders.training import medusa as medusa_module
from decoders.training.medusa import (
    UNKNOWN,
    Examples,
    Head,
    HiddenStates,
    accuracies,
    config_of,
    labels_of,
    ranks_of,
    train_medusa,
)
from decoders.training.recipes import HeadsTraining
from decoders.training.texts import Texts, TextStore, hold_out, own_texts, read_files, rows_of_text

SMALL = HeadsTraining(
    heads=2, tokens=20 * 32, length=32, own_share=0.5, epochs=3, batch=64, rate=3e-3, bf16=False, checks=2, patience=50
)


@pytest.fixture(scope="module")
def texts():
    """Forty texts that count on in steps of their own."""
    return [
        " ".join(f"w{1 + (start + step * i) % 127}" for i in range(60)) for start in range(10) for step in range(1, 5)
    ]


def train(model, tokenizer, texts, out, run=SMALL, **options):
    return train_medusa(model, tokenizer, texts, out, run=run, dtype=torch.float32, **options)


def store_of(model, folder):
    return TextStore(model, None, SMALL, folder)


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
    for part in ("held out, files", "test files, own", "head 2", "default tree"):
        assert part in card
    assert "held-out accuracy of the heads" in log.getvalue()
    assert not (tmp_path / "training").exists(), "hidden states are large, and done with"


def test_training_teaches_the_heads(tmp_path, model, tokenizer):
    counting = [" ".join(f"w{1 + (start + i) % 127}" for i in range(60)) for start in range(0, 120, 3)]
    options = vars(SMALL) | {"tokens": 2000, "own_share": 0.0, "projection": "full", "rate": 1e-2}
    before = train(model, tokenizer, counting, tmp_path / "a", HeadsTraining(**{**options, "epochs": 1, "rate": 0.0}))
    after = train(model, tokenizer, counting, tmp_path / "b", HeadsTraining(**{**options, "epochs": 25}))
    assert after["held"]["text"]["top1"][0] > before["held"]["text"]["top1"][0] + 0.2


def test_the_model_is_left_as_it_was(tmp_path, tokenizer, texts):
    model = tiny_model("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, tokenizer, texts, tmp_path)
    assert same(before, model.state_dict())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_interrupted_hidden_states_are_those_of_a_whole_run(tmp_path, model, tokenizer, texts, monkeypatch):
    monkeypatch.setattr(
        medusa_module, "ROWS", 4
    )  # in all runs: the bits of torch's products depend on the number of rows
    train(model, tokenizer, texts, tmp_path / "whole")

    class Stop(Exception):
        pass

    class Interrupted(HiddenStates):
        def fill(self, progress=lambda rows: None):
            def count(rows):
                if self.done == 8:
                    raise Stop

            super().fill(count)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(medusa_module, "HiddenStates", Interrupted)
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


def test_labels_are_the_tokens_behind_the_next_one():
    ids = torch.arange(10, 18)[None]
    labels = labels_of(Texts(ids, torch.tensor([8])), 3, [])
    assert labels[0, 0].tolist() == [12, 13, 14]  # token 11 is the output head's
    assert labels[0, 5].tolist() == [17, UNKNOWN, UNKNOWN]
    assert labels[0, 6].tolist() == [UNKNOWN] * 3


def test_in_the_models_own_rows_the_prompt_and_what_follows_an_end_do_not_count():
    ids = torch.tensor([[5, 9, 6, 7, 8, 9, 3, 4]])  # 9 is the end of sequence; the model writes from place 3 on
    labels = labels_of(Texts(ids, torch.tensor([3])), 1, [9])[0, :, 0].tolist()
    assert labels == [UNKNOWN, UNKNOWN, 8, 9, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]


def test_own_text_is_greedy(model):
    ids = torch.randint(3, 128, (5, 20), generator=torch.Generator().manual_seed(0))
    texts = own_texts(model, ids, 0.4, 6)
    assert texts.own.tolist() == [6, 6, 20, 20, 20] and torch.equal(texts.ids[2:], ids[2:])
    plain = model.generate(ids[:2, :6], do_sample=False, max_new_tokens=14)
    assert torch.equal(texts.ids[:2], plain)


def test_hidden_states_are_those_of_the_output_head(tmp_path, model):
    ids = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(0))
    states = HiddenStates(store_of(model, tmp_path), "x", Texts(ids, torch.full((3,), 12)), torch.float32)
    states.fill()
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(states.values), model(ids).logits)


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


def test_accuracy_counts_known_positions_only():
    ranks = torch.tensor([[0, 3], [4, -1], [0, 0]])
    assert accuracies(ranks) == pytest.approx([2 / 3, 1 / 2])
    assert accuracies(ranks, 5) == [1.0, 1.0]


def test_a_twentieth_is_held_out_and_nothing_is_in_both_parts():
    learnt, held = hold_out([f"text {i}" for i in range(40)], 0)
    assert len(held) == 2 and len(learnt) == 38 and not set(learnt) & set(held)
    (learnt,), (held,) = hold_out(["x" * 95 + "y" * 5], 0)
    assert (learnt, held) == ("x" * 95, "y" * 5)


def test_text_to_judge_by_can_be_given(tmp_path, model, tokenizer, texts, monkeypatch):
    monkeypatch.setattr(medusa_module, "hold_out", lambda *args: 1 / 0)
    figures = train(model, tokenizer, texts, tmp_path, held=texts[:8], checkpoint_minutes=0)
    assert figures["held"]["text"]["positions"] > 0


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path, model, full_disk):
    texts = Texts(torch.ones(3, 12, dtype=torch.int64), torch.full((3,), 12))
    states = HiddenStates(store_of(model, tmp_path), "x", texts, torch.float32)
    with full_disk(), pytest.raises(OSError, match="No space left"):
        states.fill()
    states.fill()
    assert states.values.any(2).all()


def test_heads_of_no_numbers_are_never_right(tmp_path, model):
    texts = Texts(torch.ones(3, 12, dtype=torch.int64), torch.full((3,), 12))
    heads = MedusaHeads(config_of(HeadsTraining(heads=1), 32, 128), model.lm_head.weight)
    hidden = torch.full((3, 12, 32), float("nan"))
    ranks = ranks_of(heads, Head(model.lm_head.weight, None), Examples.of(hidden, labels_of(texts, 1, ())))
    assert accuracies(ranks, 5) == [0.0]


def test_hidden_states_of_another_model_are_not_taken_over(tmp_path, model):
    texts = Texts(torch.ones(3, 12, dtype=torch.int64), torch.full((3,), 12))
    store, other = store_of(model, tmp_path), store_of(tiny_model("llama", seed=1), tmp_path)
    HiddenStates(store, "x", texts, torch.float32).fill()
    states = HiddenStates(store, "x", texts, torch.float32)
    assert states.done == 3
    states.file.write_bytes(states.file.read_bytes()[:-4])
    assert HiddenStates(store, "x", texts, torch.float32).done == 0, "a file that lacks rows is computed anew"
    assert HiddenStates(other, "x", texts, torch.float32).done == 0


def test_senseless_settings_are_refused_before_the_work(tmp_path, model, tokenizer, texts):
    with pytest.raises(SettingsError, match="tied, low_rank or full"):
        train(model, tokenizer, texts, tmp_path / "a", HeadsTraining(**{**vars(SMALL), "projection": "none"}))
    assert not (tmp_path / "a").exists()
