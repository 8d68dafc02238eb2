"""The training loop with its checkpoints, and the schedules, optimizers and loss that all kinds of training share."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import TrainingError
from .progress import progress_bar
from .texts import load_state, save_state

if TYPE_CHECKING:
    from rich.console import Console


#: The rate rises for WARMUP_STEPS steps, and falls for the last DECAY_SHARE of the steps. CLIP is the greatest norm of gradients.
WARMUP_STEPS, DECAY_SHARE, CLIP = 20, 0.5, 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """The length, the learning rate and the checks of a training run.

    Attributes:
        steps: number of optimizer steps, if the run is not stopped early.
        rate: returns the learning rate of a step, given its number.
        identity: settings, and fingerprints of data and model, as JSON-safe values. A checkpoint is resumed only if it has the same
            identity.
        clip: greatest norm of the gradients; None: no clipping.
        check_every: number of steps between checks of the held-out scores. There is also a check after the last step. None: no
            checks.
        patience: training stops after this number of checks without a better score; None: it does not stop early.
    """

    steps: int
    rate: Callable[[int], float]
    identity: Mapping[str, Any]
    clip: float | None = None
    check_every: int | None = None
    patience: int | None = None


class Learner(ABC):
    """A model in training.

    Attributes:
        model: the model whose weights are trained.
        optimizers: each makes one update per step. Together they update all parameters of the model.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    @abstractmethod
    def learn(self, step: int) -> Tensor:
        """Computes the loss of one step, accumulates its gradients in the parameters' ``.grad``, and returns the loss, a scalar.

        The data of a step depend only on the seed and on `step`, so that a resumed run equals a run without interruption.
        """

    def scores(self) -> list[float]:
        """Accuracies on held-out data, at least one if there are checks. A run ends with the weights of the best mean accuracy."""
        return []

    def in_words(self, scores: Sequence[float]) -> str:
        """`scores` as text, for the line that the console shows after a check."""
        return ", ".join(f"{score:.1%}" for score in scores)


@dataclass(frozen=True)
class OptimizerStep:
    """The result of one optimizer step.

    Attributes:
        done: number of steps done so far.
        loss: loss of this step.
        scores: held-out scores, if they were measured after this step.
    """

    done: int
    loss: float
    scores: list[float] | None = None


