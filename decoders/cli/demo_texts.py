"""What models that belong to the demo learn from: the demo models' own files and tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..demo.data import Source

#: So many make about a quarter of the demo models' text, as in their own training.
EDIT_TASKS = 8000


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
