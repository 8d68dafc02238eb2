"""`train_medusa` trains heads for a frozen target (Medusa-1), and searches the best draft tree for them, in one resumable run.

The heads learn to predict tokens after the next token from the target's hidden states. These are computed once and stored on disk.
The text comes from files. The target continues a share of the rows (section 2.3.2 of the paper), because in decoding the heads read
text that the target wrote.

Letters: ``W`` rows, ``T`` tokens of a row, ``P`` = ``W·T`` positions, ``Q`` positions with a known label, ``K`` heads.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import stop_tokens
from ..errors import TrainingError, amount
from ..heads.medusa import DEFAULT_TREE, HeadsConfig, MedusaHeads, accepted_length, check_fit, save_heads, search_tree
from .cards import medusa_card
from .progress import progress_bar
from .recipes import HeadsTraining
from .texts import Progress, Texts, TextStore, check_length, evaluating, held_out_rows, hold_out, workplace
from .trainer import EpochLearner, Trainer, warmup_cosine

if TYPE_CHECKING:
    from rich.console import Console

#: Label where the right token is not known, for instance after the end of a row.
UNKNOWN = -100
#: Number of rows per pass of the target.
ROWS = 32
WARMUP_SHARE = 0.05
#: Greatest number of held-out positions on which accuracy is measured between steps.
WATCHED = 8192
#: Number of positions per pass of an evaluation.
CHUNK = 1024


def train_medusa(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], out: Path, *,
    run: HeadsTraining = HeadsTraining(), held: Sequence[str] = (), test: Sequence[str] = (), tree: bool = True,
    nodes: int = len(DEFAULT_TREE), given: MedusaHeads | None = None, dtype: torch.dtype = torch.float16,
    resume: bool = True, checkpoint_minutes: float = 1.0, console: Console | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Trains heads for the frozen target `model`, searches the best draft tree for them, and writes both to `out` with a card.

    Until the run is complete, ``out/training`` holds hidden states and checkpoints. With `resume` an interrupted run continues from
    these files, and its final weights equal those of a run without interruption.

    Args:
        texts: training texts.
        run: settings of the heads and of their training.
        held: held-out texts for early stopping and the tree, preferably texts that are new to the target. Empty: a twentieth of
            `texts`.
        test: texts on which the heads are measured at the end, for the card. Empty: only the held-out texts are measured.
        tree: whether to search a tree on the held-out text. Otherwise the heads are written with their present tree.
        nodes: number of nodes in the searched tree.
        given: trained heads. Only their tree is searched and their figures are measured. None: new heads are trained.
        dtype: dtype of the written weights.
        resume: whether to continue from the checkpoint in ``out/training``.
        checkpoint_minutes: minutes between checkpoints.
        console: where progress is shown; None: nowhere.

    Returns:
        The figures: the heads' accuracies (top 1 and top 5) on text of files and on text that the target wrote, mean tokens per step
        with the trees, and seconds of training. The seconds do not include the preparation of text and hidden states.

    Raises:
        TrainingError: there is too little text, or the checkpoint belongs to another run.
        SettingsError: the sizes of `given` differ from the target's.
    """
    vocab, hidden = model.get_output_embeddings().weight.shape
    config_of(run, hidden, vocab)  # wrong settings are reported before hours of work
    check_length(model, run.length)
    work = workplace(out, resume)
    weight = model.get_output_embeddings().weight.detach()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    head = Head(weight.float(), bias.detach().float() if bias is not None else None)
    if given is not None:
        check_fit(given, model, "the folder given")
        run = replace(run, heads=given.config.heads)
    train_texts, held_texts = (list(texts), list(held)) if held else hold_out(texts, run.seed)
    rows = max(1, run.tokens // run.length)
    held_rows = held_out_rows(rows)
    texts_and_rows = {"held": (held_texts, held_rows)} | ({"test": (list(test), held_rows)} if test else {})
    if given is None:
        texts_and_rows["train"] = (train_texts, rows)
    store = TextStore(model, tokenizer, run, work, console)
    sets = {name: _TextSet(store, name, set_texts, count, run) for name, (set_texts, count) in texts_and_rows.items()}
    if given is None:
        learner = HeadsLearner(run, head, sets["train"].examples(), sets["held"].examples())
        trainer = Trainer(learner, learner.run({"text": sets["train"].texts.digest(), "model": store.model_digest}))
        checkpoint = work / "checkpoint.pt"
        trainer.train("heads", checkpoint, resume=resume, checkpoint_minutes=checkpoint_minutes, console=console)
        heads, steps, seconds = learner.model, trainer.step, trainer.seconds
    else:
        heads, steps, seconds = copy.deepcopy(given), 0, 0.0  # loaded heads are cached and shared, so they are copied
    # Figures are measured with the rounded weights that are written.
    heads = heads.to(dtype).float().eval()
    measured = {name: sets[name].measure(heads, head) for name in texts_and_rows if name != "train"}
    figures: dict[str, Any] = {
        "steps": steps,
        "tokens": sets["train"].texts.ids.numel() if given is None else 0,
        "seconds": round(seconds, 1),
        **{name: {kind: facts for kind, (facts, _) in parts.items()} for name, parts in measured.items()},
    }
    ranks = measured["held"]["own" if "own" in measured["held"] else "text"][1]
    paths = None
    if tree:
        paths = search_tree(ranks, nodes)
        default = DEFAULT_TREE[: len(paths)]
        figures["trees"] = {
            "nodes": len(paths), "searched": accepted_length(ranks, paths), "default": accepted_length(ranks, default)
        }  # fmt: skip
    config = replace(heads.config, figures={"run": asdict(run), **figures}, tree=paths or heads.config.tree)
    heads.config = config
    save_heads(heads, out, dtype)
    card = medusa_card(config, model, run if given is None else None)
    (out / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(work)
    return figures


class _TextSet:
    """Text for training or for measuring, with the target's hidden states. Both are in files of `store` that are named after `name`."""

    def __init__(self, store: TextStore, name: str, texts: Sequence[str], rows: int, training: HeadsTraining) -> None:
        self.texts = store.rows(name, texts, rows)
        ids = self.texts.ids
        if len(ids) < 2 and name == "held":
            raise TrainingError(
                f"held out: {amount(len(ids), 'row')} of {training.length} tokens, too few to measure accuracy: "
                "give more text, or shorter rows"
            )
        dtype = torch.bfloat16 if training.bf16 else torch.float32
        states = HiddenStates(store, name, self.texts, dtype)
        with progress_bar(store.console, f"{name}: hidden states", len(ids), states.done) as advance:
            states.fill(advance)
        self.hidden, self.labels = states.values, labels_of(self.texts, training.heads, stop_tokens(store.model))

    def examples(self, rows: Tensor | None = None) -> Examples:
        """The examples at all positions, or at the positions of some rows. rows: ``[W]`` bool."""
        if rows is None:
            return Examples.of(self.hidden, self.labels)
        return Examples.of(self.hidden[rows], self.labels[rows])

    def measure(self, heads: MedusaHeads, head: Head) -> dict[str, tuple[dict[str, Any], Tensor]]:
        """Measures each kind of text (:meth:`.Texts.kinds`).

        Returns:
            by kind, the accuracies, and the ranks (:func:`ranks_of`) at positions where the labels of all heads are known.
        """
        measured = {}
        for kind, rows in self.texts.kinds().items():
            ranks = ranks_of(heads, head, self.examples(rows))
            facts = {"positions": len(ranks), "top1": accuracies(ranks), "top5": accuracies(ranks, 5)}
            measured[kind] = facts, ranks[(ranks >= 0).all(1)]
        return measured


def labels_of(texts: Texts, heads: int, stops: Sequence[int]) -> Tensor:
    """The token that head k should predict at each position, ``[W, T, K]`` int64: the token k + 2 positions later.

    The output head predicts the next token, so head 0 predicts the token after it. Tokens after the end of the row are unknown.
    Tokens that the target wrote after an end of sequence also count as unknown, because decoding stops there.
    """
    ids, (w, t) = texts.ids, texts.ids.shape
    labels = torch.full((w, t, heads), UNKNOWN)
    positions = torch.arange(t)
    is_stop = (torch.isin(ids, torch.tensor(list(stops) or [-1])) & (positions >= texts.own[:, None])).long()
    after_stop = is_stop.cumsum(1) - is_stop > 0
    known = torch.where(after_stop, UNKNOWN, ids)
    for k in range(heads):
        ahead = k + 2
        labels[:, : t - ahead, k] = known[:, ahead:]
    # In a row that the target continued, positions in the prompt are left out, except its last token.
    in_prompt = (texts.own < t)[:, None] & (positions < texts.own[:, None] - 1)
    labels[in_prompt] = UNKNOWN
    return labels


class HiddenStates:
    """The inputs of the output head, ``[W, T, H]``, in a file that is mapped into memory. They are computed in batches of rows.

    Interrupted work continues with the next batch. The file holds ``W·T·H`` numbers of `dtype`.
    """

    def __init__(self, store: TextStore, name: str, texts: Texts, dtype: torch.dtype) -> None:
        self.texts, self.file, self.model = texts, store.folder / f"{name}.states", store.model
        hidden = self.model.get_output_embeddings().weight.shape[1]
        self._note = self.file.with_suffix(".done")
        w, t = texts.ids.shape
        self._identity = {"texts": texts.digest(), "model": store.model_digest, "dtype": str(dtype)}
        self._shape, self._dtype = (w, t, hidden), dtype
        self.done = self._done()
        if self.done == 0:
            self.file.unlink(missing_ok=True)

    @property
    def values(self) -> Tensor:
        """The hidden states, mapped into memory. They are complete after :meth:`fill`."""
        return torch.from_file(str(self.file), size=math.prod(self._shape), dtype=self._dtype).view(self._shape)

    def _done(self) -> int:
        try:
            note = dict(json.loads(self._note.read_text()))
            size = self.file.stat().st_size
        except (OSError, ValueError):
            return 0
        done = int(note.pop("done", 0))
        whole = size >= done * math.prod(self._shape[1:]) * self._dtype.itemsize
        return done if whole and note == self._identity else 0

    def fill(self, progress: Progress = lambda rows: None) -> None:
        """Runs the target over the rows without hidden states. Calls `progress` with the number of rows of each batch."""
        model, seen = self.model, list[Tensor]()
        # The hook records the input of the output head, because models differ in how they name and norm their hidden states.
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        # The file is written, not mapped: a full disk would kill the process that writes to a mapped file.
        with hook, evaluating(model), self.file.open("r+b" if self.done else "wb") as file:
            while self.done < len(self.texts.ids):
                rows = slice(self.done, min(self.done + ROWS, len(self.texts.ids)))
                model(input_ids=self.texts.ids[rows].to(model.device), use_cache=False)
                states = seen.pop().to("cpu", self._dtype).contiguous()
                file.seek(rows.start * states[0].nbytes)
                file.write(states.view(torch.uint8).numpy().tobytes())
                file.flush()
                self.done = rows.stop
                self._note.write_text(json.dumps(self._identity | {"done": self.done}))
                progress(rows.stop - rows.start)


@dataclass(frozen=True)
class Examples:
    """Training examples: positions with hidden states and labels.

    Attributes:
        hidden: ``[P, H]``, the hidden states, in a mapped file.
        labels: ``[P, K]``, the right token of each head.
        known: ``[Q]``, the indices of positions that have at least one known label.
    """

    hidden: Tensor
    labels: Tensor
    known: Tensor

    @staticmethod
    def of(hidden: Tensor, labels: Tensor) -> Examples:
        """The examples at all positions of some rows. hidden: ``[W, T, H]``, labels: ``[W, T, K]``."""
        labels = labels.flatten(0, 1)
        return Examples(hidden.flatten(0, 1), labels, (labels != UNKNOWN).any(-1).nonzero()[:, 0])


@dataclass(frozen=True)
class Head:
    """The target's output head. All Medusa heads share it.

    Attributes:
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
    """

    weight: Tensor
    bias: Tensor | None


def config_of(training: HeadsTraining, hidden_size: int, vocab_size: int) -> HeadsConfig:
    """The shape of the heads for a target with this hidden size and vocabulary size."""
    return HeadsConfig(
        heads=training.heads, layers=training.layers, projection=training.projection, rank=training.rank,
        hidden_size=hidden_size, vocab_size=vocab_size,
    )  # fmt: skip


class HeadsLearner(EpochLearner):
    """Medusa heads and their optimizer.

    Args:
        head: the target's output head.
        train: training positions.
        held_out: held-out positions. Scores are computed on at most :data:`WATCHED` of them.
    """

    model: MedusaHeads
    schedule = staticmethod(partial(warmup_cosine, warmup_share=WARMUP_SHARE))
    clip = None

    def __init__(self, training: HeadsTraining, head: Head, train: Examples, held_out: Examples) -> None:
        super().__init__(training, len(train.known), training.batch)
        self.training, self.head, self.train = training, head, train
        vocab, hidden = head.weight.shape
        self.model = MedusaHeads(config_of(training, hidden, vocab), head.weight).to(head.weight.device)
        self.optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=training.rate, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        self.positions = training.batch
        watched = _some(held_out.known, WATCHED, training.seed)
        self._held_out = Examples(held_out.hidden, held_out.labels, watched)

    def learn(self, step: int) -> Tensor:
        """Learns one head at a time, because the logits of all heads together are large. See :meth:`Learner.learn`."""
        positions = self.train.known[self.examples_of(step)]
        device = self.head.weight.device
        hidden = self.train.hidden[positions].to(device).float()
        labels = self.train.labels[positions].to(device)
        total = torch.zeros((), device=device)
        for k in range(self.training.heads):
            right = labels[:, k]
            with torch.autocast(device.type, torch.bfloat16) if self.training.bf16 else nullcontext():
                scores = self.model.of_head(k, hidden, self.head.weight, self.head.bias)
            loss = torch.nn.functional.cross_entropy(scores.float(), right, ignore_index=UNKNOWN, reduction="sum")
            loss = self.training.decay**k * loss / (right != UNKNOWN).sum().clamp(min=1)
            loss.backward()
            total += loss.detach()
        return total

    def scores(self) -> list[float]:
        return accuracies(ranks_of(self.model, self.head, self._held_out))

    def in_words(self, scores: Sequence[float]) -> str:
        return "held-out accuracy of the heads " + super().in_words(scores)


@torch.no_grad()
def ranks_of(heads: MedusaHeads, head: Head, examples: Examples) -> Tensor:
    """The rank of the right token among each head's tokens, ``[Q, K]`` int64. 0: the best; -1: the right token is not known."""
    chunks = []
    for positions in examples.known.split(CHUNK):
        hidden, labels = examples.hidden[positions].to(head.weight.device), examples.labels[positions]
        labels = labels.to(hidden.device)
        ranks = []
        for k in range(heads.config.heads):
            scores = heads.of_head(k, hidden, head.weight, head.bias).float()
            right = scores.gather(1, labels[:, k : k + 1].clamp(min=0))
            # Negated, so that no score counts as right if scores are not numbers.
            ranks.append(torch.where(labels[:, k] == UNKNOWN, -1, (~(scores <= right)).sum(-1)))
        chunks.append(torch.stack(ranks, 1).cpu())
    return torch.cat(chunks) if chunks else torch.empty(0, heads.config.heads, dtype=torch.int64)


def accuracies(ranks: Tensor, among: int = 1) -> list[float]:
    """How often the right token is among each head's `among` best tokens. ranks: from :func:`ranks_of`; unknown ranks are ignored."""
    known = (ranks >= 0).sum(0).clamp(min=1)
    return (((ranks >= 0) & (ranks < among)).sum(0) / known).tolist()


def _some(positions: Tensor, count: int, seed: int) -> Tensor:
    """At most `count` of `positions`, drawn without replacement."""
    generator = torch.Generator().manual_seed(seed)
    return positions[torch.randperm(len(positions), generator=generator)[:count].sort().values]
