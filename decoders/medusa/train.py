"""`train_medusa`: heads for a model from text, with the tree that suits them, in one resumable run."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training import Trainer, TrainingError
from ..training.progress import log_scores, progress_bar
from ..training.texts import TextStore, digest, held_out_rows, hold_out, stop_tokens, workplace
from . import card
from .config import HeadsTraining
from .files import check_fit, save_heads
from .heads import MedusaHeads
from .hidden_states import HiddenStates, labels_of
from .learner import Examples, Head, HeadsLearner, accuracies, ranks_of
from .trees import DEFAULT_TREE, accepted_length, search_tree

if TYPE_CHECKING:
    from rich.console import Console


def train_medusa(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: Path,
    *,
    run: HeadsTraining = HeadsTraining(),
    held: Sequence[str] = (),
    test: Sequence[str] = (),
    tree: bool = True,
    nodes: int = len(DEFAULT_TREE),
    given: MedusaHeads | None = None,
    dtype: torch.dtype = torch.float16,
    resume: bool = True,
    checkpoint_minutes: float = 1.0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains heads with the model frozen, searches their tree, and writes both to `out` with a card.

    Hidden states and checkpoints lie in ``out/training`` until the run is complete. With `resume`, an interrupted run goes on
    there and ends where it would have ended.

    Args:
        texts: to learn from.
        run: settings of the heads and of their training.
        held: judged by, for early stop and the tree; best is text that the model itself never learnt from. Without it a
            twentieth of `texts` is held out.
        test: measured on at the end, for the card.
        tree: search a tree of `nodes` nodes on the held-out text; otherwise the default tree is used.
        given: heads that are not trained any more: only the tree is searched and the figures are taken.
        nodes: see `tree`.
        dtype: of the weights that are written.
        resume: go on from what lies in ``out/training``.
        checkpoint_minutes: between checkpoints.
        console: where progress is shown.

    Returns:
        The figures: head accuracies (top 1 and top 5) on the files' text and on the model's own, mean accepted lengths of
        the trees, seconds of training (the text and its hidden states come before).

    Raises:
        TrainingError: too little text, or a checkpoint of another run.
        SettingsError: `given` is for another model.
    """
    vocab, hidden = model.get_output_embeddings().weight.shape
    run.config(hidden, vocab)  # wrong settings are reported before hours of work
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
    sets = {
        name: _TextSet(model, tokenizer, set_texts, count, run, work / name, console, name)
        for name, (set_texts, count) in texts_and_rows.items()
    }
    if given is None:
        learner = HeadsLearner(run, head, sets["train"].examples(), sets["held"].examples())
        trainer = Trainer(learner, learner.run({"text": sets["train"].texts.digest(), "model": digest(model)}))
        trainer.train(
            "heads", work / "checkpoint.pt", resume=resume, checkpoint_minutes=checkpoint_minutes, console=console,
            on_step=partial(log_scores, console, _in_words),
        )  # fmt: skip
        heads, steps, seconds = learner.model, trainer.step, trainer.seconds
    else:
        heads, steps, seconds = copy.deepcopy(given), 0, 0.0  # loaded heads are shared
    # Figures are of the weights as written.
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
    (out / "README.md").write_text(card.text(config, model, run if given is None else None), encoding="utf-8")
    shutil.rmtree(work)
    return figures


class _TextSet:
    """Text of one purpose with its hidden states, in files that start with `file`."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], rows: int, training: HeadsTraining,
        file: Path, console: Console | None, name: str,
    ) -> None:  # fmt: skip
        store = TextStore(model, tokenizer, training.length, training.own_share, training.seed, file.parent, console)
        self.texts = store.rows(name, texts, rows)
        ids = self.texts.ids
        if len(ids) < 2 and name == "held":
            raise TrainingError(
                f"{len(ids)} rows of {training.length} tokens are held out, too few to judge by: give more text, or shorter rows"
            )
        dtype = torch.bfloat16 if training.bf16 else torch.float32
        states = HiddenStates(file.with_suffix(".states"), self.texts, model, dtype)
        with progress_bar(console, f"{name}: hidden states", len(ids), states.done) as advance:
            states.fill(advance)
        self.hidden, self.labels = states.values, labels_of(self.texts, training.heads, stop_tokens(model))

    def examples(self, rows: Tensor | None = None) -> Examples:
        """All positions, or those of some rows (``[W]`` bool)."""
        if rows is None:
            return Examples.of(self.hidden, self.labels)
        return Examples.of(self.hidden[rows], self.labels[rows])

    def measure(self, heads: MedusaHeads, head: Head) -> dict[str, tuple[dict[str, Any], Tensor]]:
        """For the files' text and the model's own: accuracies, and the ranks where all heads' tokens are known."""
        measured = {}
        for kind, rows in self.texts.kinds().items():
            ranks = ranks_of(heads, head, self.examples(rows))
            facts = {"positions": len(ranks), "top1": accuracies(ranks), "top5": accuracies(ranks, 5)}
            measured[kind] = facts, ranks[(ranks >= 0).all(1)]
        return measured


def _in_words(scores: Sequence[float]) -> str:
    return "held-out accuracy of the heads " + ", ".join(f"{share:.1%}" for share in scores)
