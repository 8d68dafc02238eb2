"""`train_eagle3`: an EAGLE-3 head for a model, which stays frozen, in one resumable run."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.layers import decoder_layers
from ..common.transformers_compat import config_value
from ..errors import SettingsError, TrainingError
from ..heads.eagle3 import Eagle3Config, Eagle3Head
from ..heads.eagle3_files import Eagle3Files, Format, load_head, save_head
from .cards import eagle3_card
from .eagle3_lessons import Lesson, Teacher, unrolled
from .recipes import HeadTraining
from .texts import Texts, TextStore, digest, held_out_rows, stop_tokens, workplace
from .trainer import EpochLearner, Run, Trainer, muon_and_adamw, soft_cross_entropy, warmup_stable_decay

if TYPE_CHECKING:
    from rich.console import Console

WARMUP_STEPS = 20
DECAY_SHARE = 0.5
#: Rows that acceptance is measured on between steps.
WATCHED = 32


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
    """Trains an EAGLE-3 head with the model frozen, and writes it to `out` with a card. What is not listed is as in
    :func:`~decoders.training.draft.train_draft`.

    Args:
        test: measured on at the end, for the card.
        start: folder of a head to begin with, in either format; its draft vocabulary is kept. None: a new one.
        form: in which format it is written.

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
    store = TextStore(model, tokenizer, run, work, console)
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
    checkpoint = work / "checkpoint.pt"
    trainer.train("head", checkpoint, resume=resume, checkpoint_minutes=checkpoint_minutes, console=console)
    head.load_state_dict({name: tensor.to(dtype) for name, tensor in head.state_dict().items()})  # as written
    config = head.head_config
    figures: dict[str, Any] = {
        "run": asdict(run), "steps": trainer.step, "tokens": train.ids.numel(), "seconds": round(trainer.seconds, 1),
        "parameters": sum(p.numel() for p in head.parameters()),
        **{name: texts.by_kind(lambda rows: acceptance(learner, rows).facts()) for name, texts in sets.items()},
    }  # fmt: skip
    whole = config.draft_vocab_size == config.layer.vocab_size
    save_head(head, None if whole else ids, out, model, run.depth, form, dtype)
    (out / "README.md").write_text(eagle3_card(config, model, run, figures, command), encoding="utf-8")
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
        value = config_value(text, name)
        if value is not None and not isinstance(value, tuple):  # else layers differ in it
            named[name] = value
    # Rotary positions of a part of each head are no matter of Llama's layer.
    if (rope or {}).get("partial_rotary_factor", 1.0) != 1.0:
        named.pop("rope_parameters", None)
    wide = config_value(text, "intermediate_size")
    layer = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=run.intermediate or (wide if isinstance(wide, int) else 4 * hidden),
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


