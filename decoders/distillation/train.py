"""`train_draft`: a draft model for a target from text, in one resumable run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training import Trainer
from ..training.progress import log_scores
from ..training.texts import Texts, TextStore, held_out_rows, workplace
from . import card
from .acceptance import Measurement, measure
from .learner import DraftLearner, agreement
from .recipe import DraftTraining
from .shapes import new_draft

if TYPE_CHECKING:
    from rich.console import Console


def train_draft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: Path,
    *,
    run: DraftTraining = DraftTraining(),
    held: Sequence[str] = (),
    test: Sequence[str] = (),
    measurement: Measurement = Measurement(),
    dtype: torch.dtype = torch.bfloat16,
    command: str | None = None,
    resume: bool = True,
    checkpoint_minutes: float = 1.0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains a draft model for `model`, which stays as it is, and writes it to `out` with the tokenizer and a card.

    Checkpoints, and the text that the target writes itself, lie in ``out/training`` until the run is complete. With `resume`, an
    interrupted run goes on there and ends where it would have ended.

    Args:
        texts: to learn from.
        run: what the draft model is, and settings of the training.
        held: judged by, for early stop; best is text that the target itself never learnt from. Without it a twentieth of `texts`
            is held out.
        test: where ``speculative`` is run at the end, for the card; without it `held` is.
        measurement: how it is run.
        dtype: of the weights that are written.
        command: that started this, for the card.
        resume: go on from what lies in ``out/training``.
        checkpoint_minutes: between checkpoints.
        console: where progress is shown.

    Returns:
        The figures: steps, tokens, seconds, parameters, agreement by kind of held-out text, and tokens per step of ``speculative``.

    Raises:
        TrainingError: too little text, a checkpoint of another run, or a target whose layers cannot be told.
        SettingsError: layers that the target does not have, or no such size.
    """
    draft = new_draft(model, run)
    work = workplace(out, resume)
    store = TextStore(model, tokenizer, run.length, run.own_share, run.seed, work, console)
    rows = max(run.rows, run.tokens // run.length)
    train, judged = store.learnt_and_held(texts, held, rows)
    learner = DraftLearner(run, draft, model, train, judged)
    trainer = Trainer(learner, learner.run({"text": train.digest(), "model": store.model_digest}))
    # Before training, so that the card can say what it has brought. Not of a run that goes on: the weights are those of its start.
    before = agreement(learner, judged.part(0, learner.training.rows))
    trainer.train(
        "draft", work / "checkpoint.pt", resume=resume, checkpoint_minutes=checkpoint_minutes, console=console,
        on_step=partial(log_scores, console, _in_words),
    )  # fmt: skip
    _write(draft.to(dtype), tokenizer, out, dtype)  # type: ignore[arg-type]
    draft.float()  # figures are of the weights as written
    prompted = store.texts(test, held_out_rows(rows)) if test else judged.ids
    figures: dict[str, Any] = {
        "run": asdict(run), "steps": trainer.step, "tokens": train.ids.numel(), "seconds": round(trainer.seconds, 1),
        "parameters": sum(p.numel() for p in draft.parameters()), "target_parameters": sum(p.numel() for p in model.parameters()),
        "agreement_before": before[0], "agreement": judged.by_kind(partial(_agreement, learner)),
        **measure(model, draft, tokenizer, prompted, measurement),
    }  # fmt: skip
    (out / "README.md").write_text(card.text(draft, model, run, measurement, figures, command), encoding="utf-8")
    shutil.rmtree(work)
    return figures


def _write(draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, dtype: torch.dtype) -> None:
    """Everything ``from_pretrained`` reads; aside first, so that a reader never sees half a model."""
    partial_folder = out / ".partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    draft.config.dtype = dtype
    draft.save_pretrained(partial_folder)
    tokenizer.save_pretrained(partial_folder)
    for file in sorted(partial_folder.iterdir(), key=lambda f: f.name == "config.json"):
        file.chmod(0o644)
        file.replace(out / file.name)
    partial_folder.rmdir()


def _agreement(learner: DraftLearner, texts: Texts) -> dict[str, float]:
    same, overlap = agreement(learner, texts)
    return {"same": same, "overlap": overlap}


def _in_words(scores: Sequence[float]) -> str:
    same, overlap = scores
    return f"same token {same:.1%}, overlap {overlap:.1%}"
