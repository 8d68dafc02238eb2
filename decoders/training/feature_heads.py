"""The shared parts of training networks that draft for a frozen target. Most of them read features: hidden states of the target.

Letters: ``B`` rows, ``T`` tokens of a row, ``F`` width of the target's features, ``H`` the target's hidden size, ``D`` tokens that can
be drafted.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import config_value, decoder_layers, stop_tokens
from ..errors import SettingsError, TrainingError
from .recipes import Recipe
from .texts import Job, Texts, TextStore, check_length, counted, digest, workplace
from .trainer import CLIP, DECAY_SHARE, WARMUP_STEPS, Learner, Run, Trainer, muon_and_adamw, warmup_stable_decay

#: Greatest number of held-out rows on which acceptance is measured between steps.
WATCHED = 32


@dataclass(frozen=True)
class Lesson:
    """The target's results for rows of text.

    Attributes:
        features: ``[B, T, F]``, concatenated outputs of the target layers that the network reads. Without such layers ``[B, T, H]``,
            the input of the output head.
        embedded: ``[B, T, H]``, embeddings of the tokens.
        logits: ``[B, T, D]`` float32, the target's logits after every token, for the tokens that can be drafted.
        best: ``[B, T]`` int64, the target's likeliest next token, out of the whole vocabulary.
        total: ``[B, T]`` float32, log-sum-exp of the target's logits over the whole vocabulary; None if `logits` has all tokens.
        counted: ``[B, T]`` bool, the positions that count in losses and figures, see :func:`~decoders.training.texts.counted`.
    """

    features: Tensor
    embedded: Tensor
    logits: Tensor
    best: Tensor
    total: Tensor | None
    counted: Tensor

    @property
    def probabilities(self) -> Tensor:
        """The target's probabilities ``[B, T, D]`` of the tokens that can be drafted, normalized over the whole vocabulary."""
        return self.logits.softmax(-1) if self.total is None else (self.logits - self.total[..., None]).exp()


