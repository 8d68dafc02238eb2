"""``decoders generate --input … --output …``: a file of prompts, completed together, into a file that a killed run goes on with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import DecodersError, SettingsError, shortened

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..serving.lines import InputLine
    from ..serving.many import Completion, Prompt
    from ..serving.outputs import OutputLines


def check_files(input: Path | None, output: Path | None, prompt: str | None, prompt_file: Path | None) -> bool:
    """Whether a file of prompts is asked for.

    Raises:
        SettingsError: half of it is, or both are one file.
    """
    if input is None and output is None:
        return False
    if input is None or output is None:
        raise SettingsError("--input and --output go together: prompts from one file, completions to the other")
    if prompt is not None or prompt_file is not None:
        raise SettingsError("give --input, or a prompt, not both")
    if output.exists() and os.path.samefile(input, output):
        raise SettingsError("--input and --output are one file: completions would stand among the prompts")
    return True


@dataclass(frozen=True)
class Task:
    """What there is to do.

    Attributes:
        input: the prompts.
        out: the completions.
        total: prompts.
        left: of these, those that are not completed.
        failed: of these, those that have failed before.
    """

    input: Path
    out: OutputLines
    total: int
    left: int
    failed: int

    @staticmethod
    def of(input: Path, out: OutputLines) -> Task:
        """Compares both files.

        Raises:
            SettingsError: they do not go together, or the input cannot be read.
        """
        from ..serving.lines import input_lines

        total = left = 0
        for line in input_lines(input):
            total += 1
            left += not out.check(line)
        out.check_count(total)
        return Task(input, out, total, left, len(out.failed))

    def lines(self) -> Iterator[InputLine]:
        """The prompts that are left."""
        from ..serving.lines import input_lines

        return (line for line in input_lines(self.input) if not self.out.check(line))


def complete_file(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, rows: int, slots: int, ordered: bool,
    chat: bool, arguments: dict[str, Any], console: Console, as_json: bool,
) -> int:  # fmt: skip
    """Completes what is left, says what it took, and counts the prompts that were refused or failed.

    Raises:
        typer.Exit: with 1, completions cannot be written.
    """
    import json

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..serving.many import generate_many

    pending: dict[int, tuple[InputLine, Any]] = {}
    earlier = task.total - task.left
    written, failed, first_error, tokens, row_steps, begun = 0, 0, "", 0, 0, time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()

    def prompts() -> Iterator[Prompt]:
        for place, line in enumerate(task.lines()):
            prompt, name = _prompt(line, tokenizer, chat, arguments)
            pending[place] = line, name
            yield prompt

    completions = generate_many(
        model, prompts(), tokenizer=tokenizer, rows=rows, slots=slots, ordered=ordered, errors="keep", **arguments
    )
    with Progress(*columns, console=console) as progress, closing(completions):
        bar = progress.add_task("", total=task.total, completed=earlier)
        for done in completions:
            item = _item(*pending.pop(done.index), done)
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
            seconds = time.perf_counter() - begun
            speed = f"{tokens / seconds:.1f} tokens/s, {tokens / max(row_steps, 1):.2f} per step"
            progress.update(bar, advance=1, description=speed + (f", {failed} failed" if failed else ""))
    seconds = time.perf_counter() - begun
    figures = {
        "prompts": task.total, "completed": task.left - failed, "failed": failed, "earlier": earlier, "retried": task.failed,
        "tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 2),
        "mean_accepted_length": round(tokens / max(row_steps, 1), 3),
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        console.print(
            f"{task.left - failed} of {task.total} prompts completed"
            + (f", {earlier} were before" if earlier else "")
            + (f", {task.failed} had failed and were tried again" if task.failed else "")
            + (f", {failed} failed (see their lines; the first: {shortened(first_error, 200)})" if failed else "")
            + f": {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s",
            highlight=False,
        )
    return failed


def _unwritable(out: OutputLines, error: OSError, written: int) -> typer.Exit:
    """Says that nothing can be written, and what to do."""
    typer.secho(
        f"error: {out.path} cannot be written: {error.strerror}. The {written} completions of this run before that are in it; "
        "the same command goes on behind them",
        fg="red",
        err=True,
    )
    return typer.Exit(1)


def _prompt(
    line: InputLine, tokenizer: PreTrainedTokenizerBase, chat: bool, arguments: dict[str, Any]
) -> tuple[Prompt, Any]:  # fmt: skip
    """A prompt with its arguments, or the error that it is, and its id. Each draws with a seed of its own, the same in every run."""
    import json

    from ..serving.lines import parsed

    name = None
    try:
        item = parsed(line)
        name = item.pop("id", None)
        json.dumps(name)  # whether it can be written
        item.pop("kind", None)
        messages = item.pop("messages", None)
        if messages is None and chat:
            messages = [{"role": "user", "content": item["prompt"]}]
        if messages is not None:
            if not tokenizer.chat_template:
                raise SettingsError(f"{line.place}: messages need a chat template, and the tokenizer has none")
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            # The template writes the special tokens itself.
            item["prompt"] = tokenizer(text, add_special_tokens=False).input_ids
    except RecursionError:
        return SettingsError(f"{line.place}: nested too deeply"), None
    except DecodersError as error:
        return error, name
    except Exception as error:  # a template raises what it likes
        return SettingsError(f"{line.place}: {type(error).__name__}: {error}"), name
    if arguments.get("seed") is not None:
        item.setdefault("seed", arguments["seed"] + line.number)
    return item, name


def _item(line: InputLine, name: Any, done: Completion) -> dict[str, Any]:
    item = {"index": line.number, "input": line.mark} | ({"id": name} if name is not None else {})
    if done.error is not None:
        return item | {"error": f"{type(done.error).__name__}: {done.error}"}
    assert done.report is not None
    text = done.text
    return item | {
        "text": text, "tokens": len(done.tokens), "prompt_tokens": done.report.prompt_tokens[0], "steps": done.report.steps,
        "mean_accepted_length": round(done.report.mean_accepted_length, 3),
    }  # fmt: skip
