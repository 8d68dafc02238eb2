"""``decoders serve``: serves a model with an OpenAI-compatible API."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingsError, UnsupportedError, installing
from .console import plain_console, waiting
from .models import (
    DTYPE,
    STRATEGY,
    CompiledSteps,
    Device,
    Dtype,
    ModelName,
    StrategySettings,
    Threads,
    known_strategy,
    set_aside,
)

if TYPE_CHECKING:
    from ..prompts.reading import Content

#: Environment variable that holds the API keys if ``--api-key`` is not given.
VARIABLE = "DECODERS_API_KEY"


def serve(
    model: ModelName,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=VARIABLE, show_envvar=True,
            help="API key that clients must send. Repeatable; in the environment variable, separate keys by spaces.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Model name that clients use (vLLM's --served-model-name). Default: the last part of MODEL."),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", "-s", callback=known_strategy,
            help="Decoding strategy of requests that name none; a+b merges the drafts of two.",
        ),
    ] = STRATEGY,
    settings: StrategySettings = None,
    assistant: Annotated[
        str | None,
        typer.Option(help='Draft model, for strategies that use one: folder or Hub name; "demo" is the one in this package.'),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="Jinja file with a chat template. Default: the tokenizer's."
        ),
    ] = None,
    thinking: Annotated[
        str | None,
        typer.Option(
            metavar="BEGIN END",
            help='Markers around reasoning, such as "<think> </think>". Default: detected, for many models.',
        ),
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format in which the model writes tool calls. Default: detected from the chat template."),
    ] = None,
    suffix_corpus: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True,
            help="File of texts similar to the expected output, from which strategies suffix and auto draft for all "
            "clients: text, or JSON lines with text or messages.",
        ),
    ] = None,
    dtype: Dtype = DTYPE,
    compile: CompiledSteps = True,
    device: Device = None,
    threads: Threads = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Maximum number of requests decoded at once, per strategy (vLLM's --max-num-seqs).")
    ] = 8,
    slots: Annotated[
        int,
        typer.Option(
            min=2, help="Maximum number of tokens of a request, prompt and completion together (vLLM's --max-model-len)."
        ),
    ] = 4096,
    queue: Annotated[
        int, typer.Option(min=1, help="Maximum number of waiting requests, per strategy; further requests get status 429.")
    ] = 64,
    strategies: Annotated[int, typer.Option(min=1, help="Maximum number of strategies, beside --strategy, that run at once.")] = 4,
    client_settings: Annotated[
        list[str] | None,
        typer.Option(
            show_default="bounded",
            help="Strategy settings that clients may set: bounded (switches, choices, and numbers with limits), none, "
            "STRATEGY.SETTING or STRATEGY.SETTING=MIN..MAX. Repeatable.",
        ),
    ] = None,
    sharing: Annotated[
        bool,
        typer.Option(
            "--sharing/--no-sharing",
            help="Share cached prefixes, and earlier outputs to draft from, among requests with the same API key and cache_salt.",
        ),
    ] = True,
    connections: Annotated[
        int, typer.Option(min=1, help="Maximum number of open connections; further connections get status 503.")
    ] = 512,
    read_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds within which a request, headers and body, must arrive.")
    ] = 20.0,
    max_body: Annotated[int, typer.Option(min=1, help="Maximum size of a request body, in bytes.")] = 1 << 20,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of prompt tokens.")] = 3072,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens per completion.")] = 1024,
    max_choices: Annotated[int, typer.Option(min=1, help="Maximum number of completions per request: prompts times n.")] = 8,
    deadline: Annotated[float, typer.Option(min=0.001, help="Time limit of a request, in seconds; then it gets status 504.")] = 600.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running requests have to finish after SIGTERM or Ctrl-C.")] = 30.0,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Host name under which clients may reach the server, beside localhost. Repeatable.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Log level: critical, error, warning, info (one line per request) or debug.")
    ] = "warning",
) -> None:  # fmt: skip
    """Serve a model with an OpenAI-compatible API: completions, chat, responses, streaming, structured output and tools.

    The server also has /health, /metrics, and a page to try the model.
    """
    from ..settings import parse_assignments

    check_installed()
    keys = _keys(api_key)
    if log_level not in ("critical", "error", "warning", "info", "debug"):
        raise SettingsError(f"--log-level must be critical, error, warning, info or debug, not {log_level!r}")

    from ..prompts.templates import format_named, read_template
    from ..server.client_settings import ClientSettings
    from ..server.limits import LOOPBACK, Limits, hosts_of

    limits = Limits(
        body=max_body, prompt_tokens=max_prompt_tokens, new_tokens=max_tokens, choices=max_choices, deadline=deadline, rows=rows,
        slots=slots, queue=queue, schedulers=strategies, connections=connections, read=read_timeout, sharing=sharing,
        client_settings=tuple(client_settings or ("bounded",)),
    )  # fmt: skip
    ClientSettings(limits.client_settings)  # reports errors before a model is loaded
    config = parse_assignments(settings or [])
    template = read_template(chat_template) if chat_template is not None else None
    markers = _markers(thinking) if thinking is not None else None
    if tool_format is not None:
        format_named(tool_format)
    corpus = [] if suffix_corpus is None else _corpus(suffix_corpus)
    _check_address(host, port)
    console = plain_console(stderr=True)
    if host not in LOOPBACK and not keys:
        console.print(
            f"warning: anybody who reaches {host} can use this server; --api-key asks for a key", style="yellow"
        )
    with waiting(console, f"loading {model}") as status:
        from ..server.app import make_app
        from ..server.running import Server
        from ..server.service import Service
        from . import models

        needs_draft = models.needs_assistant([strategy], assistant, model, config)
        loaded, tokenizer = models.load(model, dtype, device)
        service = Service(
            loaded, tokenizer, name=name or model.rstrip("/").rpartition("/")[2], strategy=strategy, strategy_config=config,
            assistant=models.load_assistant(assistant, model, dtype, needs_draft, device), limits=limits,
            chat_template=template, thinking=markers, tool_format=tool_format, config=None if compile else {"compile": False},
            processor=models.load_processor(model),
        )  # fmt: skip
        status.update("writing a first token, and one with every strategy that needs heads or layers")
        service.warm_up()
        if corpus:
            from ..enabling import remember
            from ..prompts.reading import encode

            remember(loaded, texts=[encode(tokenizer, content) for content in corpus])
    server = Server(
        make_app(service, keys, hosts_of(host, allow_host or [])), service, host=host, port=port, grace=grace, log_level=log_level,
    )  # fmt: skip
    server.announce = lambda place: console.print(
        f"{service.name} at {place}/v1, a page to try it at {place}/", soft_wrap=True
    )
    set_aside()
    # After the server has ended because of a signal, uvicorn sends the same signal to this process again.
    signal.signal(signal.SIGTERM, _leave)
    with suppress(KeyboardInterrupt):
        server.run()


def _check_address(host: str, port: int) -> None:
    """Raises SettingsError if the server cannot listen at `host` and `port`. uvicorn would raise only after the model is loaded."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in places:
            try:
                socket.create_server(address[:2], family=family).close()
            except OSError as error:  # without IPv6, one of localhost's two addresses fails
                if len(places) == 1 or error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (")[0]
        free = "; --port 0 takes a free port" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise SettingsError(f"the server cannot listen at {host}, port {port}: {reason}{free}") from error


def _leave(*_: Any) -> None:
    """Ends the process immediately, because the interpreter's own shutdown takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _keys(given: list[str] | None) -> list[str]:
    """The API keys in `given`, without surrounding blanks. Empty if none were given.

    Raises:
        SettingsError: a key is empty, or the environment variable is set but empty, which is most likely a mistake.
    """
    if not given and VARIABLE in os.environ:
        raise SettingsError(f"{VARIABLE} is set and holds no key: unset it, or give a key")
    keys = [key.strip() for key in given or []]
    if not all(keys):
        raise SettingsError("the API key is empty: leave it out, or give one")
    return keys


def _markers(given: str) -> tuple[str, str]:
    """The two markers of ``--thinking``. Raises SettingsError for another number of markers."""
    parts = given.split()
    if len(parts) != 2:
        raise SettingsError(f'--thinking {given!r} has {len(parts)} markers: give two, as in "<think> </think>"')
    return parts[0], parts[1]


def check_installed() -> None:
    """Raises UnsupportedError if a package that the server needs is not installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"{error.name} is not installed: {installing('serve')}") from error


def _corpus(path: Path) -> list[Content]:
    """The texts in the file of ``--suffix-corpus``. Raises SettingsError if the file has no texts, or an unknown format."""
    from ..prompts.reading import read_file

    try:
        contents = [content for _, content in read_file(path) if content]
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--suffix-corpus {path} is neither text nor JSON lines with text or messages: {error}"
        ) from error
    if not contents:
        raise SettingsError(f"--suffix-corpus {path}: there is no text in it")
    return contents
