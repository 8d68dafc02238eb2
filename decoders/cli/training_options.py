"""What the commands that train share: options, the texts they name, and the command as it was typed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingsError
from .models import known_dtype

if TYPE_CHECKING:
    from ..demo.data import Source

#: So many make about a quarter of the demo models' text, as in their own training.
EDIT_TASKS = 8000

Data = Annotated[
    list[Path] | None, typer.Option(help="Text file, or folder of them; may be repeated. For the demo model: its own.")
]
Output = Annotated[
    Path, typer.Option("--output", "--out", help="Folder to write to; continued if a run was interrupted.")
]
Held = Annotated[
    list[Path] | None,
    typer.Option(help="Text to judge by (early stop); may be repeated. Default: a twentieth of the data."),
]
TestText = Annotated[
    list[Path] | None, typer.Option(help="Text to measure on at the end, for the card; may be repeated.")
]
Tokens = Annotated[int, typer.Option(min=1, help="Most tokens of text.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens per row.")]
OwnShare = Annotated[float, typer.Option(min=0, max=1, help="Share of the rows that the model continues itself.")]
ReadLayers = Annotated[
    str | None,
    typer.Option(help="Layers of the model that are read, such as 1,15,28; -1 is the last. Default: by its depth."),
]
Intermediate = Annotated[int | None, typer.Option(min=1, help="Width of each layer's MLP. Default: the model's.")]
DraftVocab = Annotated[
    int | None, typer.Option(min=1, help="Tokens that can be proposed: the data's most frequent. Default: all.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Most passes over the text.")]
RowsPerStep = Annotated[int, typer.Option(min=1, help="Rows per step.")]
Rate = Annotated[float, typer.Option(min=0, help="Peak learning rate.")]
Patience = Annotated[int, typer.Option(min=1, help="Checks without a gain before training stops.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of the data order.")]
ModelType = Annotated[str, typer.Option(callback=known_dtype, help="Of the model: float32, bfloat16, float16 or auto.")]
Bf16 = Annotated[bool, typer.Option(help="Compute in bfloat16 instead of float32.")]
Resume = Annotated[bool, typer.Option(help="Continue what lies under the folder.")]
CheckpointMinutes = Annotated[float, typer.Option(min=0, help="Minutes between checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON, no progress.")]


@dataclass(frozen=True)
class TrainingTexts:
    """What is learnt from, and what judges and tests it, where there are texts for that."""

    texts: Sequence[str]
    held: Sequence[str] = ()
    test: Sequence[str] = ()


def texts_of(
    model: str, data: list[Path] | None, held: list[Path] | None, test: list[Path] | None, edit_tasks: int
) -> TrainingTexts:
    """The texts of files, or of the demo model.

    Args:
        edit_tasks: that the demo model's own text has beside files, where no `data` is given.

    Raises:
        TrainingError: a path that does not exist, or no text.
    """
    from ..training.texts import read_files

    texts = demo_texts(edit_tasks) if data is None and model == "demo" else {"texts": read_files(data or [])}
    return TrainingTexts(
        **texts | {name: read_files(paths) for name, paths in (("held", held), ("test", test)) if paths}
    )


def demo_texts(edit_tasks: int = 0) -> dict[str, list[str]]:
    """The demo models' training files to learn from; of the files that no model has seen those that the prompts come from to
    test on, the others to judge by.

    Args:
        edit_tasks: of them, as the demo models' training has, beside the files to learn from; a twentieth as many beside the others.
    """
    from ..demo import data, prompts

    learnt, unseen = data.split(data.read_sources())
    prompted = {prompt.source for prompt in prompts()}
    sets = {
        "texts": learnt,
        "held": [source for source in unseen if source.path not in prompted],
        "test": [source for source in unseen if source.path in prompted],
    }
    counts = {"texts": edit_tasks, "held": edit_tasks // 20, "test": edit_tasks // 20}
    return {
        name: [source.text for source in sources] + _edit_tasks(sources, counts[name]) for name, sources in sets.items()
    }


def _edit_tasks(sources: list[Source], count: int) -> list[str]:
    """Tasks about functions of `sources`, the same in every run."""
    import random

    from ..demo import data

    functions, rng = data.functions(sources) if count else [], random.Random(0)
    names = data.new_names(functions)
    return [data.edit_task(rng.choice(functions), names, rng).text for _ in range(count if functions and names else 0)]


def indices(layers: str | None) -> tuple[int, ...] | None:
    """``"1,15,28"`` as numbers.

    Raises:
        SettingsError: it is none of the kind.
    """
    if layers is None:
        return None
    try:
        return tuple(int(layer) for layer in layers.split(","))
    except ValueError as error:
        raise SettingsError(f"layers are numbers with commas between, such as 1,15,28, not {layers!r}") from error


def command_line() -> str:
    """This command as it was typed, for a card."""
    return shlex.join(["decoders", *sys.argv[1:]])
