"""Training of EAGLE-3 heads: simulated drafts are those of decoding, a resumed run ends where a whole one does, files load."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

import decoders
from decoders.errors import SettingsError, TrainingError
from decoders.heads.eagle3_files import load_head, read_config
from decoders.strategies import Eagle3
from decoders.testing import decode, prompts, tiny_model
from decoders.training.eagle3 import HeadLearner, head_config, new_head, train_eagle3, unrolled
from decoders.training.feature_heads import Teacher, draft_vocabulary
from decoders.training.recipes import HeadTraining, default_layers
from decoders.training.texts import Job, Texts, counted

SMALL = HeadTraining(
    depth=3, tokens=24 * 24, length=24, own_share=0.5, epochs=2, rows=4, rate=3e-3, bf16=False, patience=50
)
CPU, FULL = torch.device("cpu"), torch.float32


def run(**changes) -> HeadTraining:
    return HeadTraining(**{**vars(SMALL), **changes})


def a_head(model, training=SMALL, seed=3, norm_output=False):
    """One whose layer does something."""
    config = head_config(model, training, training.layers_of(2))
    object.__setattr__(config, "norm_output", norm_output)
    ids = torch.arange(config.draft_vocab_size)
    head = new_head(config, model, ids, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head, ids


def a_learner(model, training=SMALL, rows=4, **head):
    head, ids = a_head(model, training, **head)
    generator = torch.Generator().manual_seed(1)
    rows = Texts(
        torch.randint(1, 128, (rows, training.length), generator=generator), torch.full((rows,), training.length)
    )
    teacher = Teacher(model, head.head_config.layers, training.bf16)
    return HeadLearner(training, head, teacher, ids, rows, rows)


def a_chain(head, embedded, features, depth):
    """What the head gives when a chain is drafted as in decoding: cache, one token after the other. ``[depth, H]``."""
    cache, outcome = DynamicCache(), []
    states = features
    for k in range(depth):
        count, past = states.shape[1], cache.get_seq_length()
        mask = torch.zeros(1, 1, count, past + count)
        mask += torch.full((count, count), float("-inf")).triu(1) if past == 0 else 0.0
        states, _ = head(
            embedded[:, past : past + count], states, attention_mask=mask,
            position_ids=torch.arange(past, past + count)[None], cache=cache, logits=1, fuse=k == 0,
        )  # fmt: skip
        states = states[:, -1:]
        outcome.append(states[0, 0])
    return torch.stack(outcome)


@pytest.mark.parametrize("norm_output", [False, True])
def test_simulated_drafts_are_those_of_a_chain_with_a_cache(model, norm_output) -> None:
    head, _ = a_head(model, norm_output=norm_output)
    generator = torch.Generator().manual_seed(5)
    features, embedded = torch.randn(2, 9, 96, generator=generator), torch.randn(2, 12, 32, generator=generator)
    with torch.no_grad():
        simulated = torch.stack(list(unrolled(head, embedded, features, 4)), 2)  # [B, S, K, H]
        simulated = head.norm(simulated) if norm_output else simulated
        for row in range(2):
            for t in (0, 3, 8):
                own = slice(row, row + 1)
                expected = a_chain(head, embedded[own, : t + 4], features[own, : t + 1], 4)
                torch.testing.assert_close(simulated[row, t], expected, atol=2e-5, rtol=1e-4)


def test_chains_of_some_positions_are_those_of_all(model) -> None:
    head, _ = a_head(model)
    generator = torch.Generator().manual_seed(5)
    features, embedded = torch.randn(2, 9, 96, generator=generator), torch.randn(2, 12, 32, generator=generator)
    some = torch.tensor([0, 4, 7])
    with torch.no_grad():
        every = list(unrolled(head, embedded, features, 4))
        chosen = list(unrolled(head, embedded, features, 4, some))
    torch.testing.assert_close(chosen[0], every[0])
    for k in (1, 2, 3):
        torch.testing.assert_close(chosen[k], every[k][:, some], atol=2e-6, rtol=1e-5)


def test_every_step_simulates_chains_at_positions_of_its_own(model) -> None:
    learner = a_learner(model, run(length=20, chains=0.25), rows=2)
    first, again, other = learner._chains(0), learner._chains(0), learner._chains(1)
    assert first.tolist() == again.tolist() == sorted(first.tolist()) != other.tolist()
    assert len(first) == round(0.25 * (20 - learner.training.depth))
    assert a_learner(model, run(length=20), rows=2)._chains(0) is None


@pytest.mark.parametrize("chains", [None, [0, 3, 4]])
def test_gradients_are_those_of_the_sum_of_all_losses(model, chains) -> None:
    """Against the loss in one piece, through chains that are run one by one."""
    learner = a_learner(model, run(draft_vocab=60, length=8), rows=2)
    head, depth = learner.model, 3
    lesson = learner.teacher.lesson(learner.train, ())
    total = learner.backward(learner.lesson(0)[1], None if chains is None else torch.tensor(chains))
    gradients = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    losses, counts = torch.zeros(depth), torch.zeros(depth)
    for row in range(2):
        for t in range(8 - depth):
            own = slice(row, row + 1)
            states = a_chain(head, lesson.embedded[own, 1:], lesson.features[own, : t + 1], depth)
            scores = head.lm_head(head.norm(states))
            for k in range(depth if chains is None or t in chains else 1):
                target = lesson.logits[row, t + k + 1]
                if target.argmax() < 60:
                    losses[k] = losses[k] - (target[:60].softmax(-1) * scores[k].log_softmax(-1)).sum()
                    counts[k] += 1
    expected = sum(0.8**k * losses[k] / counts[k] for k in range(depth))
    expected.backward()
    assert counts.sum() > 3
    torch.testing.assert_close(total, expected.detach(), atol=1e-5, rtol=1e-5)
    for name, p in head.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3)


def test_features_are_what_the_strategy_is_given(model) -> None:
    """The last layer too, whose output transformers hands out normed."""
    ids = torch.arange(5, 13)[None]
    out = model(ids, output_hidden_states=True)
    hooks = len(model.model.layers[0]._forward_hooks)
    lesson = Teacher(model, (0, 1, -1), bf16=False).lesson(Texts(ids, torch.tensor([8])), ())
    torch.testing.assert_close(lesson.features[..., :32], out.hidden_states[1])
    normed = model.model.norm(lesson.features[..., 64:])
    torch.testing.assert_close(normed, out.hidden_states[-1])
    torch.testing.assert_close(lesson.embedded, out.hidden_states[0])
    assert len(model.model.layers[0]._forward_hooks) == hooks


def test_only_the_models_own_part_of_its_texts_counts() -> None:
    ids = torch.tensor([[5, 0, 5, 5, 0, 5], [5, 0, 5, 5, 5, 5]])
    expected = [[False, True, True, True, False, False], [True] * 6]
    assert counted(Texts(ids, torch.tensor([2, 6])), [0]).tolist() == expected


def test_what_layers_of_the_target_differ_in_is_left_to_the_head() -> None:
    layer = head_config(tiny_model("gemma4"), SMALL, (0, 1)).layer
    assert (layer.hidden_size, layer.head_dim, layer.num_attention_heads) == (32, 8, 4)


def test_draft_vocabulary_is_the_most_frequent_tokens_and_the_ends() -> None:
    ids = torch.tensor([[7, 7, 7, 3, 3, 9, 1]])
    assert draft_vocabulary(ids, 3, 12).tolist() == [1, 3, 7]
    assert draft_vocabulary(ids, 3, 12, [11]).tolist() == [3, 7, 11]
    assert draft_vocabulary(ids, 6, 12).tolist() == [0, 1, 2, 3, 7, 9]


def test_layers_by_depth() -> None:
    assert default_layers(32) == (1, 15, 28) and default_layers(6) == (1, 3, 5) and default_layers(2) == (0, 1, 1)
    assert run(layers=(0, -1)).layers_of(6) == (0, 5)
    with pytest.raises(SettingsError, match=r"layers must lie in 0 … 5, not 6"):
        run(layers=(6,)).layers_of(6)


@pytest.mark.parametrize(
    "form, vocabulary",
    [("authors", 100), *(pytest.param("speculators", size, marks=pytest.mark.slow) for size in (None, 100))],
)
def test_what_is_written_loads_and_drafts(tmp_path, model, tokenizer, texts, form, vocabulary) -> None:
    figures = train_eagle3(
        model, tokenizer,
        Job(texts, tmp_path, test=texts[:6], dtype=FULL, command="decoders train eagle3 --model tiny"),
        run=run(draft_vocab=vocabulary), form=form,
    )  # fmt: skip
    assert not (tmp_path / "training").exists()
    config = read_config(tmp_path)
    assert config.layers == (0, 1, 1) and config.draft_vocab_size == (vocabulary or 128)
    files = load_head(tmp_path, CPU, FULL)
    assert (files.vocabulary.ids is None) == (vocabulary is None)
    assert config.layer.rope_parameters["rope_theta"] == model.config.rope_parameters["rope_theta"]
    names = set(json.loads((tmp_path / "config.json").read_text()))
    assert ("speculators_model_type" in names) == (form == "speculators")
    card = (tmp_path / "README.md").read_text()
    numbers = figures["test"]["own"]
    for part in (
        "decoders train eagle3 --model tiny",
        f"{numbers['reached'][1]:.1%}",
        f"{numbers['tokens_per_step']:.2f} |",
    ):
        assert part in card
    assert f"{figures['steps']} steps" in card and f"{figures['tokens']} tokens" in card
    target = decoders.enable(tiny_model("llama"))
    for tree in ("none", "dynamic"):
        strategy = Eagle3(head=str(tmp_path), tree=tree, length=3, children=4)
        out = decode(target, prompts(2), strategy, max_new_tokens=12)
        plain = decode(target, prompts(2), "autoregressive", max_new_tokens=12)
        assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.slow
def test_training_teaches_and_the_card_tells_what_decoding_finds(tmp_path, model, tokenizer, texts) -> None:
    """The share of accepted tokens on the card is that of chains in decoding, on the same text."""
    before = train_eagle3(model, tokenizer, Job(texts, tmp_path / "a", dtype=FULL), run=run(rate=0.0))
    after = train_eagle3(
        model, tokenizer, Job(texts, tmp_path / "b", dtype=FULL), run=run(epochs=10, tokens=4000, rate=5e-3, own_share=1.0)
    )  # fmt: skip
    assert after["held"]["own"]["tokens_per_step"] > before["held"]["own"]["tokens_per_step"] + 0.2


def test_acceptance_is_that_of_decoding(model) -> None:
    """Simulated over the model's own text, chains are accepted exactly as far as decoding accepts them."""
    head, ids = a_head(model, run(length=40), seed=1)
    prompt = torch.randint(1, 128, (1, 10), generator=torch.Generator().manual_seed(2))
    text = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    learner = HeadLearner(
        run(length=40), head, Teacher(model, head.head_config.layers, False), ids, Texts(text, torch.tensor([10])),
        Texts(text, torch.tensor([10])),
    )  # fmt: skip
    outcome = learner.acceptance(learner.train)
    lesson = learner.teacher.lesson(learner.train, ())
    best, reached, drafts = lesson.logits.argmax(-1)[0], [0, 0, 0], 0
    with torch.no_grad():
        for t in range(8, 37):  # the first draft is after token 9, the last one that is given
            drafts += 1
            states = a_chain(head, lesson.embedded[:, 1:], lesson.features[:, : t + 1], 3)
            choice = head.lm_head(head.norm(states)).argmax(-1)
            for k in range(3):
                if choice[k] != best[t + 1 + k]:
                    break
                reached[k] += 1
    assert outcome.drafts == drafts
    assert outcome.reached == pytest.approx([count / drafts for count in reached])
    assert outcome.length == pytest.approx(1 + sum(reached) / drafts)


