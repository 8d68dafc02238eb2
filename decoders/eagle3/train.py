"""`train_eagle3`: a head for a model from text, in one resumable run."""

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
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.layers import decoder_layers
from ..errors import SettingsError
from ..training import Trainer, TrainingError
from ..training.progress import log_scores
from ..training.texts import TextStore, digest, held_out_rows, stop_tokens, workplace
from . import card
from .files import Eagle3Files, load_head
from .head import Eagle3Config, Eagle3Head
from .learner import HeadLearner, acceptance
from .lessons import Teacher
from .recipe import HeadTraining
from .writing import Format, save_head

if TYPE_CHECKING:
    from rich.console import Console


def train_eagle3(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: Path,
    *,
    run: HeadTraining = HeadTraining(),
    held: Sequence[str] = (),
    test: Sequence[str] = (),
    start: Path | None = None,
    form: Format = "speculators",
    dtype: torch.dtype = torch.bfloat16,
    command: str | None = None,
    resume: bool = True,
    checkpoint_minutes: float = 1.0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains an EAGLE-3 head with the model frozen, and writes it to `out` with a card.

    Checkpoints, and the text that the model writes itself, lie in ``out/training`` until the run is complete. With `resume`, an
    interrupted run goes on there and ends where it would have ended.

    Args:
        texts: to learn from.
        run: settings of the training.
        held: judged by, for early stop; best is text that the model itself never learnt from. Without it a twentieth of `texts`
            is held out.
        test: measured on at the end, for the card.
        start: folder of a head to begin with, in either format; its draft vocabulary is kept. None: a new one.
        form: in which format it is written.
        dtype: of the weights that are written.
        command: that started this, for the card.
        resume: go on from what lies in ``out/training``.
        checkpoint_minutes: between checkpoints.
        console: where progress is shown.

    Returns:
        The figures: steps, tokens, seconds, and by held-out set and kind of text what :meth:`Acceptance.facts` says.

    Raises:
        TrainingError: too little text, a checkpoint of another run, or a model whose layers cannot be told.
        SettingsError: layers that the model does not have, a draft vocabulary larger than the model's, or a head to begin with that
            is of another shape.
    """
    count = len(decoder_layers(model))
    if not count:
        raise TrainingError(f"eagle3 reads hidden layers, and {type(model).__name__} has no list of decoder layers")
    config = head_config(model, run, run.layers_of(count))  # wrong settings are reported before hours of work
    given = load_head(start, model.device, torch.float32) if start is not None else None
    work = workplace(out, resume)
    store = TextStore(model, tokenizer, run.length, run.own_share, run.seed, work, console)
    rows = max(run.rows, run.tokens // run.length)
    tested = {"test": store.rows("test", test, held_out_rows(rows))} if test else {}
    train, judged = store.learnt_and_held(texts, held, rows)
    sets = {"held": judged} | tested
    ids = draft_vocabulary(train.ids, config.draft_vocab_size, config.layer.vocab_size, stop_tokens(model))
    if given is not None:
        head, ids = begin_with(given, config, ids)
    else:
        head = new_head(config, model, ids, run.seed)
    learner = HeadLearner(run, head, Teacher(model, config.layers or (), run.bf16), ids.to(model.device), train, judged)
    identity = {"text": train.digest(), "model": store.model_digest} | (
        {"start": digest(head)} if given is not None else {}
    )
    trainer = Trainer(learner, learner.run(identity))
    trainer.train(
        "head", work / "checkpoint.pt", resume=resume, checkpoint_minutes=checkpoint_minutes, console=console,
        on_step=partial(log_scores, console, _in_words),
    )  # fmt: skip
    head.load_state_dict({name: tensor.to(dtype) for name, tensor in head.state_dict().items()})  # as written
    config = head.head_config
    figures: dict[str, Any] = {
        "run": asdict(run), "steps": trainer.step, "tokens": train.ids.numel(), "seconds": round(trainer.seconds, 1),
        "parameters": sum(p.numel() for p in head.parameters()),
        **{name: texts.by_kind(lambda rows: acceptance(learner, rows).facts()) for name, texts in sets.items()},
    }  # fmt: skip
    whole = config.draft_vocab_size == config.layer.vocab_size
    save_head(head, None if whole else ids, out, model, run.depth, form, dtype)
    (out / "README.md").write_text(card.text(config, model, run, figures, command), encoding="utf-8")
    shutil.rmtree(work)
    return figures


def head_config(model: PreTrainedModel, run: HeadTraining, layers: tuple[int, ...]) -> Eagle3Config:
    """The shape of a head for `model`: attention and rotary positions as the target's, where it says them as Llama does.

    Raises:
        SettingsError: a draft vocabulary larger than the model's.
    """
    text = model.config.get_text_config(decoder=True)
    vocab, hidden = model.get_output_embeddings().weight.shape
    if run.draft_vocab is not None and not 0 < run.draft_vocab <= vocab:
        raise SettingsError(f"eagle3: the draft vocabulary has 1 … {vocab} tokens, not {run.draft_vocab}")
    rope = getattr(text, "rope_parameters", None)
    named: dict[str, Any] = {"rope_parameters": dict(rope)} if rope and "rope_theta" in rope else {}
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        if getattr(text, name, None) is not None:
            named[name] = getattr(text, name)
    # Rotary positions of a part of each head are no matter of Llama's layer.
    if (rope or {}).get("partial_rotary_factor", 1.0) != 1.0:
        named.pop("rope_parameters", None)
    layer = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=run.intermediate or getattr(text, "intermediate_size", None) or 4 * hidden,
        num_attention_heads=text.num_attention_heads,
        vocab_size=vocab,
        num_hidden_layers=1,
        hidden_act="silu",
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=getattr(text, "eos_token_id", None),
        **named,
    )
    return Eagle3Config(layer, run.draft_vocab or vocab, hidden, layers)


def new_head(config: Eagle3Config, model: PreTrainedModel, ids: Tensor, seed: int) -> Eagle3Head:
    """A head that begins as the target's output head on its highest feature: the layer adds nothing yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config)
        for parameter in head.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)
    hidden = config.layer.hidden_size
    with torch.no_grad():
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.lm_head.weight.copy_(model.get_output_embeddings().weight.detach()[ids.to(model.device)])
    return head.to(model.device)