class HeadLearner(EpochLearner):
    """A head and its optimizers: Muon for the layer's matrices, AdamW for the output matrix and norms, as for the demo models.

    Args:
        ids: ``[D]`` int64, the tokens that the head can propose.
        train: text to learn from.
        held_out: text to judge by; at most :data:`WATCHED` rows of it are, the model's own first.
    """

    model: Eagle3Head

    def __init__(
        self, training: HeadTraining, head: Eagle3Head, teacher: Teacher, ids: Tensor, train: Texts, held_out: Texts
    ) -> None:
        super().__init__(training, len(train.ids), training.rows)
        self.training, self.model, self.teacher, self.ids, self.train = training, head, teacher, ids, train
        self.stops = stop_tokens(teacher.model)
        self.positions = training.rows * (training.length - training.depth)
        self._watched = held_out.part(0, WATCHED)
        self.optimizers = muon_and_adamw(head, training.rate, [head.lm_head.weight])

    def run(self, identity: Mapping[str, Any]) -> Run:
        """The run of this head. identity: fingerprints of text and model."""
        return self.run_at(warmup_stable_decay, identity, clip=1.0, warmup_steps=WARMUP_STEPS, decay_share=DECAY_SHARE)

    def learn(self, step: int) -> Tensor:
        lesson = self.teacher.lesson(self.train.chosen(self.examples_of(step)), self.stops)
        return self.backward(lesson, self._chains(step))

    def _chains(self, step: int) -> Tensor | None:
        """``[C]`` int64, ascending, the positions at which a step simulates whole chains; None: all."""
        slots = self.training.length - self.training.depth
        count = max(1, round(self.training.chains * slots))
        if count >= slots:
            return None
        generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + step)
        return torch.randperm(slots, generator=generator)[:count].sort().values.to(self.ids.device)

    def backward(self, lesson: Lesson, chains: Tensor | None = None) -> Tensor:
        """Leaves the gradients of ``Σ_k decay^k · CE_k`` in the head; the loss.

        CE of simulated token k is taken against the target's distribution over the tokens that the head has, where the target's best
        token is one of them.

        Args:
            chains: ``[C]`` int64, ascending, the positions at which more than one token is simulated; None: all.
        """
        depth, head, known = self.training.depth, self.model, self.ids
        target = lesson.logits[..., known].softmax(-1)
        counts = (lesson.counted & torch.isin(lesson.logits.argmax(-1), known)).float()
        slots = lesson.features.shape[1] - depth
        every = torch.arange(slots, device=target.device)
        total, through = lesson.features.new_zeros(()), lesson.features.new_zeros(())
        with self.teacher.precision():
            drafted = unrolled(head, lesson.embedded[:, 1:], lesson.features[:, :slots], depth, chains)
            for k, states in enumerate(drafted):
                # The scores of one token at a time: those of all at once are large. The states' own gradient follows below.
                leaf = states.detach().requires_grad_()
                places = (every if k == 0 or chains is None else chains) + k + 1
                scores = head.lm_head(head.norm(leaf))
                weights = self.training.decay**k * counts[:, places] / counts[:, places].sum().clamp(min=1)
                loss, gradient = soft_cross_entropy(scores.detach().float(), target[:, places], weights)
                scores.backward(gradient.to(scores.dtype))
                assert leaf.grad is not None
                through = through + (states.float() * leaf.grad.float()).sum()
                total = total + loss
        through.backward()
        return total

    def scores(self) -> list[float]:
        """Shares of the drafts whose first 1, 2, … tokens are all accepted, greedily."""
        return acceptance(self, self._watched).reached

    def in_words(self, scores: Sequence[float]) -> str:
        shares = super().in_words(scores)
        return f"drafts accepted up to token 1, 2, …: {shares}; {1 + sum(scores):.2f} tokens a step"


@dataclass(frozen=True)
class Acceptance:
    """What becomes of simulated drafts.

    Attributes:
        drafts: how many there are.
        reached: per length, the share of drafts accepted up to there when greedy.
        rates: per simulated token, how often it is the target's, after text that the target wrote or read.
        overlaps: the same when sampling at temperature 1 with a coupled draw at its best: 1 - TV of both distributions.
    """

    drafts: int
    reached: list[float]
    rates: list[float]
    overlaps: list[float]

    @property
    def length(self) -> float:
        """Mean tokens of a step that a chain of this depth gives, the target's own included."""
        return 1 + sum(self.reached)

    def facts(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"tokens_per_step": self.length, **asdict(self)}


@torch.no_grad()
def acceptance(learner: HeadLearner, texts: Texts) -> Acceptance:
    """Simulates a chain at every position of `texts` that counts.

    In the model's own greedy text this is what a chain meets in decoding, since its tokens are the target's; in other text a draft is
    judged after the text's tokens, not the target's.
    """
    head, depth, known = learner.model, learner.training.depth, learner.ids
    sums, drafts = torch.zeros(3, depth, dtype=torch.float64), 0
    for first in range(0, len(texts.ids), learner.training.rows):
        lesson = learner.teacher.lesson(texts.part(first, first + learner.training.rows), learner.stops)
        slots = lesson.features.shape[1] - depth
        best, target = lesson.logits.argmax(-1), lesson.logits.softmax(-1)[..., known]
        # A draft counts where all of its tokens would.
        whole = torch.stack([lesson.counted[:, k + 1 : k + 1 + slots] for k in range(depth)]).all(0)
        drafts += int(whole.sum())
        accepted = whole
        with learner.teacher.precision():
            for k, states in enumerate(unrolled(head, lesson.embedded[:, 1:], lesson.features[:, :slots], depth)):
                scores, places = head.lm_head(head.norm(states)).float(), slice(k + 1, k + 1 + slots)
                right = known[scores.argmax(-1)] == best[:, places]
                accepted = accepted & right
                overlap = torch.minimum(scores.softmax(-1), target[:, places]).sum(-1)
                for place, what in enumerate((accepted, right & whole, overlap * whole)):
                    sums[place, k] += what.sum().cpu().double()
    reached, rates, overlaps = (sums / max(drafts, 1)).tolist()
    return Acceptance(drafts, reached, rates, overlaps)
