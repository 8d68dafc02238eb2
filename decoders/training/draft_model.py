"""`train_draft` trains a small draft model on a target's texts and distributions, in one resumable run."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import config_value, decoder_layers
from ..enabling import disable, enable
from ..errors import SettingsError, TrainingError, amount
from .cards import card, table
from .feature_heads import Acceptance, AcceptanceSums, FeatureLearner, Teacher, train_network
from .recipes import DraftTraining
from .texts import PROMPT_SHARE, Job, Texts, evaluating
from .trainer import soft_cross_entropy

#: Of the ``speculative`` calls that are measured: draft tokens per step, number of prompts, and new tokens after each prompt.
LENGTH, PROMPTS, NEW_TOKENS = 5, 8, 64


def train_draft(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job, *, run: DraftTraining = DraftTraining()
) -> dict[str, Any]:
    """Trains a draft model for the frozen target `model`, and writes it with the tokenizer and a card.

    Args:
        run: shape of the draft model, and settings of the training.

    Returns:
        The figures: steps, tokens, seconds, parameters, acceptance of one draft token by kind of held-out text, and the results of
        :func:`measure` on beginnings of the test texts, or of held-out texts if there are no test texts.

    Raises:
        TrainingError: there is too little text, the checkpoint belongs to another run, or the target has no list of decoder layers.
        SettingsError: the target lacks a layer that is to be copied, or its class cannot have the size that `run` names.
    """
    draft = new_draft(model, run)  # wrong settings are reported before hours of work

    def make(train: Texts, judged: Texts) -> DraftLearner:
        return DraftLearner(run, draft, model, train, judged)

    def write(learner: FeatureLearner, figures: dict[str, Any], texts: Mapping[str, Texts]) -> str:
        _write(draft.to(job.dtype), tokenizer, job.out, job.dtype)  # type: ignore[arg-type]
        draft.float()
        figures["target_parameters"] = sum(p.numel() for p in model.parameters())
        figures |= measure(model, draft, tokenizer, texts.get("test", texts["held"]).ids)
        config, target = (part.config.get_text_config(decoder=True) for part in (draft, model))
        layers = f"layers {', '.join(map(str, run.layers_of(target.num_hidden_layers)))} of the target's, counted from 0, with its head"
        origin = layers if run.origin == "layers" else f"from scratch, hidden size {config.hidden_size}"
        about = (
            f"For a {type(model).__name__} of {figures['target_parameters']:,} parameters, {target.num_hidden_layers} layers and "
            f"hidden size {target.hidden_size}: {amount(config.num_hidden_layers, 'layer')}, {origin}. Same tokenizer. Pass it as "
            "`assistant_model=` to hf-decoders."
        )
        how = "Distillation: cross entropy against the target's distribution after every token."
        return card(
            "Draft model", "draft-model", about, how, run, figures, job.command, _measured(figures), "transformers"
        )

    return train_network(model, tokenizer, job, run, "draft", make, write)


def _measured(figures: Mapping[str, Any]) -> str:
    """The part of the card about the results of :func:`measure`."""
    rows = [
        [title, f"{figures[name]['tokens_per_step']:.2f}", *(f"{share:.1%}" for share in figures[name]["reached"])]
        for name, title in (("greedy", "greedy"), ("sampled", "sampled, temperature 1"))
    ]
    return f"""
## Acceptance
`speculative` with {LENGTH} drafted tokens a step, on {figures["prompts"]} beginnings of held-out text, {figures["new_tokens"]} tokens
each. Tokens per step include the target's own; plain decoding has 1.

