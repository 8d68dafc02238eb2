"""One model's training run: its settings, its schedule, its state, and how that state is kept."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DecodersError
from .batches import Batches
from .shapes import DemoShape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WARMUP_STEPS = 200
DECAY_SHARE = 0.2


class TrainingError(DecodersError):
    """Training cannot start or go on: there are no sources, or the checkpoint belongs to other settings."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model's training. `tokens` sets the length; all else decides what is learnt from the same tokens."""

    shape: DemoShape
    tokens: int
    seed: int = 0
    rows: int = 8
    length: int = 512
    weight_decay: float = 0.1
    clip: float = 1.0

    @property
    def steps(self) -> int:
        """Optimizer steps; each sees `rows * length` tokens."""
        return max(1, self.tokens // (self.rows * self.length))

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be resumed: everything but the number of tokens."""
        return {key: value for key, value in asdict(self).items() if key != "tokens"}


def learning_rate(run: Run, step: int) -> float:
    """Warm-up, stable, linear decay to zero over the last fifth.

    The stable part does not depend on the length of the run, so a run can be resumed with fewer or more tokens: it
    then decays earlier or later.
    """
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, max(1, run.steps // 10)))
    decay = min(1.0, (run.steps - step) / max(1.0, DECAY_SHARE * run.steps))
    return run.shape.learning_rate * warmup * decay


@dataclass(frozen=True)
class Step:
    """What one optimizer step reports: steps done so far, loss in nats per token, wall seconds of this step."""

    done: int
    loss: float
    seconds: float


class Trainer:
    """Model, optimizers and step count of one run: the state that a checkpoint holds."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerFast, *, corpus: str, bf16: bool = True) -> None:
        self.run, self.tokenizer, self.corpus, self.bf16 = run, tokenizer, corpus, bf16
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            self.model: LlamaForCausalLM = run.shape.model(vocabulary=len(tokenizer))
        self.optimizers = _optimizers(self.model, run)
        self.step = 0
        self.seconds = 0.0

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return self.step * self.run.rows * self.run.length

    def steps(self, batches: Batches, *, compile: bool) -> Iterator[Step]:
        """Train to the end of the run, one step an item. The batch of a step depends on the seed and the step alone."""
        loss_of: Callable[[torch.Tensor], torch.Tensor] = torch.compile(self._loss) if compile else self._loss
        self.model.train()
        while self.step < self.run.steps:
            started = time.monotonic()
            loss = loss_of(batches.batch(self.step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(self.run, self.step)
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            seconds = time.monotonic() - started
            self.seconds += seconds
            yield Step(self.step, loss.item(), seconds)
        self.model.eval()

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, T + 1] int64 -> mean cross-entropy in nats, scalar."""
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def save(self, checkpoint: Path) -> None:
        """Write the whole state, loadable with `weights_only`."""
        state = {
            "run": self.run.identity(),
            "corpus": self.corpus,
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(checkpoint)  # an interrupted write must not cost the previous checkpoint

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. Raises TrainingError when it was made with other settings or other sources."""
        state = torch.load(checkpoint, weights_only=True)
        if state["run"] != self.run.identity() or state["corpus"] != self.corpus:
            raise TrainingError(
                f"{checkpoint} was made with other settings or other sources; "
                "choose another output directory, or train without resuming"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def rounded(self) -> LlamaForCausalLM:
        """A copy of the model in bf16: the weights that are written."""
        model = copy.deepcopy(self.model)
        model.bfloat16()
        model.config.dtype = torch.bfloat16
        model.config.architectures = [type(model).__name__]
        return model

    def export(self, directory: Path, card: str) -> None:
        """Write the rounded model, the tokenizer and the card where `from_pretrained` finds them."""
        from safetensors.torch import save_file

        # Files are written aside and moved, so that a reader never sees half a file while training goes on.
        partial = directory.with_name(f".{directory.name}.partial")
        partial.mkdir(exist_ok=True)
        model = self.rounded()
        model.config.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        # Not model.save_pretrained: it would draw its own progress bar through ours.
        weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        self.tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        directory.mkdir(exist_ok=True)
        for file in partial.iterdir():
            file.chmod(0o644)
            file.replace(directory / file.name)
        partial.rmdir()


def _optimizers(model: torch.nn.Module, run: Run) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms (Muon is not defined for them).

    `match_rms_adamw` scales Muon's updates to AdamW's, so that one learning rate serves both.
    """
    hidden: list[torch.nn.Parameter] = []
    embeddings: list[torch.nn.Parameter] = []
    norms: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        group = norms if parameter.dim() < 2 else embeddings if "embed" in name else hidden
        group.append(parameter)
    rate, decay = run.shape.learning_rate, run.weight_decay
    return (
        torch.optim.Muon(hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.95),
            fused=True,
        ),
    )