@pytest.mark.parametrize("own_share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_interrupted_run_ends_where_a_whole_one_does(tmp_path, model, tokenizer, texts, monkeypatch, own_share) -> None:
    training = run(own_share=own_share)
    train_eagle3(model, tokenizer, Job(texts, tmp_path / "whole", dtype=FULL), run=training)
    learn = HeadLearner.learn

    def interrupted(self, step):
        if step == 5:
            raise KeyboardInterrupt
        return learn(self, step)

    monkeypatch.setattr(HeadLearner, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_eagle3(model, tokenizer, Job(texts, tmp_path / "cut", dtype=FULL, checkpoint_minutes=0), run=training)
    assert not (tmp_path / "cut" / "config.json").exists(), "a half-trained head is not offered"
    monkeypatch.undo()
    train_eagle3(model, tokenizer, Job(texts, tmp_path / "cut", dtype=FULL), run=training)
    whole, cut = (load_head(tmp_path / name, CPU, FULL).head.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("form", ["authors", pytest.param("speculators", marks=pytest.mark.slow)])
def test_training_goes_on_with_a_head_that_exists(tmp_path, model, tokenizer, texts, form) -> None:
    train_eagle3(model, tokenizer, Job(texts, tmp_path / "first", dtype=FULL), run=run(draft_vocab=90), form=form)
    still = run(draft_vocab=90, rate=0.0, tokens=400)
    train_eagle3(
        model, tokenizer, Job(texts[::-1], tmp_path / "on", dtype=FULL), run=still, form=form, start=tmp_path / "first"
    )
    assert (tmp_path / "on" / "config.json").read_text() == (tmp_path / "first" / "config.json").read_text()
    first, on = load_head(tmp_path / "first", CPU, FULL), load_head(tmp_path / "on", CPU, FULL)
    assert torch.equal(first.vocabulary.ids, on.vocabulary.ids)
    assert all(torch.equal(tensor, on.head.state_dict()[name]) for name, tensor in first.head.state_dict().items())
    for wrong in (dict(draft_vocab=80), dict(draft_vocab=90, intermediate=20), dict(draft_vocab=90, layers=(1, 1, 0))):
        with pytest.raises(SettingsError, match="only if its shape and the layers that it reads equal the settings"):
            train_eagle3(model, tokenizer, Job(texts, tmp_path / "no"), run=run(**wrong), start=tmp_path / "first")


def test_what_cannot_be_trained_says_why(tmp_path, model, tokenizer, texts, monkeypatch) -> None:
    def train(out=tmp_path, texts=texts, **changes):
        train_eagle3(model, tokenizer, Job(texts, out, dtype=FULL), run=run(**changes))

    with pytest.raises(SettingsError, match="the draft vocabulary must have 1 … 128 tokens, not 129"):
        train(draft_vocab=129)
    with pytest.raises(SettingsError, match="for depth=3, length must be at least 5 tokens, not 4"):
        run(length=4)
    with pytest.raises(TrainingError, match=re.escape("the text has")):
        train(texts=["w1 w2"])
    assert not (tmp_path / "config.json").exists()
    monkeypatch.setattr(HeadLearner, "scores", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "other", own_share=0.0, checks=1)
    (tmp_path / "other" / "training").mkdir(exist_ok=True)
    torch.save({"identity": {"rate": 1.0}, "optimizers": []}, tmp_path / "other" / "training" / "checkpoint.pt")
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="a run with other"):
        train(tmp_path / "other", own_share=0.0)


def test_low_precision_trains(model) -> None:
    learner = a_learner(model, run(bf16=True))
    before = learner.learn(0)
    full = a_learner(model).learn(0)
    assert torch.isfinite(before) and F.l1_loss(before, full) < 0.05 * full
