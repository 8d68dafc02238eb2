"""Training text: rows of tokens from files, and rows that the target itself continues."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import cache_of, config_value
from ..drafters import cache_keyword
from ..errors import SettingsError, TrainingError, amount
from .progress import progress_bar
from .recipes import Recipe

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
#: Number of rows that the target continues in one batch.
ROWS = 32
#: Share of the text that is held out, for early stopping and for the figures that a training reports.
HELD_OUT_SHARE = 0.05
#: If the target continues a row, this share of the row is the prompt.
PROMPT_SHARE = 0.25
#: Minimum number of held-out rows. Test rows may be fewer if the test text is short.
LEAST_ROWS = 4
#: Names of the files in which a run stores its state. They must differ from usual names of users' data, such as train.json.
OWN_FILES = re.compile(r"(checkpoint|train|held|test)\.(pt|partial|states|done)")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Texts:
    """Rows of tokens.

    Attributes:
        ids: ``[W, T]`` int64.
        own: ``[W]``, for each row the index of the first token that the target wrote; ``T`` for a row from a file.
    """

    ids: Tensor
    own: Tensor

    def digest(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes() + self.own.numpy().tobytes()).hexdigest()

    def part(self, first: int, last: int) -> Texts:
        return Texts(self.ids[first:last], self.own[first:last])

    def chosen(self, rows: Tensor) -> Texts:
        """The selected rows. rows: their indices, or a bool for each row."""
        return Texts(self.ids[rows], self.own[rows])

    def kinds(self) -> dict[str, Tensor]:
        """The rows of each kind that exists, ``[W]`` bool. ``text``: rows of files. ``own``: rows that the target continued."""
        own = self.own < self.ids.shape[1]
        return {kind: rows for kind, rows in (("text", ~own), ("own", own)) if rows.any()}

    def by_kind(self, judge: Callable[[Texts], T]) -> dict[str, T]:
        """The results of `judge` for the rows of each kind (:meth:`kinds`)."""
        return {kind: judge(self.chosen(rows)) for kind, rows in self.kinds().items()}


def read_files(paths: Sequence[Path]) -> list[str]:
    """The texts of the files in `paths`, and of all files in folders in `paths`. Files that are not UTF-8 are left out.

    Raises:
        TrainingError: a path does not exist, or there is no text at all.
    """
    texts = []
    for path in paths:
        if not path.exists():
            raise TrainingError(f"there is no file or folder {str(path)!r} to train on")
        for file in sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]:
            try:
                text = file.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                texts.append(text)
    if not texts:
        raise TrainingError(f"there is no text in {', '.join(map(str, paths)) or 'no files'}")
    return texts


def rows_of_text(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int, rows: int, seed: int) -> Tensor:
    """At most `rows` rows of `length` tokens, ``[W, T]`` int64, in random order. An end-of-sequence token separates texts.

    Raises:
        TrainingError: the texts do not fill one row.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = list(texts)
    shuffled = [shuffled[i] for i in torch.randperm(len(shuffled), generator=generator).tolist()]
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    stream: list[int] = []
    # Tokenizes only as many texts as fill the rows. The order of the texts is random already.
    for text in shuffled:
        stream += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]
        if len(stream) >= rows * length:
            break
    windows = min(len(stream) // length, rows)
    if windows < 1:
        raise TrainingError(
            f"the text has {amount(len(stream), 'token')}, fewer than a training sequence of {length}: give more text or a lower length"
        )
    ids = torch.tensor(stream[: windows * length]).view(windows, length)
    return ids[torch.randperm(windows, generator=generator)]


def own_texts(
    model: PreTrainedModel, ids: Tensor, share: float, prompt: int, progress: Progress = lambda rows: None
) -> Texts:
    """A copy of `ids`. In the first rows, a `share` of all, the model's greedy text replaces all but the first `prompt` tokens."""
    ids, length = ids.clone(), ids.shape[1]
    own = torch.full((len(ids),), length)
    count = round(share * len(ids))
    own[:count], keyword = prompt, cache_keyword(model)
    with evaluating(model):
        for first in range(0, count, ROWS):
            rows = slice(first, min(first + ROWS, count))
            read, cache = ids[rows, :prompt].to(model.device), None
            for position in range(prompt, length):
                out = model(input_ids=read, use_cache=True, **{keyword: cache})
                read, cache = out.logits[:, -1:].argmax(-1), cache_of(out)
                ids[rows, position] = read[:, 0].cpu()
            progress(rows.stop - rows.start)
    return Texts(ids, own)


def counted(texts: Texts, stops: Sequence[int]) -> Tensor:
    """The positions that count in losses and figures, ``[W, T]`` bool.

    In rows of files all positions count. In rows that the target continued, positions count from the prompt's last token up to the
    end of sequence, but not the end of sequence itself.
    """
    ids, own = texts.ids, texts.own[:, None]
    positions = torch.arange(ids.shape[1])
    ends = torch.isin(ids, torch.tensor(list(stops) or [-1])) & (positions >= own)
    inside = (own == ids.shape[1]) | (positions >= own - 1)
    return inside & (ends.long().cumsum(1) == 0)


def hold_out(texts: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Splits texts into training texts and held-out texts. A single text is cut in two."""
    if len(texts) == 1:
        cut = int((1 - HELD_OUT_SHARE) * len(texts[0]))
        return [texts[0][:cut]], [texts[0][cut:]]
    generator = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(len(texts), generator=generator).tolist()
    count = max(1, round(HELD_OUT_SHARE * len(texts)))
    return [texts[i] for i in sorted(order[count:])], [texts[i] for i in sorted(order[:count])]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Runs the block with `model` in evaluation mode and without gradients, and restores the model's mode at the end."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


@dataclass(frozen=True)
class Job:
    """What a training run needs besides its recipe: the texts, the output folder, and how to resume.

    Until a run is complete, ``out/training`` holds its checkpoints and its rows of text. With `resume` an interrupted run continues
    from these files, and its final weights equal those of a run without interruption.

    Attributes:
        texts: training texts.
        out: folder for the trained network and its card.
        held: held-out texts for early stopping, preferably texts that are new to the target. Empty: a twentieth of `texts` is held
            out.
        test: texts on which the network is measured at the end, for the card.
        dtype: dtype of the written weights.
        command: the command line that started the training, for the card.
        resume: whether to continue from the checkpoint in ``out/training``.
        checkpoint_minutes: minutes between checkpoints.
        console: where progress is shown; None: nowhere.
    """

    texts: Sequence[str]
    out: Path
    held: Sequence[str] = ()
    test: Sequence[str] = ()
    dtype: torch.dtype = torch.bfloat16
    command: str | None = None
    resume: bool = True
    checkpoint_minutes: float = 1.0
    console: Console | None = None


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raises SettingsError if rows of `length` tokens are longer than the target's context."""
    context = config_value(model.config.get_text_config(decoder=True), "max_position_embeddings")
    if isinstance(context, int) and length > context:
        raise SettingsError(f"length must be at most {context}, the model's context, not {length}")


def workplace(out: Path, resume: bool) -> Path:
    """Returns the folder in `out` where a run stores its state. Without `resume`, the folder is emptied.

    Raises:
        SettingsError: `out` cannot be written, or contains files that training might replace. Hidden files and the state of an
            unfinished run are allowed.
    """
    work = out / "training"
    try:
        state = [file.name for file in work.iterdir()] if work.is_dir() else []
        present = [file.name for file in out.iterdir() if file != work] if out.exists() and not state else state
        # Hidden files are allowed because a new repository of the Hub has .gitattributes.
        others = sorted(name for name in present if not (OWN_FILES.fullmatch(name) if state else name.startswith(".")))
        if others:
            where = f"{work if state else out} has other files ({others[0]})"
            raise SettingsError(f"{where}, which training might replace: name an empty folder, not {out}")
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{out} cannot be written: {error.strerror}") from error
    if not resume:
        shutil.rmtree(work)
        work.mkdir()
    return work


def save_state(state: dict[str, Any], file: Path) -> None:
    """Writes `state` to `file`, for :func:`load_state`. If writing fails, the earlier file remains.

    Raises:
        OSError: the file cannot be written.
    """
    partial = file.with_suffix(".partial")
    with partial.open("wb") as opened:
        try:
            torch.save(state, opened)
        except RuntimeError as error:  # torch replaces the error of a full disk by one of its own
            raise error.__context__ or error from None
    partial.replace(file)


def load_state(file: Path) -> dict[str, Any]:
    """The state in `file`, with its tensors on the CPU. Raises TrainingError: the file is damaged."""
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise TrainingError(f"{file} is damaged: delete it, or train without resuming") from error


def digest(model: torch.nn.Module) -> str:
    """A digest of the names and sums of the model's weight tensors."""
    sums = [(name, weight.double().sum().item()) for name, weight in model.state_dict().items()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


@dataclass(frozen=True)
class TextStore:
    """Makes training rows and held-out rows. The target continues a share of them. All rows stay on disk until the run is complete.

    Attributes:
        model: the target.
        tokenizer: the target's tokenizer.
        recipe: defines the length of rows, the share of rows that the target continues, and the seed for the order of the texts.
        folder: where rows are stored.
        console: where progress is shown.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    folder: Path
    console: Console | None = None

    @cached_property
    def model_digest(self) -> str:
        """The :func:`digest` of the target. It is computed once, because the weights do not change during a run."""
        return digest(self.model)

    def sets(self, job: Job, count: int, learns: bool = True) -> dict[str, Texts]:
        """The rows of a job's texts by set: ``held``, ``test`` if the job has test texts, and, if `learns`, ``train`` with `count` rows
        at most. Without held-out texts, a part of the training texts is held out.

        Raises:
            TrainingError: there is too little text.
        """
        learnt, held = (job.texts, job.held) if job.held else hold_out(job.texts, self.recipe.seed)
        judged = max(LEAST_ROWS, round(HELD_OUT_SHARE * count))
        rows = {"held": self.rows("held", held, judged)}
        if len(rows["held"].ids) < LEAST_ROWS:
            raise TrainingError(
                f"held out: {amount(len(rows['held'].ids), 'row')} of {self.recipe.length} tokens, too few to measure progress: "
                "give more text, or shorter rows"
            )
        if job.test:
            rows["test"] = self.rows("test", job.test, judged)
        return rows | ({"train": self.rows("train", learnt, count)} if learns else {})

    def rows(self, name: str, texts: Iterable[str], count: int) -> Texts:
        """At most `count` rows of `texts` (:func:`rows_of_text`), some of them continued by the target.

        If rows were made before under the same `name`, from the same target and texts, they are read from disk.

        Raises:
            TrainingError: the texts do not fill one row.
        """
        recipe, share = self.recipe, self.recipe.own_share
        ids = rows_of_text(self.tokenizer, texts, recipe.length, count, recipe.seed)
        file = self.folder / f"{name}.pt"
        key = hashlib.sha256(ids.numpy().tobytes() + f"{share} {self.model_digest}".encode()).hexdigest()
        if file.exists():
            stored = load_state(file)
            if stored["key"] == key:
                return Texts(stored["ids"], stored["own"])
        prompt = max(1, round(PROMPT_SHARE * recipe.length))
        with progress_bar(self.console, f"{name}: the model's own text", round(share * len(ids))) as advance:
            rows = own_texts(self.model, ids, share, prompt, advance)
        save_state({"key": key, "ids": rows.ids, "own": rows.own}, file)
        return rows
