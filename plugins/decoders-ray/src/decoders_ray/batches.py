"""Many prompts over the cluster by Ray Data: a pool of actors with a model each, and a folder that a killed run goes on with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Files of the output folder; a part is written whole, or not at all.
PARTS = "part-*.jsonl"


def complete(
    prompts: Iterable[Mapping[str, Any]], output: str | Path, *,
    model: str | Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]], actors: int = 2, batch: int = 64, rows: int = 8,
    actor_options: dict[str, Any] | None = None, **arguments: Any,
) -> dict[str, int]:  # fmt: skip
    """Completes every prompt that `output` lacks, and says how many there are: ``prompts``, ``earlier``, ``written``, ``failed``.

    Args:
        prompts: objects with an ``id``, a ``prompt`` and arguments of ``generate`` for it alone.
        output: a folder that all actors can write to: its files hold an object per prompt, with ``id`` and ``text``, ``tokens`` or
            ``error``.
        model: a path, or a function that gives model and tokenizer.
        actors: processes, each with the model.
        batch: prompts per task: what is lost, at most, where an actor dies. It is done again.
        rows: decoded at a time by an actor.
        actor_options: of Ray's actors: ``{"num_gpus": 1}``.
        arguments: of ``generate``, for all prompts.

    Raises:
        ValueError: an id comes twice.
    """
    import ray

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [dict(prompt) for prompt in prompts]
    names = [str(prompt["id"]) for prompt in wanted]
    if len(set(names)) < len(names):
        raise ValueError(f"{len(names) - len(set(names))} ids come twice: each prompt has one of its own")
    known = written(folder)
    left = [prompt for prompt, name in zip(wanted, names, strict=True) if name not in known]
    figures = {"prompts": len(wanted), "earlier": len(wanted) - len(left), "written": 0, "failed": 0}
    if not left:
        return figures
    # Lines of JSON, since prompts have different arguments and a column has one type. A block is a task.
    lines = [{"line": json.dumps(prompt)} for prompt in left]
    blocks = -(-len(lines) // batch)
    data = ray.data.from_items(lines, override_num_blocks=blocks)
    options = {"num_cpus": 1} | (actor_options or {})
    done = data.map_batches(
        Completer, fn_constructor_args=(model, str(folder), rows, arguments), batch_size=batch,
        compute=ray.data.ActorPoolStrategy(size=min(actors, blocks)), **options,
    )  # fmt: skip
    for row in done.iter_rows():
        figures["written"] += 1
        figures["failed"] += bool(row["failed"])
    return figures


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """What the files of a folder hold, by id."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(PARTS)):
        for line in path.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            found[str(item["id"])] = item
    return found


class Completer:
    """An actor: a model, and the folder that it writes to."""

    def __init__(self, model: str | Callable[[], Any], folder: str, rows: int, arguments: dict[str, Any]) -> None:
        from .serving import load

        self.model, self.tokenizer = load(model) if isinstance(model, str) else model()
        self.folder, self.rows, self.arguments = Path(folder), rows, arguments

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Completes a batch and writes it down. batch: lines of JSON, as :func:`complete` makes them."""
        items = [json.loads(str(line)) for line in batch["line"]]
        lines = self.lines(items)
        write_part(self.folder, [str(item["id"]) for item in items], lines)
        return {"id": [line["id"] for line in lines], "failed": ["error" in line for line in lines]}

    def lines(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What becomes of some prompts, in their order."""
        import decoders

        prompts = [{name: value for name, value in item.items() if name != "id"} for item in items]
        done = decoders.generate_many(
            self.model, prompts, tokenizer=self.tokenizer, rows=self.rows, errors="keep", **self.arguments
        )
        return [_line(item["id"], completion) for item, completion in zip(items, done, strict=True)]


def write_part(folder: Path, names: list[str], lines: list[dict[str, Any]]) -> Path:
    """Writes the completions of the prompts `names`; a task that is run again writes the same file."""
    own = hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()
    path, draft = folder / f"part-{own}.jsonl", folder / f".part-{own}.{os.getpid()}"
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return path


def _line(name: Any, completion: Any) -> dict[str, Any]:
    if completion.error is not None:
        return {"id": name, "error": f"{type(completion.error).__name__}: {completion.error}"}
    return {"id": name, "text": completion.text, "tokens": completion.tokens}
