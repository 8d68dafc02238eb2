"""``decoders generate --input … --output …``: completes the prompts of a file in batches. A run that was killed can be resumed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import DecodersError, SettingsError, amount, shortened

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..scheduling.lines import InputLine
    from ..scheduling.many import Completion, Prompt
    from ..scheduling.outputs import OutputLines


def check_files(input: Path | None, output: Path | None, prompt: str | None, prompt_file: Path | None) -> bool:
    """Whether the options name a file of prompts and a file of completions, rather than one prompt.

    Raises:
        SettingsError: only one file is named, a prompt is also given, both files are the same, or the input cannot be read twice.
    """
    from ..scheduling.lines import check_file

    if input is None and output is None:
        return False
    if input is None or output is None:
        raise SettingsError("--input and --output go together: prompts from one file, completions to the other")
    if prompt is not None or prompt_file is not None:
        raise SettingsError("give --input, or a prompt, not both")
    check_file(input)
    if output.exists() and os.path.samefile(input, output):
        raise SettingsError("--input and --output are one file: completions would stand among the prompts")
    return True


@dataclass(frozen=True)
class Task:
    """The prompts to complete.

    Attributes:
        input: file of the prompts.
        out: file of the completions.
        total: number of prompts.
        left: number of prompts that have no completion at the start of this run.
        failed: number of prompts that failed in an earlier run and are tried again.
        options: the options that change the completions, see :func:`options_of_texts`.
    """

    input: Path
    out: OutputLines
    total: int
    left: int
    failed: int
    options: Mapping[str, Any]

    @staticmethod
    def of(input: Path, out: OutputLines, options: Mapping[str, Any]) -> Task:
        """The task of completing the prompts in `input`.

        Checks that the completions in `out` belong to these prompts, and that earlier runs had the same `options`.

        Raises:
            SettingsError: files or options do not match, or the input cannot be read.
        """
        from ..scheduling.lines import input_lines

        total = left = 0
        for line in input_lines(input):
            total += 1
            left += not out.check(line)
        out.check_count(total)
        out.check_options(options)
        return Task(input, out, total, left, len(out.failed), options)

    def lines(self) -> Iterator[InputLine]:
        """The lines of the prompts that have no completion yet."""
        from ..scheduling.lines import input_lines

        return (line for line in input_lines(self.input) if not self.out.check(line))


def complete_file(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, rows: int, slots: int, ordered: bool,
    chat: bool, given: Mapping[str, Any], arguments: dict[str, Any], console: Console, as_json: bool,
) -> int:  # fmt: skip
    """Completes the remaining prompts, prints totals and speed, and returns the number of prompts that were rejected or failed.

    Args:
        given: the command's sampling options by name; None if an option was not given.
        arguments: arguments of ``generate`` for all prompts.

    Raises:
        typer.Exit: completions cannot be written. The exit code is 1.
        SettingsError: the number of prompts has changed.
    """
    import json

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..enabling import enabled
    from ..scheduling.many import generate_many

    ready = enabled(model)
    pending: dict[int, tuple[InputLine, Any]] = {}
    earlier = task.total - task.left
    written, failed, first_error, tokens, row_steps, begun = 0, 0, "", 0, 0, time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()

    def prompts() -> Iterator[Prompt]:
        for place, line in enumerate(task.lines()):
            prompt, name = _prompt(line, tokenizer, chat, given)
            pending[place] = line, name
            yield prompt

    completions = generate_many(
        model, prompts(), tokenizer=tokenizer, rows=rows, slots=slots, ordered=ordered, errors="keep", **arguments
    )
    with Progress(*columns, console=console) as progress, closing(completions):
        bar = progress.add_task("", total=task.total, completed=earlier)
        for done in completions:
            item = _item(*pending.pop(done.index), task.options, done)
            try:
                task.out.write(item)
            except OSError as error:
                raise _unwritable(task.out, error, written) from error
            written += 1
            failed += done.error is not None
            first_error = first_error or item.get("error", "")
            tokens += len(done.tokens)
            if done.report is not None:
                row_steps += sum(done.report.accepted_lengths)
            seconds = time.perf_counter() - begun - ready.prepared_since(begun)
            speed = f"{tokens / seconds:.1f} tokens/s, {tokens / max(row_steps, 1):.2f} per step"
            progress.update(bar, advance=1, description=speed + (f", {failed} failed" if failed else ""))
    if written != task.left:
        raise SettingsError(
            f"{task.input} has changed during the run: {written} of {amount(task.left, 'prompt')} without completion are now "
            "completed. Run the same command again"
        )
    startup = ready.prepared_since(begun)
    seconds = time.perf_counter() - begun - startup
    figures = {
        "prompts": task.total, "completed": task.left - failed, "failed": failed, "earlier": earlier, "retried": task.failed,
        "tokens": tokens, "startup_seconds": round(startup, 3), "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "mean_accepted_length": round(tokens / max(row_steps, 1), 3),
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        console.print(
            f"{task.left - failed} of {amount(task.total, 'prompt')} completed"
            + (f", {earlier} were before" if earlier else "")
            + (f", {task.failed} had failed and were tried again" if task.failed else "")
            + (f", {failed} failed (see their lines; the first: {shortened(first_error, 200)})" if failed else "")
            + f": {amount(tokens, 'token')} in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s; {startup:.1f} s to prepare the model",
            highlight=False,
        )
    return failed


def _unwritable(out: OutputLines, error: OSError, written: int) -> typer.Exit:
    """Prints that completions cannot be written, and how to continue. Returns the exception to raise."""
    typer.secho(
        f"error: {out.path} cannot be written: {error.strerror}. It contains {amount(written, 'completion')} of this run; "
        "the same command continues after them",
        fg="red",
        err=True,
    )
    return typer.Exit(1)


def _prompt(
    line: InputLine, tokenizer: PreTrainedTokenizerBase, chat: bool, given: Mapping[str, Any]
) -> tuple[Prompt, Any]:  # fmt: skip
    """Returns the line's prompt with its arguments, or an error if the line has no valid prompt. Also returns the line's id.

    With ``--seed``, a line without a seed gets the sum of this seed and the line's number, the same in every run.
    """
    import json

    from ..prompts.templates import encode_messages
    from ..scheduling.lines import parsed

    name = None
    try:
        item = parsed(line)
        name = item.pop("id", None)
        json.dumps(name)  # fails if the id cannot be written as JSON
        item.pop("kind", None)
        messages = item.pop("messages", None)
        if messages is None and chat:
            messages = [{"role": "user", "content": item["prompt"]}]
        if messages is not None:
            if not tokenizer.chat_template:
                raise SettingsError(f"{line.place}: messages need a chat template, and the tokenizer has none")
            item["prompt"] = encode_messages(tokenizer, messages).input_ids
        item = _sampling(item, given) | item
    except RecursionError:
        return SettingsError(f"{line.place}: nested too deeply"), None
    except DecodersError as error:
        return error, name
    except Exception as error:  # templates raise exceptions of any class
        return SettingsError(f"{line.place}: {type(error).__name__}: {error}"), name
    if given["seed"] is not None:
        item.setdefault("seed", given["seed"] + line.number)
    return item, name


def _sampling(item: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling arguments of the line `item`; empty if it sets none. Options in `given` are added, unless its temperature is 0."""
    from .models import sampling

    own = {name: item[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in item}
    if not own:
        return {}
    others = {} if own.get("temperature") == 0 else given
    return sampling(**{**dict.fromkeys(given), **others, **own, "seed": None})


def options_of_texts(
    model: str, dtype: str, max_new_tokens: int, given: Mapping[str, Any], grammar: str | None, chat: bool
) -> dict[str, Any]:  # fmt: skip
    """The options that change the texts of a run, by name: model, dtype, number of tokens, and others that are not at their default."""
    from ..registry import registry
    from ..settings import RuntimeSettings, load_settings

    options: dict[str, Any] = {"model": str(Path(model).resolve()) if Path(model).exists() else model, "dtype": dtype}
    options["max_new_tokens"] = max_new_tokens
    options |= {
        name: value for name, value in given.items() if value is not None and (name, value) != ("temperature", 0)
    }
    if grammar is not None:
        file = Path(grammar)
        content = f", {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" if file.is_file() else ""
        options["grammar"] = file.name + content
    if chat:
        options["chat"] = True
    runtime = load_settings(RuntimeSettings, None, {}, {}, sections=registry().strategies())
    for name in ("weights", "kv_cache", "verifier"):
        if (value := getattr(runtime, name)) != RuntimeSettings.model_fields[name].default:
            options[name] = value
    return options


def _item(line: InputLine, name: Any, options: Mapping[str, Any], done: Completion) -> dict[str, Any]:
    item = {"index": line.number, "input": line.mark, "options": options} | ({"id": name} if name is not None else {})
    if done.error is not None:
        return item | {"error": f"{type(done.error).__name__}: {done.error}"}
    assert done.report is not None
    text = done.text
    return item | {
        "text": text, "tokens": len(done.tokens), "prompt_tokens": done.report.prompt_tokens[0], "steps": done.report.steps,
        "mean_accepted_length": round(done.report.mean_accepted_length, 3),
    }  # fmt: skip
