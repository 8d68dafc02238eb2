"""`train_draft` trains a small draft model on a target's texts and distributions, in one resumable run."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import config_value, decoder_layers, stop_tokens
from ..enabling import disable, enable
from ..errors import SettingsError, TrainingError
from .cards import draft_card
from .recipes import DraftTraining, Measurement
from .texts import PROMPT_SHARE, Job, Texts, TextStore, check_length, counted, held_out_rows, workplace
from .trainer import EpochLearner, Trainer, muon_and_adamw, soft_cross_entropy

#: Greatest number of held-out rows on which agreement is measured between steps.
WATCHED = 16


def train_draft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    job: Job,
    *,
    run: DraftTraining = DraftTraining(),
    measurement: Measurement = Measurement(),
) -> dict[str, Any]:
    """Trains a draft model for the frozen target `model`, and writes it with the tokenizer and a card.

    Args:
        run: shape of the draft model, and settings of the training.
        measurement: settings of the ``speculative`` calls that measure the trained model. Their prompts are beginnings of the test
            texts, or of held-out texts if there are no test texts.

    Returns:
        The figures: steps, tokens, seconds, parameters, agreement by kind of held-out text, and the results of :func:`measure`.

    Raises:
        TrainingError: there is too little text, the checkpoint belongs to another run, or the target has no list of decoder layers.
        SettingsError: the target lacks one of the layers, or its class cannot have the size that `run` names.
    """
    check_length(model, run.length)
    draft = new_draft(model, run)
    out, dtype, work = job.out, job.dtype, workplace(job.out, job.resume)
    store = TextStore(model, tokenizer, run, work, job.console)
    rows = max(run.rows, run.tokens // run.length)
    train, judged = store.learnt_and_held(job.texts, job.held, rows)
    learner = DraftLearner(run, draft, model, train, judged)
    trainer = Trainer(learner, learner.run({"text": train.digest(), "model": store.model_digest}))
    # The card also shows the agreement before training. The weights are the initial ones here, even in a resumed run, because
    # :meth:`Trainer.train` loads the checkpoint.
    before = agreement(learner, judged.part(0, learner.training.rows))
    checkpoint = work / "checkpoint.pt"
    trainer.train(
        "draft", checkpoint, resume=job.resume, checkpoint_minutes=job.checkpoint_minutes, console=job.console
    )
    _write(draft.to(dtype), tokenizer, out, dtype)  # type: ignore[arg-type]
    draft.float()  # the weights stay rounded to `dtype`, so the figures hold for the written weights
    prompted = store.texts(job.test, held_out_rows(rows)) if job.test else judged.ids
    figures: dict[str, Any] = {
        "run": asdict(run), "steps": trainer.step, "tokens": train.ids.numel(), "seconds": round(trainer.seconds, 1),
        "parameters": sum(p.numel() for p in draft.parameters()), "target_parameters": sum(p.numel() for p in model.parameters()),
        "agreement_before": before[0], "agreement": judged.by_kind(partial(_agreement, learner)),
        **measure(model, draft, tokenizer, prompted, measurement),
    }  # fmt: skip
    (out / "README.md").write_text(draft_card(draft, model, run, measurement, figures, job.command), encoding="utf-8")
    shutil.rmtree(work)
    return figures


def _write(draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, dtype: torch.dtype) -> None:
    """Writes all files that ``from_pretrained`` reads, at first to a temporary folder, so that nobody reads an incomplete model."""
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


def new_draft(model: PreTrainedModel, training: DraftTraining) -> PreTrainedModel:
    """A new draft model for the target `model`, in float32, on the target's device.

    Raises:
        TrainingError: the target has no list of decoder layers.
        SettingsError: the target lacks one of the layers, or its class cannot have the size that `training` names.
    """
    count = len(decoder_layers(model))
    if not count:
        raise TrainingError(
            f"{type(model).__name__} has no list of decoder layers, so no draft model can be made of it"
        )
    if training.origin == "layers":
        return cut(model, training.layers_of(count))
    return smaller(model, training.count_of(count), training.hidden, training.seed)


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A float32 copy of `model` with only the decoder layers `layers`, in this order.

    Raises:
        TrainingError: a parameter outside of the layers has a part for each layer, so it cannot be copied; or transformers
            builds no model of these layers.
    """
    own = decoder_layers(model)
    name = next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and list(m) == own)
    config = copy.deepcopy(model.config)
    _set_layers(config, len(own), layers)
    try:
        draft = _build(model, config, seed=0)
    except ValueError as error:  # from transformers
        raise TrainingError(f"no {type(model).__name__} can have these layers alone: {error}") from error
    state, source = {}, model.state_dict()
    for key in draft.state_dict():
        place = key.removeprefix(f"{name}.") if key.startswith(f"{name}.") else None
        if place is None:
            state[key] = source[key]
        else:
            number, rest = place.split(".", 1)
            state[key] = source[f"{name}.{layers[int(number)]}.{rest}"]
    whole = [key for key, value in draft.state_dict().items() if value.shape != state[key].shape]
    if whole:
        raise TrainingError(
            f"{', '.join(whole)} of {type(model).__name__} have a part for each layer, so no draft model can be cut out of it"
        )
    draft.load_state_dict(state)
    return draft.to(model.device)  # type: ignore[arg-type]