class Trainer:
    """One training run and its state: model, optimizers, number of steps and best weights. Checkpoints store this state.

    Attributes:
        step: number of optimizer steps done.
        seconds: duration of all steps and checks so far, including those before the run was resumed.
        best: weights with the best mean score so far; None in a run without checks.
        best_score: the mean score of `best`.
        checks_since_best: number of checks since `best` was found.
    """

    def __init__(self, learner: Learner, run: Run) -> None:
        self.learner, self.run = learner, run
        self.step = self.checks_since_best = 0
        self.seconds = self.best_score = 0.0
        self.best = self._weights() if run.check_every is not None else None

    @property
    def stopped(self) -> bool:
        """Whether the run is over: all steps are done, or `patience` checks have passed without a better score."""
        patience = self.run.patience
        return self.step >= self.run.steps or (patience is not None and self.checks_since_best >= patience)

    def train(
        self, name: str, checkpoint: Path, *, resume: bool = True, checkpoint_minutes: float = 1.0,
        console: Console | None = None, on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Trains to the end and writes a final checkpoint. With `resume`, training begins at the last checkpoint, if there is one.

        The first Ctrl-C ends the run after the current step and writes a checkpoint. The second Ctrl-C ends the run at once.

        Args:
            name: name of the trained network, for the progress bar.
            console: shows a progress bar, and a line after each check and checkpoint.
            on_checkpoint: called after every checkpoint except the final one.

        Raises:
            TrainingError: the checkpoint belongs to another run.
            KeyboardInterrupt: Ctrl-C was pressed. The message names the checkpoint.
        """
        if resume and checkpoint.exists():
            self.load(checkpoint)
        saved = time.monotonic()
        with (
            first_interrupt() as interrupted,
            progress_bar(console, f"train {name}", self.run.steps, self.step) as advance,
        ):
            for step in self.steps():
                advance(1, f"loss {step.loss:.3f}")
                if step.scores is not None and console is not None:
                    console.log(f"step {step.done}: loss {step.loss:.3f}, {self.learner.in_words(step.scores)}")
                if interrupted.is_set() or time.monotonic() - saved > 60 * checkpoint_minutes:
                    self.save(checkpoint)
                    on_checkpoint()
                    if interrupted.is_set():
                        raise KeyboardInterrupt(
                            f"interrupted after step {step.done} of {self.run.steps}, saved in {checkpoint}: the same command "
                            "continues from there (--no-resume, or resume=False in Python, starts again)"
                        )
                    if console is not None:  # a log file cannot show the progress bar
                        console.log(f"{name}: step {step.done} of {self.run.steps}, loss {step.loss:.3f}")
                    saved = time.monotonic()
        self.save(checkpoint)

    def steps(self) -> Iterator[OptimizerStep]:
        """Trains to the end of the run, and yields the result of each step. Afterwards the model has the best weights."""
        run, model = self.run, self.learner.model
        model.train()
        while not self.stopped:
            started = time.monotonic()
            loss = self.learner.learn(self.step)
            self._update()
            self.step += 1
            scores = None
            if run.check_every is not None and (self.step % run.check_every == 0 or self.step == run.steps):
                scores = self.learner.scores()
                self._note(fmean(scores))
            self.seconds += time.monotonic() - started
            yield OptimizerStep(self.step, loss.item(), scores)
        if self.best is not None:
            model.load_state_dict(self.best)
        model.eval()

    def _update(self) -> None:
        """Lets all optimizers make one update, and clears the gradients."""
        if self.run.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.learner.model.parameters(), self.run.clip)
        rate = self.run.rate(self.step)
        for optimizer in self.learner.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def _note(self, score: float) -> None:
        """Stores a copy of the present weights if `score` is greater than all earlier scores."""
        if score > self.best_score:
            self.best_score, self.checks_since_best = score, 0
            self.best = self._weights()
        else:
            self.checks_since_best += 1

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.learner.model.state_dict().items()}

    def save(self, checkpoint: Path) -> None:
        """Writes the whole state, see :func:`~decoders.training.texts.save_state`."""
        state = {
            "identity": dict(self.run.identity),
            "step": self.step,
            "seconds": self.seconds,
            "model": self.learner.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.learner.optimizers],
            "best": self.best,
            "best_score": self.best_score,
            "checks_since_best": self.checks_since_best,
        }
        save_state(state, checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Loads a checkpoint, to continue its run.

        Raises:
            TrainingError: the checkpoint is damaged, or belongs to a run with other settings, other data or another model.
        """
        state = load_state(checkpoint)
        own, other = self.run.identity, state.get("identity", {})
        different = sorted(name for name in {*own, *other} if own.get(name) != other.get(name))
        if different:
            raise TrainingError(
                f"{checkpoint} belongs to a run with other settings ({', '.join(different)}): choose another folder, or train without "
                "resuming"
            )
        self.learner.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.learner.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]
        self.best, self.best_score = state["best"], state["best_score"]
        self.checks_since_best = state["checks_since_best"]


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets. The event is never set outside the main thread, or if Ctrl-C has another handler."""
    event, default = threading.Event(), signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield event
        return

    def note(*_: Any) -> None:
        signal.signal(signal.SIGINT, default)
        event.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, default)


def warmup_stable_decay(step: int, steps: int, peak: float, *, warmup_steps: int, decay_share: float) -> float:
    """The learning rate. It rises over `warmup_steps`, stays at `peak`, and falls to zero over the last `decay_share` of the steps.

    Before the decay, the rate is the same for any number of `steps`.
    """
    warmup = min(1.0, (step + 1) / warmup_steps)
    decay = min(1.0, (steps - step) / max(1.0, decay_share * steps))
    return peak * warmup * decay


def muon_and_adamw(
    model: nn.Module, rate: float, outer: Iterable[Tensor], decay: float = 0.01
) -> list[torch.optim.Optimizer]:
    """The optimizers: Muon for the hidden matrices, AdamW for all other parameters.

    Muon's updates are scaled to the size of AdamW's updates, so that both use one learning rate.

    Args:
        outer: embeddings and output matrices. Muon is not defined for them.
        decay: weight decay of the hidden matrices.
    """
    apart = {id(weight) for weight in outer}
    learnt = [p for p in model.parameters() if p.requires_grad]
    hidden = [p for p in learnt if p.dim() == 2 and id(p) not in apart]
    others = [p for p in learnt if p.dim() != 2 or id(p) in apart]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(torch.optim.Muon(hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers


@torch.no_grad()
def soft_cross_entropy(scores: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss ``Σ weights · CE(target, softmax(scores))``, and its gradient with respect to `scores`.

    Args:
        scores: ``[B, S, D]`` float32, logits.
        target: ``[B, S, D]`` float32, probabilities.
        weights: ``[B, S]``, weight of each position.
    """
    right = torch.matmul(target[..., None, :], scores[..., None])[..., 0, 0]
    loss = (weights * (scores.logsumexp(-1) - right)).sum()
    return loss, scores.softmax(-1).sub_(target).mul_(weights[..., None])
