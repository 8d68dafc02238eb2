"""What heads learn from: hidden states of the frozen model over text, and the tokens further ahead, kept on disk.

The text is that of the user's files and, for a share of the rows, what the model itself writes after their beginnings
(self-distillation, section 2.3.2 of the paper): that is the text in which the heads will have to predict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..deprecated import warn
from ..training import TrainingError

#: Label of a position whose token is not known: behind the end of a row or of the text.
UNKNOWN = -100
#: Rows that are generated, or read, at once.
ROWS = 32
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Texts:
    """Rows of tokens.

    Attributes:
        ids: ``[W, T]`` int64.
        own: ``[W]``, the position from which on a row is the model's own text; T where none of it is.
    """

    ids: Tensor
    own: Tensor

    def digest(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes() + self.own.numpy().tobytes()).hexdigest()

    def part(self, first: int, last: int) -> Texts:
        return Texts(self.ids[first:last], self.own[first:last])


def read_files(paths: Sequence[Path]) -> list[str]:
    """The texts of files, and of all files in folders; what is not UTF-8 is left out.

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
    # Every window up to the one that is needed last; the order of the files is random already.
    for text in shuffled:
        stream += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]
        if len(stream) >= rows * length:
            break
    windows = min(len(stream) // length, rows)
    if windows < 1:
        raise TrainingError(f"the text has {len(stream)} tokens, and rows of {length} are trained on")
    ids = torch.tensor(stream[: windows * length]).view(windows, length)
    return ids[torch.randperm(windows, generator=generator)]


def own_texts(
    model: PreTrainedModel, ids: Tensor, share: float, prompt: int, progress: Progress = lambda rows: None
) -> Texts:
    """`ids` with the first `share` of the rows continued by the model, greedily, from their first `prompt` tokens on."""
    ids, length = ids.clone(), ids.shape[1]
    own = torch.full((len(ids),), length)
    count = round(share * len(ids))
    own[:count] = prompt
    with evaluating(model):
        for first in range(0, count, ROWS):
            rows = slice(first, min(first + ROWS, count))
            read, past = ids[rows, :prompt].to(model.device), None
            for position in range(prompt, length):
                out = model(input_ids=read, past_key_values=past, use_cache=True)
                read, past = out.logits[:, -1:].argmax(-1), out.past_key_values
                ids[rows, position] = read[:, 0].cpu()
            progress(rows.stop - rows.start)
    return Texts(ids, own)


def labels_of(texts: Texts, heads: int, stops: Sequence[int]) -> Tensor:
    """``[W, T, K]`` int64: the token that head k should predict at each position, k + 2 tokens further on.

    The next token is the output head's. Tokens behind the row are unknown, and so are those that the model wrote itself after
    an end of sequence, which decoding would never reach.
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
    # In a row of the model's own text the prompt does not count.
    in_prompt = (texts.own < t)[:, None] & (positions < texts.own[:, None] - 1)
    labels[in_prompt] = UNKNOWN
    return labels


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """`model` in evaluation mode and without gradients; afterwards in the mode it was in."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


class HiddenStates:
    """Hidden states that the output head reads, ``[W, T, H]``, computed row by row into a file that is mapped into memory.

    Interrupted work goes on where it stopped. Bounded: ``W·T·H`` numbers of `dtype`.
    """

    def __init__(self, file: Path, texts: Texts, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.texts, self.file, self.model = texts, file, model
        hidden = model.get_output_embeddings().weight.shape[1]
        self._note = file.with_suffix(".json")
        w, t = texts.ids.shape
        self._identity = {"texts": texts.digest(), "model": digest(model), "dtype": str(dtype)}
        self.done = self._done()
        if self.done == 0:
            file.unlink(missing_ok=True)
        self.values = torch.from_file(str(file), shared=True, size=w * t * hidden, dtype=dtype).view(w, t, hidden)

    def _done(self) -> int:
        try:
            note = dict(json.loads(self._note.read_text()))
        except (OSError, ValueError):
            return 0
        done = int(note.pop("done", 0))
        return done if self.file.exists() and note == self._identity else 0

    def fill(self, progress: Progress = lambda rows: None) -> None:
        """Runs the model over the rows that are left."""
        model, seen = self.model, list[Tensor]()
        # Where the head reads: no model has to be asked how it names or norms its hidden states.
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            with evaluating(model):
                while self.done < len(self.texts.ids):
                    rows = slice(self.done, min(self.done + ROWS, len(self.texts.ids)))
                    model(input_ids=self.texts.ids[rows].to(model.device), use_cache=False)
                    self.values[rows] = seen.pop().to("cpu", self.values.dtype)
                    self.done = rows.stop
                    self._note.write_text(json.dumps(self._identity | {"done": self.done}))
                    progress(rows.stop - rows.start)
        finally:
            hook.remove()


def digest(model: PreTrainedModel) -> str:
    """Changes with the model's weights."""
    sums = [(name, weight.double().sum().item()) for name, weight in model.state_dict().items()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def stop_tokens(model: PreTrainedModel) -> list[int]:
    """End-of-sequence ids of the model's generation config."""
    stops: Any = model.generation_config.eos_token_id
    return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)


def __getattr__(name: str) -> Any:
    if name == "MedusaTrainingError":
        warn(f"{__name__}.MedusaTrainingError", "decoders.training.TrainingError")
        return TrainingError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
