"""Training text: files cut into rows of tokens, and rows that a model continues itself."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import cache_of
from ..drafters import cache_keyword
from ..errors import TrainingError
from .progress import progress_bar
from .recipes import Recipe

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
#: Rows that the model continues in one batch.
ROWS = 32
#: Share of the text that is held out for early stopping and the figures.
HELD_OUT_SHARE = 0.05
#: Share of a row that is the prompt when the model continues it.
PROMPT_SHARE = 0.25
#: Fewest rows that are held out or tested on.
LEAST_ROWS = 4
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Texts:
    """Rows of tokens.

    Attributes:
        ids: ``[W, T]`` int64.
        own: ``[W]``, the first position of each row that the model wrote; T if it wrote none.
    """

    ids: Tensor
    own: Tensor

    def digest(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes() + self.own.numpy().tobytes()).hexdigest()

    def part(self, first: int, last: int) -> Texts:
        return Texts(self.ids[first:last], self.own[first:last])

    def chosen(self, rows: Tensor) -> Texts:
        """Some of the rows. rows: indices, or a bool for each row."""
        return Texts(self.ids[rows], self.own[rows])

    def kinds(self) -> dict[str, Tensor]:
        """``[W]`` bool for each kind of row that exists: ``text``, rows of files; ``own``, rows that the model continued."""
        own = self.own < self.ids.shape[1]
        return {kind: rows for kind, rows in (("text", ~own), ("own", own)) if rows.any()}

    def by_kind(self, judge: Callable[[Texts], T]) -> dict[str, T]:
        """The result of `judge` for the rows of each of :meth:`kinds`."""
        return {kind: judge(self.chosen(rows)) for kind, rows in self.kinds().items()}


def read_files(paths: Sequence[Path]) -> list[str]:
    """The texts of files, and of all files in folders; files that are not UTF-8 are left out.

    Raises:
        TrainingError: a path that does not exist, or no text at all.
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
    """At most `rows` windows of `length` tokens, ``[W, T]`` int64, in random order; texts are joined by the end token.

    Raises:
        TrainingError: the texts fill no window.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = list(texts)
    shuffled = [shuffled[i] for i in torch.randperm(len(shuffled), generator=generator).tolist()]
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    stream: list[int] = []
    # Only as many windows as are needed; the order of the files is random already.
    for text in shuffled:
        stream += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]
        if len(stream) >= rows * length:
            break
    windows = min(len(stream) // length, rows)
    if windows < 1:
        raise TrainingError(f"the text has {len(stream)} tokens, fewer than a row of {length}")
    ids = torch.tensor(stream[: windows * length]).view(windows, length)
    return ids[torch.randperm(windows, generator=generator)]


def own_texts(
    model: PreTrainedModel, ids: Tensor, share: float, prompt: int, progress: Progress = lambda rows: None
) -> Texts:
    """A copy of `ids` in which the model has greedily continued the first `prompt` tokens of each of the first `share` of the rows."""
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
    """``[B, T]`` bool, the positions that count: all of text of files; in the model's own text from the prompt's last token to its
    end.
    """
    ids, own = texts.ids, texts.own[:, None]
    positions = torch.arange(ids.shape[1])
    ends = torch.isin(ids, torch.tensor(list(stops) or [-1])) & (positions >= own)
    inside = (own == ids.shape[1]) | (positions >= own - 1)
    return inside & (ends.long().cumsum(1) == 0)


def hold_out(texts: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """(texts to learn from, texts held out); a single text is cut."""
    if len(texts) == 1:
        cut = int((1 - HELD_OUT_SHARE) * len(texts[0]))
        return [texts[0][:cut]], [texts[0][cut:]]
    generator = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(len(texts), generator=generator).tolist()
    count = max(1, round(HELD_OUT_SHARE * len(texts)))
    return [texts[i] for i in sorted(order[count:])], [texts[i] for i in sorted(order[:count])]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Puts `model` into evaluation mode without gradients, and restores its mode at the end."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


def workplace(out: Path, resume: bool) -> Path:
    """The folder in which a run that writes to `out` keeps its state; emptied at the start unless the run is resumed."""
    work = out / "training"
    if not resume:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    return work


def digest(model: torch.nn.Module) -> str:
    """A digest of the model's weights."""
    sums = [(name, weight.double().sum().item()) for name, weight in model.state_dict().items()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def stop_tokens(model: PreTrainedModel) -> list[int]:
    """End-of-sequence ids of the model's generation config."""
    stops: Any = model.generation_config.eos_token_id
    return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)


def held_out_rows(rows: int) -> int:
    """How many rows are held out if `rows` are trained on."""
    return max(LEAST_ROWS, round(HELD_OUT_SHARE * rows))


@dataclass(frozen=True)
class TextStore:
    """Training rows and held-out rows. A share of them is continued by the model; these are kept on disk until the run is complete.

    Attributes:
        model: the model that continues rows.
        tokenizer: its tokenizer.
        recipe: how long rows are, what share of them `model` continues, and the seed of the order of the texts.
        folder: where the continued rows are kept.
        console: where progress is shown.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    folder: Path
    console: Console | None = None

    @cached_property
    def model_digest(self) -> str:
        """:func:`digest` of the model, computed once, since its weights do not change during a run."""
        return digest(self.model)

    def learnt_and_held(self, texts: Sequence[str], held: Sequence[str], count: int) -> tuple[Texts, Texts]:
        """At most `count` training rows, and held-out rows: of `held`, or else of a part of `texts`.

        Raises:
            TrainingError: too little text.
        """
        learnt, judged = (list(texts), list(held)) if held else hold_out(texts, self.recipe.seed)
        rows = self.rows("held", judged, held_out_rows(count))
        if len(rows.ids) < LEAST_ROWS:
            raise TrainingError(
                f"{len(rows.ids)} rows of {self.recipe.length} tokens are held out, too few to measure progress: "
                "give more text, or shorter rows"
            )
        return self.rows("train", learnt, count), rows

    def rows(self, name: str, texts: Iterable[str], count: int) -> Texts:
        """At most `count` rows of `texts`. Rows that the model continued earlier under `name` are read from disk if model and texts
        are the same.

        Raises:
            TrainingError: the texts fill no row.
        """
        ids, share = self.texts(texts, count), self.recipe.own_share
        file = self.folder / f"{name}.pt"
        key = hashlib.sha256(ids.numpy().tobytes() + f"{share} {self.model_digest}".encode()).hexdigest()
        if file.exists():
            stored = torch.load(file, weights_only=True)
            if stored["key"] == key:
                return Texts(stored["ids"], stored["own"])
        prompt = max(1, round(PROMPT_SHARE * self.recipe.length))
        with progress_bar(self.console, f"{name}: the model's own text", round(share * len(ids))) as advance:
            rows = own_texts(self.model, ids, share, prompt, advance)
        torch.save({"key": key, "ids": rows.ids, "own": rows.own}, file)
        return rows

    def texts(self, texts: Iterable[str], count: int) -> Tensor:
        """At most `count` rows of `texts`, ``[W, T]`` int64, without continuations; see :func:`rows_of_text`."""
        return rows_of_text(self.tokenizer, texts, self.recipe.length, count, self.recipe.seed)
