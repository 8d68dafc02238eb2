"""The training loop by itself, with a model of one weight."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from decoders.errors import TrainingError
from decoders.training.trainer import Learner, Run, Trainer, warmup_stable_decay


class Line(Learner):
    """Fits ``y = 3 x``; its scores are read from a script."""

    def __init__(self, scores: list[float] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizers = [torch.optim.AdamW(self.model.parameters())]
        self.seen, self.script = [], list(scores or ())

    def learn(self, step: int) -> Tensor:
        self.seen.append(step)
        x = torch.randn(4, 1, generator=torch.Generator().manual_seed(step))
        loss = (self.model(x) - 3 * x).square().mean()
        loss.backward()
        return loss.detach()

    def scores(self) -> list[float]:
        return [self.script.pop(0)]


def run(**settings) -> Run:
    return Run(**{"steps": 10, "rate": lambda step: 0.1, "identity": {"seed": 0}, **settings})


def weight(learner: Line) -> float:
    return learner.model.weight.item()


def test_it_learns_and_leaves_the_model_ready_to_use(tmp_path: Path) -> None:
    learner = Line()
    Trainer(learner, run(steps=200)).train("line", tmp_path / "line.pt")
    assert weight(learner) == pytest.approx(3, abs=0.1)
    assert learner.seen == list(range(200)) and not learner.model.training


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    whole = Line()
    Trainer(whole, run()).train("line", tmp_path / "whole.pt")
    cut = Line()
    trainer = Trainer(cut, run())
    steps = trainer.steps()
    for _ in range(4):
        next(steps)
    trainer.save(tmp_path / "cut.pt")
    other = Line()
    Trainer(other, run()).train("line", tmp_path / "cut.pt")
    assert other.seen == [4, 5, 6, 7, 8, 9] and weight(other) == weight(whole)


class Interrupted(Line):
    """Presses Ctrl-C so many times in its third step."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def learn(self, step: int) -> Tensor:
        for _ in range(self.times if step == 2 else 0):
            signal.raise_signal(signal.SIGINT)
        return super().learn(step)


@pytest.fixture
def listens_to_ctrl_c() -> Iterator[None]:
    """A process that a shell starts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_ends_a_run_after_its_step_with_a_checkpoint_and_a_second_one_at_once(tmp_path: Path) -> None:
    whole, checkpoint = Line(), tmp_path / "cut.pt"
    Trainer(whole, run()).train("line", tmp_path / "whole.pt")
    with pytest.raises(KeyboardInterrupt) as stopped:
        Trainer(Interrupted(2), run()).train("line", checkpoint)
    assert not stopped.value.args and not checkpoint.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt, match=r"after step 3 of 10, saved in .*cut.pt: the same command continues"):
        Trainer(Interrupted(1), run()).train("line", checkpoint)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rest = Line()
    Trainer(rest, run()).train("line", checkpoint)
    assert rest.seen == list(range(3, 10)) and weight(rest) == weight(whole)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    Trainer(Line(), run()).train("line", tmp_path / "line.pt")
    again = Line()
    trainer = Trainer(again, run())
    trainer.train("line", tmp_path / "line.pt")
    assert again.seen == [] and trainer.step == 10


def test_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    Trainer(Line(), run()).train("line", tmp_path / "line.pt")
    with pytest.raises(TrainingError, match=r"other settings \(seed\)"):
        Trainer(Line(), run(identity={"seed": 1})).train("line", tmp_path / "line.pt")
    torch.save({"run": {"seed": 0}, "step": 3}, tmp_path / "line.pt")  # no checkpoint of this trainer
    with pytest.raises(TrainingError, match="without resuming"):
        Trainer(Line(), run()).train("line", tmp_path / "line.pt")
    learner = Line()
    Trainer(learner, run()).train("line", tmp_path / "line.pt", resume=False)
    assert len(learner.seen) == 10


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(tmp_path: Path, full_disk) -> None:
    trainer, checkpoint = Trainer(Line(), run()), tmp_path / "line.pt"
    trainer.save(checkpoint)
    whole = checkpoint.read_bytes()

    with full_disk(), pytest.raises(OSError, match="No space left"):
        trainer.save(checkpoint)
    assert checkpoint.read_bytes() == whole
    trainer.load(checkpoint)


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, left: int) -> None:
    trainer, checkpoint = Trainer(Line(), run()), tmp_path / "line.pt"
    trainer.save(checkpoint)
    checkpoint.write_bytes(checkpoint.read_bytes()[:left])
    with pytest.raises(TrainingError, match="line.pt is damaged: delete it, or train without resuming"):
        trainer.load(checkpoint)


def test_training_stops_without_a_gain_and_the_best_weights_are_taken(tmp_path: Path) -> None:
    learner, weights = Line([0.1, 0.5, 0.2, 0.5, 0.9]), []
    trainer = Trainer(learner, run(check_every=2, patience=2))
    for _ in trainer.steps():
        weights.append(weight(learner))
    assert trainer.step == 8, "checked after 2, 4, 6 and 8 steps; 0.5 again is no gain"
    assert trainer.best_score == 0.5 and weight(learner) == weights[3]


def test_gradients_are_clipped_before_the_step() -> None:
    learner = Line()
    learner.optimizers = [torch.optim.SGD(learner.model.parameters())]
    before = torch.cat([p.detach().flatten().clone() for p in learner.model.parameters()])
    next(Trainer(learner, run(clip=0.01, rate=lambda step: 1.0)).steps())
    after = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_progress_is_told_at_checkpoints(tmp_path: Path) -> None:
    log, checkpoints = io.StringIO(), []
    Trainer(Line(), run(steps=3)).train(
        "line", tmp_path / "line.pt", checkpoint_minutes=0, console=Console(file=log, width=120),
        on_checkpoint=lambda: checkpoints.append((tmp_path / "line.pt").exists()),
    )  # fmt: skip
    assert "line: step 3 of 3, loss" in log.getvalue() and checkpoints == [True] * 3


def test_a_stable_schedule_warms_up_stays_and_decays() -> None:
    stable = [warmup_stable_decay(step, 100, 2.0, warmup_steps=10, decay_share=0.2) for step in range(101)]
    assert stable[0] == pytest.approx(0.2) and set(stable[10:80]) == {2.0}
    assert stable[90] == pytest.approx(1.0) and stable[100] == 0
