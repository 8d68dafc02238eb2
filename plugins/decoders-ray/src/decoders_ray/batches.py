"""Completes many prompts on a cluster with Ray Data: each actor loads the model, and the output folder lets a killed run continue."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Files of the output folder; each is written atomically.
PARTS = "part-*.jsonl"


def complete(
    prompts: Iterable[Mapping[str, Any]], output: str | Path, *,
    model: str | Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]], actors: int = 2, batch: int = 64, rows: int = 8,
    actor_options: dict[str, Any] | None = None, **arguments: Any,
) -> dict[str, int]:  # fmt: skip
    """Completes the prompts that `output` lacks. Returns counts: all ``prompts``, those completed ``earlier``, those ``written`` now,
    and the ``failed`` among the latter.

    Args:
        prompts: mappings, each with an ``id``, a ``prompt``, and arguments of ``generate`` for this prompt alone.
        output: a folder to which all actors can write. Its files hold a line of JSON per prompt: an object with ``id``, and either
            ``text`` and ``tokens``, or ``error``.
        model: a path, or a function that returns model and tokenizer.
        actors: number of processes, each with the model.
        batch: number of prompts per task. If an actor dies, its task is repeated.
        rows: number of rows that an actor decodes at a time.
        actor_options: options of Ray's actors: ``{"num_gpus": 1}``.
        arguments: arguments of ``generate`` for all prompts.

    Raises:
        ValueError: two prompts have the same id.
    """
    import ray

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [dict(prompt) for prompt in prompts]
    names = [str(prompt["id"]) for prompt in wanted]
    if len(set(names)) < len(names):
        raise ValueError(f"{len(names) - len(set(names))} ids are used twice: each prompt needs its own id")
    known = written(folder)
    left = [prompt for prompt, name in zip(wanted, names, strict=True) if name not in known]
    figures = {"prompts": len(wanted), "earlier": len(wanted) - len(left), "written": 0, "failed": 0}
    if not left:
        return figures
    # Prompts become lines of JSON, because a column of Ray Data has one type, and prompts have different arguments. Ray runs each block
    # as a task.
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
    """The completions in a folder's files, by the prompts' ids."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(PARTS)):
        for line in path.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            found[str(item["id"])] = item
    return found


class Completer:
    """An actor: it holds the model, completes prompts, and writes the completions to a folder."""

    def __init__(self, model: str | Callable[[], Any], folder: str, rows: int, arguments: dict[str, Any]) -> None:
        from .serving import load

        self.model, self.tokenizer = load(model) if isinstance(model, str) else model()
        self.folder, self.rows, self.arguments = Path(folder), rows, arguments

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Completes and writes a batch, and returns the prompts' ids and failures. batch: lines of JSON from :func:`complete`."""
        items = [json.loads(str(line)) for line in batch["line"]]
        lines = self.lines(items)
        write_part(self.folder, [str(item["id"]) for item in items], lines)
        return {"id": [line["id"] for line in lines], "failed": ["error" in line for line in lines]}

    def lines(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The completions of the prompts `items`, in their order, as objects for the output files."""
        import decoders

        prompts = [{name: value for name, value in item.items() if name != "id"} for item in items]
        done = decoders.generate_many(
            self.model, prompts, tokenizer=self.tokenizer, rows=self.rows, errors="keep", **self.arguments
        )
        return [_line(item["id"], completion) for item, completion in zip(items, done, strict=True)]


def write_part(folder: Path, names: list[str], lines: list[dict[str, Any]]) -> Path:
    """Writes the completions `lines` of the prompts with the ids `names`. A repeated task writes the same file."""
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
