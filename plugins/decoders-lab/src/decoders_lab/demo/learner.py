"""Training of a demo model, on files and then not to repeat itself in loops: settings, losses, and writing its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoders.bench.repetition import in_loops
from decoders.training.texts import own_texts
from decoders.training.trainer import Learner, Run, warmup_stable_decay

from .batches import Batches
from .shapes import DemoShape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WARMUP_STEPS = 200
DECAY_SHARE = 0.2
LOOPS_WARMUP_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class DemoTraining:
    """Settings of one demo model's training.

    Attributes:
        shape: the model's shape and peak learning rate.
        tokens: number of training tokens, from which the number of steps follows.
        seed: seed of the initial weights and of the order of the data.
        rows: number of rows per batch.
        length: number of tokens per row.
        weight_decay: weight decay of the matrices.
        clip: largest norm of the gradients.
    """

    shape: DemoShape
    tokens: int
    seed: int = 0
    rows: int = 8
    length: int = 512
    weight_decay: float = 0.1
    clip: float = 1.0

    @property
    def steps(self) -> int:
        """Number of optimizer steps; each learns from `rows * length` tokens."""
        return max(1, self.tokens // (self.rows * self.length))

    def rate(self, step: int) -> float:
        """Learning rate: it rises in the warm-up, stays constant, and falls linearly to zero over the last fifth of the steps."""
        warmup_steps = min(WARMUP_STEPS, max(1, self.steps // 10))
        return warmup_stable_decay(
            step, self.steps, self.shape.learning_rate, warmup_steps=warmup_steps, decay_share=DECAY_SHARE
        )

    def run(self, corpus: str) -> Run:
        """The run on the corpus with the fingerprint `corpus`. The number of tokens may change when the run is resumed."""
        settings = {name: value for name, value in asdict(self).items() if name != "tokens"}
        return Run(steps=self.steps, rate=self.rate, identity={**settings, "corpus": corpus}, clip=self.clip)


class DemoLearner(Learner):
    """A demo model, its tokenizer and its optimizers.

    Args:
        batches: the training data of each step.
        compile: whether to compile the training step.
        bf16: whether to compute in bfloat16.
    """

    model: LlamaForCausalLM

    def __init__(
        self,
        training: DemoTraining,
        tokenizer: PreTrainedTokenizerFast,
        batches: Batches,
        *,
        compile: bool = True,
        bf16: bool = True,
    ) -> None:
        self.training, self.tokenizer, self.batches, self.bf16 = training, tokenizer, batches, bf16
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            self.model = training.shape.model(vocabulary=len(tokenizer))
        self.optimizers = optimizers_of(self.model, rate=training.shape.learning_rate, decay=training.weight_decay)
        self.positions = training.rows * training.length
        self._loss_of: Callable[[Tensor], Tensor] = torch.compile(self._loss) if compile else self._loss

    def learn(self, step: int) -> Tensor:
        return self.learn_from(self.batches.batch(step))

    def learn_from(self, ids: Tensor) -> Tensor:
        """Adds the gradients of a batch to the model's parameters, and returns the batch's loss. ids: ``[B, T + 1]`` int64."""
        loss = self._loss_of(ids)
        loss.backward()
        return loss.detach()

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context of forward passes."""
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()

    def _loss(self, ids: Tensor) -> Tensor:
        """The mean cross-entropy in nats, scalar. ids: ``[B, T + 1]`` int64."""
        with self.autocast():
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def rounded(self) -> LlamaForCausalLM:
        """A copy of the model with the bf16 weights that are written."""
        model = copy.deepcopy(self.model)
        model.bfloat16()
        model.config.dtype = torch.bfloat16
        model.config.architectures = [type(model).__name__]
        return model

    def export(self, directory: Path, card: str) -> None:
        """Writes the rounded model, the tokenizer and the card to `directory`, as `from_pretrained` reads them."""
        from safetensors.torch import save_file

        # Files are written to a temporary folder and then moved, so that a reader never sees an incomplete file.
        partial = directory.with_name(f".{directory.name}.partial")
        partial.mkdir(exist_ok=True)
        model = self.rounded()
        model.config.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        # model.save_pretrained is not used, because its progress bar would mix with ours.
        weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        self.tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        directory.mkdir(exist_ok=True)
        for file in partial.iterdir():
            file.chmod(0o644)
            file.replace(directory / file.name)
        partial.rmdir()


