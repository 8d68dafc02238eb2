"""A run is reproducible, and an interrupted run ends with the weights of an uninterrupted run."""

from __future__ import annotations

import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders_lab.demo.batches import Batches
from decoders_lab.demo.evaluate import looping
from decoders_lab.demo.learner import DemoLearner, DemoTraining, UnlikelihoodLearner, UnlikelihoodTraining
from decoders_lab.demo.shapes import SHAPES, DemoShape, train_tokenizer
from decoders_lab.demo.train import train_demo
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from decoders import demo
from decoders.bench.repetition import in_loops
from decoders.cli import app
from decoders.demo import data
from decoders.errors import TrainingError
from decoders.training.texts import own_texts
from decoders.training.trainer import Trainer

TINY = DemoShape(hidden=16, layers=1, intermediate=32, heads=2, kv_heads=1, learning_rate=3e-3, vocabulary=300)
STEP = 2 * 32  # tokens in a step


@pytest.fixture(scope="module")
def sources():
    # Held-out files are needed, too, for the figures.
    return [s for s in data.read_sources() if s.path in {"bisect.py", "colorsys.py", "stat.py"}]


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """Measures the share of looping text on few tokens, because a run measures it several times."""
    from decoders_lab.demo import learner, train

    monkeypatch.setattr(train, "looping", partial(looping, length=80, rows=2))
    settings = partial(learner.UnlikelihoodTraining, prompt=8, length=32)
    monkeypatch.setattr(train, "UnlikelihoodTraining", settings)


def train(directory, sources, *, steps=4, **settings):
    return train_demo(
        directory,
        sources=sources,
        shapes={"target": TINY, "draft": TINY},
        target_tokens=steps * STEP,
        draft_tokens=2 * STEP,
        rows=2,
        length=32,
        compile=False,
        **{"loop_steps": 2, **settings},
    )


def weights(directory):
    return load_file(directory / "target" / "model.safetensors")


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_same_seed_same_weights(tmp_path, sources):
    figures = [train(tmp_path / name, sources) for name in ("a", "b")]
    train(tmp_path / "c", sources, seed=1)
    assert figures[0] == figures[1]
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_resumed_run_equals_uninterrupted_run(tmp_path, sources, monkeypatch):
    train(tmp_path / "whole", sources)

    original = Trainer.steps

    def interrupted(self):
        for step in original(self):
            yield step
            if self.run.steps == 4 and step.done == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", sources, checkpoint_minutes=0)
    train(tmp_path / "cut", sources)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.slow
def test_a_run_goes_on_with_more_tokens_and_other_steps_against_loops(tmp_path, sources):
    train(tmp_path, sources)
    train(tmp_path, sources, steps=6)
    train(tmp_path, sources, steps=6, loop_steps=3)
    card = (tmp_path / "target" / "README.md").read_text()
    assert f"{6 * STEP} tokens seen" in card
    assert "Then 3 steps" in card


def test_checkpoint_of_other_settings_is_refused(tmp_path, sources):
    train(tmp_path, sources)
    with pytest.raises(TrainingError, match="other settings"):
        train(tmp_path, sources, seed=1)
    train(tmp_path, sources, seed=1, resume=False)


def test_no_sources_is_a_clear_error(tmp_path):
    with pytest.raises(TrainingError, match="no Python sources"):
        train_demo(tmp_path, sources=[])


def test_trained_directory_loads_and_its_card_tells(tmp_path, sources):
    log = io.StringIO()
    train(tmp_path, sources, checkpoint_minutes=0, console=Console(file=log, width=120))
    model, tokenizer = demo.load("target", directory=tmp_path)
    assert demo.available(tmp_path)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    card = (tmp_path / "target" / "README.md").read_text()
    assert card.startswith("---\n")
    for part in ("PSF-2.0", f"{4 * STEP} tokens seen", "nats per token", "Then 2 steps", "goes on with a loop"):
        assert part in card
    assert "target: step 4 of 4" in log.getvalue()


def test_schedule_warms_up_stays_and_decays_to_zero():
    training = DemoTraining(shape=SHAPES["target"], tokens=8 * 512 * 5000)
    peak = training.shape.learning_rate
    rates = [training.rate(step) for step in range(training.steps + 1)]
    assert rates[0] < 0.01 * peak
    assert set(rates[200:4000]) == {peak}
    assert rates[4500] == pytest.approx(peak / 2)
    assert rates[-1] == 0


def test_a_step_against_loops_adds_the_unlikelihood_of_the_loops_in_what_the_model_writes(sources):
    tokenizer = train_tokenizer([source.text for source in sources], vocabulary=300)
    batches = Batches(sources, tokenizer, seed=0, rows=4, length=64)
    training = DemoTraining(shape=TINY, tokens=0, rows=4, length=64)
    before = DemoLearner(training, tokenizer, batches, compile=False, bf16=False)
    learner = UnlikelihoodLearner(before, UnlikelihoodTraining(steps=1, prompt=16, length=64, weight=3.0), first_step=5)
    model = learner.model

    def gradients():
        taken = [weight.grad.clone() for weight in model.parameters()]
        model.zero_grad()
        return taken

    before.learn(5)
    of_files = gradients()
    # A model that has learnt nothing writes the same tokens again and again.
    ids = own_texts(model, batches.batch(5)[:, :64], 1.0, 16).ids
    looping = in_loops(ids)[:, 16:]
    assert looping.float().mean() > 0.3
    likelihood = model(input_ids=ids).logits[:, 15:-1].softmax(-1).gather(-1, ids[:, 16:, None])[..., 0]
    (-(1 - likelihood).log() * looping).mean().backward()
    of_loops = gradients()
    learner.learn(0)
    for left, files, loops in zip(gradients(), of_files, of_loops, strict=True):
        torch.testing.assert_close(left, files + 3 * loops, rtol=1e-3, atol=1e-6)


def test_looping_of_too_little_text_is_not_a_number(sources):
    tokenizer = train_tokenizer([source.text for source in sources], vocabulary=300)
    short = [data.Source("short.py", "x = 1")]
    assert math.isnan(looping(TINY.model(vocabulary=len(tokenizer)), tokenizer, short))


def test_train_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import decoders_lab.demo.train as training

    calls: list[Any] = []

    def train_demo(out: Path, **options: Any) -> dict[str, dict[str, float]]:
        calls.append((out, options))
        return {"draft": {"loss": 1.5}}

    monkeypatch.setattr(training, "train_demo", train_demo)
    result = CliRunner().invoke(
        app, ["train", "demo", "somewhere", "--target-tokens", "100", "--no-compile", "--seed", "3", "--json"]
    )
    assert json.loads(result.stdout) == {"draft": {"loss": 1.5}}
    ((out, options),) = calls
    assert out == Path("somewhere")
    assert (options["target_tokens"], options["compile"], options["seed"], options["console"]) == (100, False, 3, None)