#: Config fields that shrink in proportion to the hidden size. The fields in `_SCALED` must have one value for all layers.
_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim")
_SCALED = ("head_dim", "num_key_value_heads", *_WIDTHS)


def smaller(model: PreTrainedModel, count: int, hidden: int | None, seed: int) -> PreTrainedModel:
    """A new model of the same class as `model`, with `count` layers and random weights.

    Attention heads keep their size. The number of query heads per key head also stays, if possible.

    Args:
        hidden: the new model's hidden size; None: about a quarter of the hidden size of `model`.

    Raises:
        SettingsError: `hidden` is too large or no multiple of the head size, or the target's layers differ in a field of `_SCALED`.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    differ = [name for name in _SCALED if isinstance(config_value(text, name), tuple)]
    if differ:
        raise SettingsError(
            f"the layers of {type(text).__name__} differ in {', '.join(differ)}, so no smaller model has their shape. Make the draft "
            "model from some of the target's layers, with origin='layers'"
        )
    width, heads = text.hidden_size, text.num_attention_heads
    head = getattr(text, "head_dim", None) or width // heads
    own = max(1, round(heads / 4)) if hidden is None else hidden * heads // width
    size = own * width // heads if hidden is None else hidden
    if own < 1 or size * heads != own * width or size > width:
        raise SettingsError(
            f"hidden must be a multiple of {width // heads}, the width of each of the target's heads, and at most {width}, not {hidden}"
        )
    groups = getattr(text, "num_key_value_heads", None)
    text.num_attention_heads = own
    if groups is not None:
        text.num_key_value_heads = max(1, own * groups // heads) if own % max(1, own * groups // heads) == 0 else own
    if getattr(text, "head_dim", None) is not None:
        text.head_dim = head
    for name in _WIDTHS:
        if isinstance(getattr(text, name, None), int) and name not in getattr(type(text), "attribute_map", {}):
            setattr(text, name, max(1, getattr(text, name) * size // width))
    text.hidden_size = size
    _set_layers(config, len(decoder_layers(model)), range(count))
    return _build(model, config, seed).to(model.device)  # type: ignore[arg-type]


def _set_layers(config: Any, count: int, layers: Sequence[int]) -> None:
    """Reduces a config of `count` layers to the layers with the indices `layers`, including lists that have one entry per layer."""
    text = config.get_text_config(decoder=True)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    own = {int(layer): values for layer, values in text.to_dict().get("per_layer_config", {}).items()}
    if own:  # some configs store further differences between layers here
        text.per_layer_config = {place: own[layer] for place, layer in enumerate(layers) if layer in own} or None


def _build(model: PreTrainedModel, config: Any, seed: int) -> PreTrainedModel:
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = type(model)(config).float()
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft


class DraftLearner(EpochLearner):
    """A draft model and its optimizers.

    Args:
        target: the frozen target, whose logits are computed in every step.
        train: training text.
        held_out: held-out text. Scores are computed on at most :data:`WATCHED` of its rows, preferably rows that the target wrote.
    """

    model: PreTrainedModel

    def __init__(
        self, training: DraftTraining, draft: PreTrainedModel, target: PreTrainedModel, train: Texts, held_out: Texts
    ) -> None:
        super().__init__(training, len(train.ids), training.rows)
        self.training, self.model, self.target, self.train = training, draft, target, train
        self.stops, self.positions = stop_tokens(target), training.rows * training.length
        self._watched = held_out.part(0, WATCHED)
        outer = (draft.get_input_embeddings(), draft.get_output_embeddings())
        self.optimizers = muon_and_adamw(draft, training.rate, [cast(Tensor, m.weight) for m in outer if m is not None])

    def learn(self, step: int) -> Tensor:
        texts = self.train.chosen(self.examples_of(step))
        target, counts = self._taught(texts)
        scores = self._scores(self.model, texts)
        loss, gradient = soft_cross_entropy(
            scores.detach().float(), target.softmax(-1), counts / counts.sum().clamp(min=1)
        )
        scores.backward(gradient.to(scores.dtype))
        return loss

    def scores(self) -> list[float]:
        """The share of positions at which draft model and target choose the same token, and the overlap of their distributions."""
        return list(agreement(self, self._watched))

    def in_words(self, scores: Sequence[float]) -> str:
        same, overlap = scores
        return f"same token {same:.1%}, overlap {overlap:.1%}"

    def _taught(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """The target's logits ``[B, T, V]`` float32, and the weight ``[B, T]`` float32 of each position: 1 if it counts, else 0."""
        with torch.no_grad():
            logits = self._scores(self.target, texts).float()
        return logits, counted(texts, self.stops).to(logits.device).float()

    def _scores(self, model: PreTrainedModel, texts: Texts) -> Tensor:
        device = self.target.device
        with torch.autocast(device.type, torch.bfloat16) if self.training.bf16 else nullcontext():
            return model(input_ids=texts.ids.to(device), use_cache=False).logits