def optimizers_of(model: torch.nn.Module, *, rate: float, decay: float) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms (Muon is not defined for them).

    `match_rms_adamw` scales Muon's updates to the size of AdamW's updates, so that both use one learning rate.
    """
    hidden: list[torch.nn.Parameter] = []
    embeddings: list[torch.nn.Parameter] = []
    norms: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        group = norms if parameter.dim() < 2 else embeddings if "embed" in name else hidden
        group.append(parameter)
    return (
        torch.optim.Muon(hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.95),
            fused=True,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class UnlikelihoodTraining:
    """Settings of a demo model's training against loops, after its training on files.

    Attributes:
        steps: number of optimizer steps; each step also learns from a batch of files.
        learning_rate: peak learning rate.
        prompt: number of tokens at the start of each row of files; the model continues these tokens.
        length: number of tokens of a continued row, prompt included.
        weight: weight of the unlikelihood relative to the likelihood of the files.
    """

    steps: int
    learning_rate: float = 7e-4
    prompt: int = 64
    length: int = 192
    weight: float = 2.0

    def rate(self, step: int) -> float:
        """Learning rate: warm-up, then linear decay to zero."""
        warmup_steps = min(LOOPS_WARMUP_STEPS, max(1, self.steps // 10))
        return warmup_stable_decay(step, self.steps, self.learning_rate, warmup_steps=warmup_steps, decay_share=1.0)


class UnlikelihoodLearner(Learner):
    """A demo model that learns not to repeat itself in loops.

    Every step learns from a batch of files, as before. It also lowers the probability of the tokens that :func:`in_loops` finds in the
    model's greedy continuations of the batch's rows: the sequence-level objective of Welleck et al. 2020 (arXiv 1908.04319, equation
    6), for loops instead of all repeated n-grams, because code repeats n-grams on purpose.

    Args:
        before: the learner that was trained on files. Its model is trained further, from the rounded weights that `before` would write.
        first_step: number of the first step of `batches` from which the model has not learned yet.
    """

    model: LlamaForCausalLM

    def __init__(self, before: DemoLearner, training: UnlikelihoodTraining, *, first_step: int) -> None:
        self.before, self.training, self.first_step = before, training, first_step
        self.model = before.model
        self.model.load_state_dict(before.rounded().state_dict())
        self.optimizers = optimizers_of(self.model, rate=training.learning_rate, decay=before.training.weight_decay)
        self.positions = before.positions

    def run(self) -> Run:
        """The run that follows the run of `before`. This run is resumed only if its settings and those of `before` are unchanged."""
        before = self.before.training
        identity = {**asdict(self.training), "before": asdict(before), "first_step": self.first_step}
        return Run(steps=self.training.steps, rate=self.training.rate, identity=identity, clip=before.clip)

    def learn(self, step: int) -> Tensor:
        batch = self.before.batches.batch(self.first_step + step)
        loss = self.before.learn_from(batch)
        ids = own_texts(self.model, batch[:, : self.training.length], 1.0, self.training.prompt).ids
        looping = in_loops(ids)[:, self.training.prompt :]
        if looping.any():
            (self.training.weight * self._unlikelihood(ids, looping)).backward()
        return loss

    def _unlikelihood(self, ids: Tensor, looping: Tensor) -> Tensor:
        """The sum of -log(1 - p) over the looping tokens, divided by the number of all written tokens, scalar.

        Args:
            ids: ``[B, T]`` int64, prompts and written tokens.
            looping: ``[B, T - prompt]`` bool, the written tokens in repetition loops.
        """
        with self.before.autocast():
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[:, -looping.shape[1] :]
        probabilities = logits.float().softmax(-1).gather(-1, ids[:, -looping.shape[1] :, None])[..., 0]
        return -torch.log1p(-probabilities.clamp(max=1 - 1e-5)).masked_fill(~looping, 0).mean()