{table(["tokens per step", *(f"token {k + 1} accepted" for k in range(LENGTH))], rows)}
"""


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


def new_draft(model: PreTrainedModel, training: DraftTraining) -> PreTrainedModel:
    """A new draft model for the target `model`, in float32, on the target's device.

    Raises:
        TrainingError: the target has no list of decoder layers.
        SettingsError: the target lacks a layer that is to be copied, or its class cannot have the size that `training` names.
    """
    count = len(decoder_layers(model))
    if not count:
        raise TrainingError(
            f"{type(model).__name__} has no list of decoder layers to make a draft model from: use a smaller model of the same family"
        )
    if training.origin == "layers":
        return cut(model, training.layers_of(count))
    return smaller(model, training.count_of(count), training.hidden, training.seed)


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A float32 copy of `model` with only the decoder layers `layers`, in this order.

    Raises:
        TrainingError: a parameter outside the layers holds values for every layer, so its shape differs; or transformers cannot build
            a model of these layers.
    """
    own = decoder_layers(model)
    name = next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and list(m) == own)
    config = copy.deepcopy(model.config)
    _set_layers(config, len(own), layers)
    try:
        draft = _build(model, config, seed=0)
    except ValueError as error:  # from transformers
        raise TrainingError(f"{type(model).__name__} cannot be built from these layers alone: {error}") from error
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
            f"{', '.join(whole)} of {type(model).__name__} hold values for every layer, so they cannot be cut: try origin='scratch'"
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
    if own:  # the settings of single layers, if the config has some
        text.per_layer_config = {place: own[layer] for place, layer in enumerate(layers) if layer in own} or None


def _build(model: PreTrainedModel, config: Any, seed: int) -> PreTrainedModel:
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = type(model)(config).float()
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft


class DraftLearner(FeatureLearner):
    """Trains a draft model. A draft has a single token, which depends on the text only."""

    model: PreTrainedModel

    def __init__(
        self, training: DraftTraining, draft: PreTrainedModel, target: PreTrainedModel, train: Texts, held_out: Texts
    ) -> None:
        outer = [
            cast(Tensor, m.weight)
            for m in (draft.get_input_embeddings(), draft.get_output_embeddings())
            if m is not None
        ]
        ids = torch.arange(len(target.get_output_embeddings().weight), device=target.device)
        super().__init__(
            training, training.rows, draft, Teacher(target, (), training.bf16), ids, train, held_out, outer
        )

    def learn(self, step: int) -> Tensor:
        texts, lesson = self.lesson(step)
        scores, counts = self._scores(texts), lesson.counted.float()
        loss, gradient = soft_cross_entropy(
            scores.detach().float(), lesson.logits.softmax(-1), counts / counts.sum().clamp(min=1)
        )
        scores.backward(gradient.to(scores.dtype))
        return loss

    def acceptance(self, texts: Texts) -> Acceptance:
        """The acceptance of drafts of one token at all positions of `texts` that count."""
        sums = AcceptanceSums(1)
        with evaluating(self.model):
            for part, lesson in self.lessons(texts):
                scores = self._scores(part).float()
                sums.begin(lesson.counted)
                sums.add(scores, scores.argmax(-1) == lesson.best, lesson.probabilities)
        return sums.acceptance

    def _scores(self, texts: Texts) -> Tensor:
        with self.teacher.precision():
            return self.model(input_ids=texts.ids.to(self.ids.device), use_cache=False).logits


def measure(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Tensor,
) -> dict[str, Any]:
    """Measures ``speculative``, greedy and at temperature 1.

    Args:
        rows: int64, one row of text tokens per prompt. The first quarter of each row is the prompt. A completion is at most as long
            as the rest of the row, because a longer one may exceed the model's context.

    Returns:
        figures: numbers of prompts and new tokens. For greedy and sampled text: tokens per step, the target's own token included,
            and for each draft token the share of steps that accept it.
    """
    enabled = "generate" in vars(model)
    enable(model, tokenizer)
    prompts = rows[:PROMPTS, : max(1, round(PROMPT_SHARE * rows.shape[1]))].to(model.device)
    new_tokens = min(NEW_TOKENS, rows.shape[1] - prompts.shape[1])
    figures: dict[str, Any] = {"prompts": len(prompts), "new_tokens": new_tokens}
    try:
        for name, options in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"do_sample": True, "temperature": 1.0, "top_k": 0}),
        ):
            out = cast(Any, model).generate(
                prompts, attention_mask=prompts.new_ones(prompts.shape), strategy="speculative", assistant_model=draft,
                strategy_config={"length": LENGTH}, max_new_tokens=new_tokens, seed=0,
                return_dict_in_generate=True, decoders_config={"compile": False}, **options,
            )  # fmt: skip
            accepted = Counter(dict(enumerate(out.report.accepted_lengths)))
            steps = max(1, sum(accepted.values()))
            figures[name] = {
                "tokens_per_step": out.report.mean_accepted_length,
                "reached": [sum(c for n, c in accepted.items() if n > k) / steps for k in range(LENGTH)],
            }
    finally:
        if not enabled:
            disable(model)
    return figures
