"""``decoders generate --input … --output …``: a file of prompts, completed together, into a file that a killed run goes on with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import SettingsError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..serving.many import Completion


def check_files(input: Path | None, output: Path | None, prompt: str | None, prompt_file: Path | None) -> bool:
    """Whether a file of prompts is asked for.

    Raises:
        SettingsError: half of it is.
    """
    if input is None and output is None:
        return False
    if input is None or output is None:
        raise SettingsError("--input and --output go together: prompts from one file, completions to the other")
    if prompt is not None or prompt_file is not None:
        raise SettingsError("give --input, or a prompt, not both")
    return True


def complete_file(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, input: Path, output: Path, rows: int, slots: int, ordered: bool,
    chat: bool, arguments: dict[str, Any], console: Console, as_json: bool,
) -> None:  # fmt: skip
    """Completes what `output` lacks, and says what it took. Exits with 1 if a prompt was refused or failed."""
    import json

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..serving.lines import OutputLines, input_lines, mark
    from ..serving.many import generate_many

    total = sum(1 for _ in input_lines(input))
    pending: dict[int, tuple[int, str, Any]] = {}
    failed, tokens, row_steps, begun = 0, 0, 0, time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with OutputLines(output) as out, Progress(*columns, console=console) as progress:
        before = sum(1 for _ in _left(input, out, total))
        task = progress.add_task("", total=total, completed=total - before)

        def prompts() -> Iterator[dict[str, Any]]:
            for place, (number, line) in enumerate(_left(input, out, total)):
                item = _item(input, number, line, tokenizer, chat, arguments)
                pending[place] = number, mark(line), item.pop("id", None)
                yield item

        for done in generate_many(
            model, prompts(), tokenizer=tokenizer, rows=rows, slots=slots, ordered=ordered, errors="keep", **arguments
        ):
            number, own_mark, name = pending.pop(done.index)
            out.write(_line(number, own_mark, name, done))
            failed += done.error is not None
            tokens += len(done.tokens)
            if done.report is not None:
                row_steps += sum(done.report.accepted_lengths)
            seconds = time.perf_counter() - begun
            speed = f"{tokens / seconds:.1f} tokens/s, {tokens / max(row_steps, 1):.2f} per step"
            progress.update(task, advance=1, description=speed)
    seconds = time.perf_counter() - begun
    figures = {
        "prompts": total, "completed": before - failed, "failed": failed, "earlier": total - before, "tokens": tokens,
        "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 2),
        "mean_accepted_length": round(tokens / max(row_steps, 1), 3),
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        console.print(
            f"{before - failed} of {total} prompts completed"
            + (f", {total - before} were before" if total > before else "")
            + (f", {failed} failed (see their lines)" if failed else "")
            + f": {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"
        )
    if failed:
        raise typer.Exit(1)


def _left(input: Path, out: Any, total: int) -> Iterator[tuple[int, str]]:
    """The prompts that the output lacks."""
    from ..serving.lines import input_lines

    if any(number >= total for number in out.done):
        raise SettingsError(f"{out.path} was written from a longer input: name another --output, or move it away")
    for number, line in input_lines(input):
        if not out.check(number, line):
            yield number, line


def _item(
    input: Path, number: int, line: str, tokenizer: PreTrainedTokenizerBase, chat: bool, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A prompt and its arguments. Each draws with a seed of its own, the same in every run."""
    from ..serving.lines import parsed

    item = parsed(input, number, line)
    item.pop("kind", None)
    messages = item.pop("messages", None)
    if messages is None and chat:
        messages = [{"role": "user", "content": item["prompt"]}]
    if messages is not None:
        if not tokenizer.chat_template:
            raise SettingsError(
                f"{input}, prompt {number + 1}: messages need a chat template, and the tokenizer has none"
            )
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        item["prompt"] = tokenizer(text, add_special_tokens=False).input_ids
    if arguments.get("seed") is not None:
        item.setdefault("seed", arguments["seed"] + number)
    return item


def _line(number: int, own_mark: str, name: Any, done: Completion) -> dict[str, Any]:
    item = {"index": number, "input": own_mark} | ({"id": name} if name is not None else {})
    if done.error is not None:
        return item | {"error": f"{type(done.error).__name__}: {done.error}"}
    assert done.report is not None
    text = done.text
    return item | {
        "text": text, "tokens": len(done.tokens), "prompt_tokens": done.report.prompt_tokens[0], "steps": done.report.steps,
        "mean_accepted_length": round(done.report.mean_accepted_length, 3),
    }  # fmt: skip
