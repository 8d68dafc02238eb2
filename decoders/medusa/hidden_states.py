"""What heads learn from: hidden states of the frozen model over text, and the tokens further ahead, kept on disk.

The text is that of the user's files and, for a share of the rows, what the model itself writes after their beginnings
(self-distillation, section 2.3.2 of the paper): that is the text in which the heads will have to predict.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..training.texts import Progress, Texts, digest, evaluating

#: Label of a position whose token is not known: behind the end of a row or of the text.
UNKNOWN = -100
#: Rows that are read at once.
ROWS = 32


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
