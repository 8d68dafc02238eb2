"""``decoders generate``: completes a prompt and prints the text while it is generated, or completes a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import library
from ..errors import SettingsError
from .console import plain_console, waiting
from .models import (
    DTYPE,
    STRATEGY,
    Assistant,
    AssistantTokenizer,
    Device,
    Dtype,
    ModelName,
    StrategyName,
    StrategySettings,
    Temperature,
    Threads,
    TopK,
    TopP,
)

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..report import Report


def generate(
    model: ModelName,
    prompt: Annotated[str | None, typer.Argument(help="Prompt to complete. Default: read from standard input.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Read the prompt from a file.")
    ] = None,
    strategy: StrategyName = STRATEGY,
    settings: StrategySettings = None,
    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar",
            "-g",
            help="Constrain the output to a grammar: a name in the library (`decoders grammars` lists them), or a .json "
            "(JSON schema), .regex or .lark file.",
        ),
    ] = None,
    assistant: Assistant = None,
    assistant_tokenizer: AssistantTokenizer = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of new tokens.")
    ] = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Drop tokens less likely than this fraction of the most likely token's probability."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Sampling seed. The same seed gives the same text under every exact strategy.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template to the prompt.")] = False,
    dtype: Dtype = DTYPE,
    device: Device = None,
    threads: Threads = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Run torch.compile before the first step, or never. Default: in the background, once a model has run long "
            "enough for it to pay.",
        ),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text while it is generated.")] = True,
    input: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="File of prompts: .jsonl (each line with prompt, text or messages, and optional arguments) or .txt (one "
            "prompt per line). It is read twice, so a pipe does not work.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the completions to this file as JSON lines. Another run with the same model and options resumes it "
            "and retries failed prompts.",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="With --input: maximum number of prompts decoded at once (batch size).")
    ] = 8,
    slots: Annotated[
        int, typer.Option(min=1, help="With --input: maximum number of tokens of a prompt and its completion together.")
    ] = 4096,
    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered/--as-they-end",
            help="With --input: write completions in the order of the prompts, or each as soon as it ends.",
        ),
    ] = True,
    report: Annotated[
        bool, typer.Option("--report", help="Print a report of the call (speed, acceptance …) to standard error.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the text and the report as JSON, and nothing else.")
    ] = False,
) -> None:
    """Complete a prompt, or with --input a file of prompts. The text goes to standard output, everything else to standard error."""
    if grammar is not None:
        library.check_file(grammar)  # before torch is imported
    from ..settings import parse_assignments
    from . import models
    from .many import Task, check_files, complete_file, options_of_texts

    # Mistakes are reported before minutes go into loading a model.
    many = check_files(input, output, prompt, prompt_file)
    prompt_text = "" if many else models.read_prompt(prompt, prompt_file)
    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    arguments: dict[str, Any] = models.sampling(**given)
    arguments["strategy_config"] = parse_assignments(settings or [])
    console = plain_console(stderr=True, quiet=as_json)
    with waiting(console, "importing torch and transformers"):
        if grammar is not None:
            from ..constraints import Spec, refuse_invalid
            from ..registry import grammar_or_file

            arguments["grammar"] = given_grammar = grammar_or_file(grammar)
            if isinstance(given_grammar, Spec):
                refuse_invalid(given_grammar.language())
        needs_draft = models.needs_assistant([strategy], assistant, model, arguments["strategy_config"])

    def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        with waiting(console, f"loading {model}"):
            import decoders

            loaded, tokenizer = models.load(model, dtype, device)
            draft = models.load_assistant(assistant, model, dtype, needs_draft, device)
            decoders.enable(loaded, tokenizer=tokenizer)
        if draft is not None:
            arguments["assistant_model"] = draft
        if assistant_tokenizer is not None:
            arguments["assistant_tokenizer"] = models.load_other_tokenizer(assistant_tokenizer)
        if compile is not None:  # without the option, the environment and the configuration file apply
            arguments["decoders_config"] = {"compile": compile}
        return loaded, tokenizer

    if input is not None and output is not None:
        from ..scheduling.outputs import OutputLines

        options = options_of_texts(model, dtype, max_new_tokens, given, grammar, chat)
        with OutputLines(output) as out:
            task = Task.of(input, out, options)
            loaded, tokenizer = load()
            arguments |= {"strategy": strategy, "max_new_tokens": max_new_tokens}
            failed = complete_file(
                loaded, tokenizer, task, rows, slots, ordered, chat, given, arguments, console, as_json
            )
        if failed:
            raise typer.Exit(1)
        return
    loaded, tokenizer = load()
    if stream and not as_json:
        from .live import PrintedPieces

        arguments["streamer"] = PrintedPieces(tokenizer)
    if chat and not tokenizer.chat_template:
        raise SettingsError(f"--chat: the tokenizer of {model} has no chat template")
    if chat:
        from ..prompts.templates import encode_messages

        inputs = encode_messages(tokenizer, [{"role": "user", "content": prompt_text}], return_tensors="pt")
    else:
        inputs = tokenizer(prompt_text, return_tensors="pt")
    inputs = inputs.to(loaded.device)
    result: Any = loaded.generate(  # type: ignore[operator]
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        strategy=strategy,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        **arguments,
    )
    from ..common.pieces import text_behind

    tokens, length = result.sequences[0].tolist(), inputs["input_ids"].shape[1]
    completion = text_behind(tokenizer, tokens[:length], tokens[length:])
    if as_json:
        import json

        typer.echo(json.dumps({"text": completion, "report": result.report.as_dict()}, indent=2, default=str))
        return
    if not stream:
        typer.echo(completion)
    if report:
        show_report(result.report, console)


def show_report(report: Report, console: Console) -> None:
    """Prints the main figures, one per line. Then prints the text coloured by drafter, and how many steps produced 1, 2, … tokens."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, pad_edge=False, box=None)
    for name, value in report.lines():
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    if report.written is not None and (colours := report.written.colours()):
        legend = Text(", ").join(Text(name, style=f"bold {colour}") for name, colour in colours.items())
        pieces = ((text, f"bold {colours[who]}" if who else "") for text, who in report.written.pieces())
        console.print(Text.assemble("\ndrafted by ", legend, ":\n", *pieces))
    most = max(report.accepted_lengths, default=0)
    full, little = "#." if console.options.ascii_only else "█▏"
    for tokens, count in enumerate(report.accepted_lengths, 1):
        console.print(Text(f"{tokens:>3} {full * round(40 * count / most) or little * (count > 0)} {count}"))