@torch.no_grad()
def agreement(learner: DraftLearner, texts: Texts) -> tuple[float, float]:
    """Compares draft model and target at the positions that count.

    Returns:
        the share of positions at which both choose the same token greedily, and the mean overlap of their distributions
        (1 - total variation).
    """
    training, sums, count = learner.model.training, torch.zeros(2, dtype=torch.float64), 0.0
    learner.model.eval()
    for first in range(0, len(texts.ids), learner.training.rows):
        part = texts.part(first, first + learner.training.rows)
        target, counts = learner._taught(part)
        scores = learner._scores(learner.model, part).float()
        same = (target.argmax(-1) == scores.argmax(-1)) * counts
        overlap = torch.minimum(target.softmax(-1), scores.softmax(-1)).sum(-1) * counts
        sums += torch.stack([same.sum(), overlap.sum()]).cpu().double()
        count += counts.sum().item()
    learner.model.train(training)
    same, overlap = (sums / max(count, 1)).tolist()
    return same, overlap


def measure(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Tensor,
    measurement: Measurement,
) -> dict[str, Any]:
    """Measures ``speculative``, greedy and at temperature 1.

    Args:
        rows: int64, one row of text tokens per prompt. The first quarter of each row is the prompt. A completion is at most as long
            as the rest of the row, because a longer one may exceed the model's context.

    Returns:
        figures: the numbers of prompts and of new tokens; of both texts the tokens per step, the target's own token included, and for
            each draft token the share of steps that accept it.
    """
    enabled = "generate" in vars(model)
    enable(model, tokenizer)
    prompts = rows[: measurement.prompts, : max(1, round(PROMPT_SHARE * rows.shape[1]))].to(model.device)
    new_tokens = min(measurement.new_tokens, rows.shape[1] - prompts.shape[1])
    figures: dict[str, Any] = {"prompts": len(prompts), "new_tokens": new_tokens}
    try:
        for name, options in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"do_sample": True, "temperature": 1.0, "top_k": 0}),
        ):
            out = cast(Any, model).generate(
                prompts, attention_mask=prompts.new_ones(prompts.shape), strategy="speculative", assistant_model=draft,
                strategy_config={"length": measurement.length}, max_new_tokens=new_tokens, seed=measurement.seed,
                return_dict_in_generate=True, decoders_config={"compile": False}, **options,
            )  # fmt: skip
            accepted = Counter(dict(enumerate(out.report.accepted_lengths)))
            steps = max(1, sum(accepted.values()))
            figures[name] = {
                "tokens_per_step": out.report.mean_accepted_length,
                "reached": [sum(c for n, c in accepted.items() if n > k) / steps for k in range(measurement.length)],
            }
    finally:
        if not enabled:
            disable(model)
    return figures
