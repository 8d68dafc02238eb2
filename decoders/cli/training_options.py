"""Shared parts of the training commands: options, loading of model and texts, and the command line for model cards."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import plain_console
from .models import Device, Threads, known_dtype

if TYPE_CHECKING:
    from ..demo.data import Source

#: Number of edit tasks among the demo models' texts. An edit task copies a function as it is, or with a name replaced. They are about
#: a quarter of the texts, as when the demo models were trained.
EDIT_TASKS = 8000

Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="Training text: a file, or a folder of files. Repeatable. Default for the demo model: its own texts."
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "--out", help="Output folder: a new or empty one, or that of an interrupted run.")
]
Held = Annotated[
    list[Path] | None,
    typer.Option(help="Held-out text file, for early stopping. Repeatable. Default: a twentieth of the data."),
]
TestText = Annotated[
    list[Path] | None, typer.Option(help="Test text file, for the final measurements in the model card. Repeatable.")
]
ModelType = Annotated[
    str, typer.Option(callback=known_dtype, help="Dtype of the model: float32, bfloat16, float16 or auto.")
]
Resume = Annotated[bool, typer.Option(help="Resume an interrupted run in the output folder.")]
CheckpointMinutes = Annotated[float, typer.Option(min=0, help="Minutes between checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON, without progress.")]


def prepared(
    model: str,
    out: Path,
    data: Data = None,
    held: Held = None,
    test: TestText = None,
    dtype: ModelType = "float32",
    device: Device = None,
    threads: Threads = None,
    resume: Resume = True,
    checkpoint_minutes: CheckpointMinutes = 1.0,
    as_json: AsJson = False,
) -> tuple[Any, Any, Any]:
    """Loads the model and its tokenizer. Returns them and the :class:`~decoders.training.texts.Job` that the options describe.

    The parameters from `data` on are options of every training command. Without `data`, the demo model is trained with its own texts.

    Raises:
        TrainingError: a path does not exist, or there is no text.
        SettingsError: see :func:`~decoders.training.texts.workplace`.
        UnknownNameError, SettingsError, ModelLoadError: see :func:`~decoders.cli.models.load`.
    """
    from ..training.texts import Job, read_files, workplace
    from .models import load

    # A wrong folder and missing files are reported before the model is loaded.
    workplace(out, resume=True)
    texts = demo_texts() if data is None and model == "demo" else {"texts": read_files(data or [])}
    texts |= {name: read_files(paths) for name, paths in (("held", held), ("test", test)) if paths}
    loaded, tokenizer = load(model, dtype, device)
    console = None if as_json else plain_console()
    job = Job(
        texts["texts"], out, texts.get("held", ()), texts.get("test", ()), command=command_line(), resume=resume,
        checkpoint_minutes=checkpoint_minutes, console=console,
    )  # fmt: skip
    return loaded, tokenizer, job


def demo_texts() -> dict[str, list[str]]:
    """The demo models' own texts, by set.

    ``texts``: the files on which the models were trained. ``test``: the held-out files from which the demo's prompts come. ``held``:
    the other held-out files. ``texts`` also has :data:`EDIT_TASKS` edit tasks, ``test`` and ``held`` a twentieth of this number each.
    """
    from ..demo import data, prompts

    learnt, unseen = data.split(data.read_sources())
    prompted = {prompt.source for prompt in prompts()}
    sets = {
        "texts": learnt,
        "held": [source for source in unseen if source.path not in prompted],
        "test": [source for source in unseen if source.path in prompted],
    }
    counts = {"texts": EDIT_TASKS, "held": EDIT_TASKS // 20, "test": EDIT_TASKS // 20}
    return {
        name: [source.text for source in sources] + _edit_tasks(sources, counts[name]) for name, sources in sets.items()
    }


def _edit_tasks(sources: list[Source], count: int) -> list[str]:
    """The texts of `count` edit tasks about functions in `sources`, the same in every run; empty if there are no functions or names."""
    import random

    from ..demo import data

    functions, rng = data.functions(sources), random.Random(0)
    names = data.new_names(functions)
    return [data.edit_task(rng.choice(functions), names, rng).text for _ in range(count if functions and names else 0)]


def command_line() -> str:
    """The command line of this process, for a model card."""
    return shlex.join(["decoders", *sys.argv[1:]])