class Teacher:
    """Runs the frozen target, and returns its features and logits.

    Args:
        layers: indices of the decoder layers that are read; empty: the input of the output head is read.
        bf16: whether the target computes in bfloat16.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], bf16: bool) -> None:
        decoder = decoder_layers(model)
        self.model, self.layers, self.bf16 = model, [decoder[layer] for layer in layers], bf16

    @torch.no_grad()
    def lesson(self, texts: Texts, stops: Sequence[int], ids: Tensor | None = None) -> Lesson:
        """The target's results for all rows of `texts`, computed in one pass.

        Args:
            stops: end-of-sequence ids. In text that the model wrote, they and all positions after them are left out of the loss.
            ids: ``[D]``, the tokens that can be drafted; None: all.
        """
        model, read = self.model, texts.ids.to(self.model.device)
        output, total = model.get_output_embeddings(), None
        with self._noting() as noted, self.precision():
            embedded, logits = model.get_input_embeddings()(read).float(), model(input_ids=read, use_cache=False).logits
        features = torch.cat([noted[layer] for layer in self.layers or [output]], dim=-1).float()
        best = logits.argmax(-1)
        if ids is not None and len(ids) < len(output.weight):
            # Logits of the whole vocabulary are large, and only the logits of `ids` are needed from here on.
            total, logits = logits.float().logsumexp(-1), logits[..., ids]
        return Lesson(features, embedded, logits.float(), best, total, counted(texts, stops).to(read.device))

    @torch.no_grad()
    def features(self, texts: Texts) -> Tensor:
        """The features of all rows of `texts`, ``[B, T, F]`` float32, computed in one pass without logits."""
        with self._noting() as noted, self.precision():
            self.model.base_model(input_ids=texts.ids.to(self.model.device), use_cache=False)
        return torch.cat([noted[layer] for layer in self.layers], dim=-1).float()

    def precision(self) -> torch.autocast | nullcontext:
        """The autocast context in which the target and the trained network run."""
        return torch.autocast(self.model.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    @torch.no_grad()
    def has_linear_head(self, ids: Tensor) -> bool:
        """Whether the target's logits are its hidden states times the output matrix, plus bias. Some models also scale or bound
        logits.

        Args:
            ids: ``[B, T]``, any text.
        """
        output, scores = self.model.get_output_embeddings(), list[Tensor]()

        def enlarge(_: nn.Module, __: object, given: Tensor) -> Tensor:
            scores.append(given)
            return 64 * given  # exact in every dtype, and beyond any bound that a target sets on its logits

        with output.register_forward_hook(enlarge), self._noting() as noted, self.precision():
            logits = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits
        if not torch.equal(logits.float(), 64 * scores[-1].float()):
            return False
        with self.precision():
            product = nn.functional.linear(
                noted[output].to(output.weight.dtype), output.weight, getattr(output, "bias", None)
            )
        difference = (product.float() - scores[-1].float()).norm()
        return bool(difference <= max(torch.finfo(product.dtype).eps, 1e-5) * scores[-1].float().norm())

    @contextmanager
    def _noting(self) -> Iterator[dict[torch.nn.Module, Tensor]]:
        """Yields a dict that fills while the target runs: for each layer its output, and for the output head its input."""
        noted: dict[torch.nn.Module, Tensor] = {}

        def note(layer: torch.nn.Module, _: object, output: Tensor | tuple) -> None:
            noted[layer] = output if isinstance(output, Tensor) else output[0]

        def note_read(output: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
            noted[output] = given[0]

        with ExitStack() as hooks:
            for layer in dict.fromkeys(self.layers):
                hooks.enter_context(layer.register_forward_hook(note))
            hooks.enter_context(self.model.get_output_embeddings().register_forward_pre_hook(note_read))
            yield noted


class FeatureLearner(Learner):
    """A network and its optimizers: Muon for its hidden matrices, AdamW for output matrices, embeddings and norms.

    The rows of the text are shuffled anew in every epoch. Rows at the end of an epoch that do not fill a step are left out.

    Args:
        rows: number of rows of text per step.
        ids: ``[D]`` int64, the tokens that the network can propose.
        train: training text.
        held_out: held-out text. Its first :data:`WATCHED` rows are scored during training; rows that the target continued come first.
        outer: output matrices and embeddings of the network.
    """

    def __init__(
        self, recipe: Recipe, rows: int, network: nn.Module, teacher: Teacher, ids: Tensor, train: Texts, held_out: Texts,
        outer: Iterable[Tensor],
    ) -> None:  # fmt: skip
        self._recipe, self._epoch, self._order = recipe, -1, torch.empty(0, dtype=torch.int64)
        self.rows, self.model, self.teacher, self.ids, self.train = rows, network, teacher, ids, train
        self.stops = stop_tokens(teacher.model)
        self._watched = held_out.part(0, WATCHED)
        self.optimizers = muon_and_adamw(network, recipe.rate, outer)

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.train.ids) // self.rows)

    def examples_of(self, step: int) -> Tensor:
        """The indices of a step's rows, ``[rows]`` int64. The indices depend only on the seed and on `step`."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.train.ids), generator=generator)
        return self._order[place * self.rows : (place + 1) * self.rows]

    def run(self, identity: Mapping[str, Any]) -> Run:
        """The :class:`Run` of this learner. identity: fingerprints of text and target. They must be equal to resume a run."""
        recipe, steps = self._recipe, self._recipe.epochs * self.steps_per_epoch
        rate = partial(
            warmup_stable_decay, steps=steps, peak=recipe.rate, warmup_steps=WARMUP_STEPS, decay_share=DECAY_SHARE
        )
        return Run(
            steps=steps, rate=rate, identity={**asdict(recipe), **identity}, clip=CLIP,
            check_every=max(1, self.steps_per_epoch // recipe.checks), patience=recipe.patience,
        )  # fmt: skip

    def begin(self) -> None:
        """Initializes a new network from the training text. Not called for a network from files or from a checkpoint."""

    @abstractmethod
    def acceptance(self, texts: Texts) -> Acceptance:
        """The acceptance of drafts at the positions of `texts` that count."""

    def lesson(self, step: int) -> tuple[Texts, Lesson]:
        """The rows of text that a step learns from, and the target's results for them."""
        texts = self.train.chosen(self.examples_of(step))
        return texts, self.teacher.lesson(texts, self.stops, self.ids)

    def lessons(self, texts: Texts) -> Iterator[tuple[Texts, Lesson]]:
        """Yields all rows of `texts` with the target's results, in parts as large as a training step."""
        for first in range(0, len(texts.ids), self.rows):
            part = texts.part(first, first + self.rows)
            yield part, self.teacher.lesson(part, self.stops, self.ids)

    def scores(self) -> list[float]:
        """For each length 1, 2, …, the share of greedy drafts with at least this many accepted tokens."""
        return self.acceptance(self._watched).reached

    def in_words(self, scores: Sequence[float]) -> str:
        shares = super().in_words(scores)
        return f"drafts accepted up to token 1, 2, …: {shares}; {1 + sum(scores):.2f} tokens per step"


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of simulated drafts.

    Attributes:
        drafts: number of drafts.
        reached: for each length, the share of greedy drafts with at least this many accepted tokens.
        rates: for each simulated token, how often it is the target's greedy choice, also in drafts with earlier rejected tokens.
        overlaps: for each simulated token, the acceptance rate at temperature 1 under the best coupling: 1 - total variation.
    """

    drafts: int
    reached: list[float]
    rates: list[float]
    overlaps: list[float]

    @property
    def length(self) -> float:
        """Mean number of tokens that a step commits with these greedy drafts, the target's own token included."""
        return 1 + sum(self.reached)

    def facts(self) -> dict[str, Any]:
        """The attributes and the mean tokens per step, as a dict that JSON can hold."""
        return {"tokens_per_step": self.length, **asdict(self)}


class AcceptanceSums:
    """Computes an :class:`Acceptance` from groups of drafts, one draft token after the other. depth: number of tokens in a draft."""

    def __init__(self, depth: int) -> None:
        self._sums, self._drafts = torch.zeros(3, depth, dtype=torch.float64), 0

    def begin(self, whole: Tensor) -> None:
        """Starts the next group of drafts. whole: ``[…]`` bool, whether all positions of a draft count; other drafts are left out."""
        self._drafts += int(whole.sum())
        self._place, self._whole, self._accepted = 0, whole, whole

    def add(self, scores: Tensor, right: Tensor, target: Tensor) -> None:
        """Adds the results for the next token of every draft in the group. Called once per token, in order.

        Args:
            scores: ``[…, D]`` float32, the network's logits.
            right: ``[…]`` bool, whether the network's best token is the target's best token.
            target: ``[…, D]``, the target's probabilities.
        """
        self._accepted = self._accepted & right
        overlap = torch.minimum(scores.softmax(-1), target).sum(-1) * self._whole
        for row, what in enumerate((self._accepted, right & self._whole, overlap)):
            self._sums[row, self._place] += what.sum().cpu().double()
        self._place += 1

    @property
    def acceptance(self) -> Acceptance:
        reached, rates, overlaps = (self._sums / max(self._drafts, 1)).tolist()
        return Acceptance(self._drafts, reached, rates, overlaps)


def train_network(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job, run: Any, name: str,
    make: Callable[[Texts, Texts], FeatureLearner],
    write: Callable[[FeatureLearner, dict[str, Any], Mapping[str, Texts]], str], *, goes_on: bool = False, learns: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Trains a network for the frozen target `model`, and writes it with a card.

    Args:
        run: the recipe; its `rows` is the number of rows per step.
        name: the network's name, for the progress bar.
        make: takes the training text and the held-out text, and returns the learner.
        write: takes the learner, the figures and the texts (:meth:`.TextStore.sets`). Writes the learner's network, may add figures,
            and returns the card.
        goes_on: whether an earlier network is trained further. If so, only a run from the same initial weights can be resumed.
        learns: whether the network is trained; otherwise it is only measured and written.

    Returns:
        The figures: steps, tokens, seconds, parameters, and :meth:`Acceptance.facts` for each held-out set and kind of text.

    Raises:
        TrainingError: there is too little text, or the checkpoint belongs to another run.
    """
    check_length(model, run.length)
    work = workplace(job.out, job.resume)
    store = TextStore(model, tokenizer, run, work, job.console)
    texts = store.sets(job, max(run.rows, run.tokens // run.length), learns)
    judged = {which: rows for which, rows in texts.items() if which != "train"}
    train = texts.get("train", texts["held"])
    learner = make(train, texts["held"])
    network, checkpoint = learner.model, work / "checkpoint.pt"
    figures: dict[str, Any] = {"run": asdict(run), "parameters": sum(p.numel() for p in network.parameters())}
    if learns:
        identity = {"text": train.digest(), "model": store.model_digest}
        if goes_on:
            identity["start"] = digest(network)
        elif not (job.resume and checkpoint.exists()):
            learner.begin()
        trainer = Trainer(learner, learner.run(identity))
        trainer.train(
            name, checkpoint, resume=job.resume, checkpoint_minutes=job.checkpoint_minutes, console=job.console
        )
        figures |= {"steps": trainer.step, "tokens": train.ids.numel(), "seconds": round(trainer.seconds, 1)}
    # The weights are rounded as in the file, so that the figures hold for the file.
    network.load_state_dict({key: tensor.to(job.dtype) for key, tensor in network.state_dict().items()})
    facts = {which: rows.by_kind(lambda part: learner.acceptance(part).facts()) for which, rows in judged.items()}
    figures |= facts
    (job.out / "README.md").write_text(write(learner, figures, texts), encoding="utf-8")
    shutil.rmtree(work)
    return figures


def layers_read(model: PreTrainedModel, run: Any) -> tuple[int, ...]:
    """The indices (from 0) of the decoder layers that a network reads. run: the recipe, which chooses the layers.

    Raises:
        TrainingError: the target has no list of decoder layers.
        SettingsError: the target lacks a layer that the recipe names.
    """
    if not (count := len(decoder_layers(model))):
        raise TrainingError(
            f"training reads outputs of decoder layers, and {type(model).__name__} has no list of decoder layers"
        )
    return run.layers_of(count)


def layer_config(model: PreTrainedModel, intermediate: int | None, layers: int = 1) -> LlamaConfig:
    """The config of decoder layers that draft for the target `model`.

    Attention and rotary positions are as in the target, if the target's config names them as Llama's config does.

    Args:
        intermediate: width of the layers' MLPs; None: the target's, or four times the hidden size if the target has no single width.
    """
    text = model.config.get_text_config(decoder=True)
    vocab, hidden = model.get_output_embeddings().weight.shape
    rope = getattr(text, "rope_parameters", None)
    named: dict[str, Any] = {"rope_parameters": dict(rope)} if rope and "rope_theta" in rope else {}
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        value = config_value(text, name)
        if value is not None and not isinstance(value, tuple):  # a tuple has one value per layer
            named[name] = value
    # Llama's layer does not support partial rotary positions.
    if (rope or {}).get("partial_rotary_factor", 1.0) != 1.0:
        named.pop("rope_parameters", None)
    wide = config_value(text, "intermediate_size")
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate or (wide if isinstance(wide, int) else 4 * hidden),
        num_attention_heads=text.num_attention_heads,
        vocab_size=vocab,
        num_hidden_layers=layers,
        hidden_act="silu",
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=getattr(text, "eos_token_id", None),
        **named,
    )


def drafted_size(model: PreTrainedModel, named: int | None, owner: str) -> int:
    """The size ``D`` of the draft vocabulary: `named`, or the target's vocabulary size if `named` is None.

    Raises:
        SettingsError: `named` is below 1 or above the target's vocabulary size.
    """
    vocab = len(model.get_output_embeddings().weight)
    if named is not None and not 0 < named <= vocab:
        raise SettingsError(f"{owner}: the draft vocabulary must have 1 … {vocab} tokens, not {named}")
    return named or vocab


def draft_vocabulary(ids: Tensor, size: int, vocab: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` most frequent tokens of `ids`, ``[D]`` int64, ascending. The tokens `always` are included."""
    counts = torch.bincount(ids.flatten(), minlength=vocab)
    counts[[token for token in always if token < vocab]] = ids.numel() + 1
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