def begin_with(given: Eagle3Files, config: Eagle3Config, ids: Tensor) -> tuple[Eagle3Head, Tensor]:
    """A head to go on with, and the tokens that it can propose, ``[D]``; `ids` where it has all of the model's.

    Raises:
        SettingsError: it is of another shape than `config`.
    """
    if not isinstance(given.head, Eagle3Head) or given.head.embed_tokens is not None:
        raise SettingsError("eagle3: training goes on with EAGLE-3 heads that use the target's embedding")
    other = given.head.head_config
    shapes = {name: list(tensor.shape) for name, tensor in Eagle3Head(config).state_dict().items()}
    if shapes != {name: list(tensor.shape) for name, tensor in given.head.state_dict().items()} or (
        other.layers not in (None, config.layers)
    ):
        raise SettingsError(
            "eagle3: the head to begin with is of another shape, or reads other layers, than the one to train"
        )
    head = copy.deepcopy(given.head).requires_grad_(True)
    layer = copy.deepcopy(other.layer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # a checkpoint of a head need not say them
        setattr(layer, name, getattr(config.layer, name))
    head.head_config = replace(other, layers=config.layers, layer=layer)
    return head, given.vocabulary.ids.cpu() if given.vocabulary.ids is not None else ids


def draft_vocabulary(ids: Tensor, size: int, vocab: int, always: Sequence[int] = ()) -> Tensor:
    """``[D]`` int64, ascending: the `size` most frequent tokens of ``ids``, those of `always` among them."""
    counts = torch.bincount(ids.flatten(), minlength=vocab)
    counts[[token for token in always if token < vocab]] = ids.numel() + 1
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def _in_words(scores: Sequence[float]) -> str:
    shares = ", ".join(f"{share:.1%}" for share in scores)
    return f"drafts accepted up to token 1, 2, …: {shares}; {1 + sum(scores):.2f} tokens a step"
