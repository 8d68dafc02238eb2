"""Shared parts of the commands: loading of models by name, and options for models, prompts and sampling."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.checkpoints import absent, is_gguf, load_model, load_tokenizer
from ..errors import DecodersError, SettingsError, UnknownNameError, canonical
from .catalogue import catalogue

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEMO = "demo"
#: The folder of a model or adapter contains at least one of these files.
_CONFIGS = ("config.json", "adapter_config.json")
log = logging.getLogger("decoders")


def known_dtype(name: str) -> str:
    """Returns `name`. Raises UnknownNameError if `name` is not one of :data:`DTYPES`."""
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return name


def known_strategy(names: str) -> str:
    """Checks the name of a strategy, or the names of merged strategies (``"a+b"``), before torch is imported. Returns `names`.

    Raises:
        UnknownNameError, PluginError: see :func:`decoders.registry.resolve_strategy`.
    """
    known = [item["name"] for item in catalogue("strategies")]
    for name in names.split("+"):
        if canonical(name) in known:
            continue
        if all(plugin["status"] == "loaded" for plugin in catalogue("plugins")):
            raise UnknownNameError("strategy", name.strip(), known)
        from ..registry import registry

        registry().strategy(name.strip())  # raises an error that names the plugin that failed
    return names


def known_strategies(names: list[str] | None) -> list[str] | None:
    """Checks each of `names`, the values of a repeatable option, with :func:`known_strategy`. None: not given. Returns `names`."""
    return names and [known_strategy(name) for name in names]


def known_place(name: str) -> str:
    """Checks a model's name (a demo model, a path, or a name on the Hub) before torch is imported. Returns the name.

    Raises:
        ModelLoadError: there is no such model; see :func:`load`.
    """
    if name.partition(":")[0] != DEMO:
        _check_name("Model", name)
    return name


def use_threads(number: int | None) -> int | None:
    """Sets the number of torch's CPU threads, unless `number` is None. Returns `number`."""
    if number is not None:
        import torch

        torch.set_num_threads(number)
    return number


#: Arguments and options that several commands have. Most commands that load a model have `Dtype`, `Device` and `Threads`.
ModelName = Annotated[
    str,
    typer.Argument(
        callback=known_place,
        help='Folder, Hub name or GGUF file of a causal language model; "demo" is the model in this package.',
    ),
]
Dtype = Annotated[
    str, typer.Option(callback=known_dtype, help="Model dtype: float32, bfloat16, float16 or auto (the checkpoint's).")
]
Device = Annotated[
    str | None, typer.Option(help="Device: cpu, cuda, cuda:1, mps, xpu … Default: cuda if available, otherwise cpu.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, callback=use_threads, help="Number of CPU threads. Default: PyTorch's own choice.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0, help="Sampling temperature; 0 is greedy. Default: greedy, unless another sampling option is given."
    ),
]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Sample from the smallest set of tokens with this total probability."),
]
Assistant = Annotated[
    str | None,
    typer.Option(
        help='Draft model, for strategies that need one: folder or Hub name; "demo" is the one in this package.'
    ),
]
AssistantTokenizer = Annotated[
    str | None,
    typer.Option(help="Tokenizer of the draft model, if its vocabulary differs from the target's: folder or Hub name."),
]
#: Default strategy and default dtype of the commands that generate texts. The dtype "auto" is the checkpoint's dtype.
STRATEGY, DTYPE = "auto", "auto"
StrategyName = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        callback=known_strategy,
        help="Decoding strategy (`decoders strategies` lists them); a+b merges the drafts of two.",
    ),
]
StrategySettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Setting of the strategy (for part a of a+b: a.KEY=VALUE). Repeatable."
    ),
]
CompiledSteps = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the decoding step with torch.compile.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ModelLoadError(DecodersError, OSError):
    """A model named on the command line cannot be loaded."""


def load(
    name: str, dtype: str = "float32", device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer. name: a folder, a name on the Hub, or a GGUF file. device: see :func:`device_called`.

    "demo" and "demo:target" are the demo model in this package, "demo:draft" is its draft model.

    Raises:
        UnknownNameError: no such dtype or demo model.
        SettingsError: no such device.
        ModelLoadError: no such model, or not a causal language model.
    """
    known_dtype(dtype)
    import torch

    place = device_called(device)  # a mistake is reported before the model is loaded
    torch_dtype: torch.dtype | str = "auto" if dtype == "auto" else getattr(torch, dtype)
    if name.partition(":")[0] == DEMO:
        from .. import demo

        model, tokenizer = demo.load(
            name.partition(":")[2] or "target", None if isinstance(torch_dtype, str) else torch_dtype
        )
        return moved_to(place, model), tokenizer
    options = _where_to_look("Model", name)
    try:
        tokenizer = load_tokenizer(name, **options)
        model = load_model(name, torch_dtype, **options)
    except (OSError, ValueError) as error:
        raise _load_error("Model", name, error, options) from error
    return moved_to(place, model), tokenizer


def load_processor(name: str) -> Any:
    """The processor of a vision model. None if the model has no processor for images, or if the processor needs a missing package."""
    if name.partition(":")[0] == DEMO or is_gguf(name):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name, **_where_to_look("Model", name))
    except ImportError as error:
        log.warning("images are refused: the processor of %r lacks a package: %s", name, error)
        return None
    except (OSError, ValueError):  # the checkpoint has no processor
        return None
    return processor if getattr(processor, "image_processor", None) is not None else None


def load_other_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer without a model, from a folder, the Hub, or a GGUF file. Raises ModelLoadError if there is none."""
    options = _where_to_look("Tokenizer", name)
    try:
        return load_tokenizer(name, **options)
    except (OSError, ValueError) as error:
        raise _load_error("Tokenizer", name, error, options) from error


def _where_to_look(kind: str, name: str) -> dict[str, bool]:
    """Arguments of ``from_pretrained``. If `name` is not a path and the Hub cannot be reached, only the Hub's cache is searched."""
    _check_name(kind, name)
    return {} if Path(name).exists() or _hub_answers() else {"local_files_only": True}


def _check_name(kind: str, name: str) -> None:
    """Raises ModelLoadError if `name` is neither a path nor a possible name on the Hub, or is a folder without a model."""
    place = Path(name)
    if place.is_dir() and kind == "Model" and not any((place / file).exists() for file in _CONFIGS):
        files = sorted(file.name for file in place.glob("*.gguf"))
        hint = f": name one of its GGUF files, as in {place / files[0]}" if files else ""
        raise ModelLoadError(f"Model {name!r} cannot be loaded: the folder has no {_CONFIGS[0]}{hint}")
    if (reason := absent(name)) is not None:
        raise ModelLoadError(f"{kind} {name!r} cannot be loaded: {reason}")


@functools.cache
def _hub_answers() -> bool:
    """Whether the Hub can be reached. If not, transformers would retry for a minute."""
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from transformers.utils.hub import is_offline_mode

    if is_offline_mode():
        return False
    try:
        with urlopen(Request(_hub(), method="HEAD"), timeout=5):
            return True
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the Hub answers, and its own client may accept the certificate
    except OSError:
        return False


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _load_error(kind: str, name: str, error: Exception, options: Mapping[str, bool]) -> ModelLoadError:
    if options:
        return ModelLoadError(
            f"{kind} {name!r} cannot be loaded: no folder is here, {_hub()} cannot be reached, and the hub's cache lacks it"
        )
    folder = Path(name)
    if (folder / _CONFIGS[0]).is_file() and not any(
        re.search(r"token|vocab|\.model$", file.name) for file in folder.iterdir()
    ):
        return ModelLoadError(
            f"{kind} {name!r} cannot be loaded: the folder has no tokenizer; tokenizer.save_pretrained writes one"
        )
    return ModelLoadError(f"{kind} {name!r} cannot be loaded: {error}")


def load_shape(name: str, dtype: str = "float32", device: str | None = None) -> PreTrainedModel:
    """A model with the shape `name` and random weights. Raises UnknownNameError, SettingsError: no such shape, dtype or device."""
    if dtype not in DTYPES[1:]:
        raise UnknownNameError("dtype", dtype, DTYPES[1:])
    import torch

    place = device_called(device)
    from ..bench.shapes import build

    return moved_to(place, build(name, getattr(torch, dtype)))


def load_assistant(
    name: str | None, model: str, dtype: str, needed: bool, device: str | None = None
) -> PreTrainedModel | None:
    """Loads the draft model `name`. Without name, loads the demo's draft model if `needed` and `model` is "demo", else returns None."""
    if name == DEMO or (name is None and needed and model == DEMO):
        name = f"{DEMO}:draft"
    return None if name is None else load(name, dtype, device)[0]


def needs_assistant(
    strategies: Sequence[str], assistant: str | None, model: str, settings: Mapping[str, Any] | None = None
) -> bool:
    """Whether one of `strategies` (``"a+b"`` merges two) needs ``assistant_model``.

    A strategy does not need it if its `settings` name a draft model.

    Raises:
        UnknownNameError, PluginError: no usable strategy has this name.
        SettingsError: a setting is wrong, or a draft model is needed but `assistant` is None and `model` is not the demo model.
    """
    from ..registry import resolve_strategy

    needing = [name for name in strategies if resolve_strategy(name, settings).needs_assistant]
    if needing and assistant is None and model != DEMO:
        raise SettingsError(f"strategy {needing[0]!r} needs a draft model: name one with --assistant")
    return bool(needing)


def device_called(device: str | None) -> torch.device:
    """The device called `device`. None: CUDA if available, else the CPU. Raises SettingsError if there is no such device."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        from ..common.devices import present

        said = str(error).splitlines()[0]
        if said.startswith("Expected one of"):  # shorter than torch's list of all kinds of devices
            said = "there is no such kind of device"
        raise SettingsError(f"--device {device}: {said}. This machine has {', '.join(present())}") from error


def moved_to(place: torch.device, model: PreTrainedModel) -> PreTrainedModel:
    """`model` on the device `place`."""
    return model.to(place)  # type: ignore[arg-type]  # transformers' wrapper of `to` is typed without `self`


def set_aside() -> None:
    """Exempts all present objects from Python's garbage collector, until ``gc.unfreeze()`` or the end of the process.

    A full garbage collection would visit all these objects. This takes up to a second, during which no request gets a token.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise Triton, from 3.9 on, lists these objects on stderr when the process ends


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt: the argument `prompt`, or the text of `prompt_file`. Or standard input, if both are None or `prompt` is "-".

    Raises:
        SettingsError: two prompts were given, or the prompt cannot be read, is empty or is not text.
    """
    if prompt is not None and prompt_file is not None:
        raise SettingsError("give the prompt or --prompt-file, not both")
    try:
        text = prompt_file.read_text(encoding="utf-8") if prompt_file else prompt
        if text is None or text == "-":
            if sys.stdin.isatty():
                typer.echo("the prompt, and then Ctrl-D:", err=True)
            text = sys.stdin.read()
        text.encode()  # raises if an argument had bytes that are not UTF-8, which appear as lone surrogates
    except UnicodeError as error:
        raise SettingsError(f"{prompt_file or 'the prompt'} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise SettingsError(f"{prompt_file} cannot be read: {error.strerror}") from error
    if not text:
        raise SettingsError(f"{prompt_file or 'the prompt'} is empty")
    return text


def sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None, seed: int | None
) -> dict[str, Any]:
    """The sampling arguments of ``generate``. Decoding is greedy if no option is given, or if the temperature is 0."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {name: value for name, value in options.items() if value is not None}
    if temperature == 0 or not options:
        if len(options) > 1:
            raise SettingsError("temperature 0 is greedy: leave out top-k, top-p and min-p")
        # These values replace the sampling defaults that checkpoints often have.
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    # transformers' own default, top_k=50, would silently restrict sampling.
    options.setdefault("top_k", 0)
    return {"do_sample": True, **options, **({"seed": seed} if seed is not None else {})}
