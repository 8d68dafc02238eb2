"""Loads small networks from a folder: reads config and weights, and checks that they fit each other. No code in the files is run.

Built-in strategies read their networks with these functions. Plugins can use them, too. :func:`find_network` finds the folder, a
:class:`FileConfig` reads ``config.json``, and :func:`filled` puts the weights of :func:`read_tensors` into the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..errors import SettingsError, UnsupportedError, shortened, suggest

__all__ = [
    "CONFIG", "Count", "FileConfig", "LlamaLayerConfig", "Positive", "Stamp", "Whole", "WindowedLayerConfig", "filled", "find_network",
    "read_json", "read_tensors", "stamp_of",
]  # fmt: skip


def _number(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("Input should be a number")
    return value


#: CONFIG: name of the config file in a network's folder. DEMO: selects the demo model's network in place of a folder.
CONFIG, DEMO = "config.json", "demo"

#: An integer in a config. ``6.0`` is accepted as an integer; ``"6"`` and ``true`` are errors.
Whole = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Whole, Field(ge=1)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]


class FileConfig(BaseModel):
    """Base of configs: a frozen pydantic model whose fields are read from a JSON file.

    Other fields of the file are ignored, and a field that is ``null`` counts as missing. :data:`Whole`, :data:`Count` and
    :data:`Positive` are types for numbers.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def of(cls, raw: object, place: str, kind: str) -> Self:
        """Returns the config with the values in `raw`, the parsed content of a JSON file.

        Args:
            place: the strategy and the file, with which messages begin: ``eagle3: /heads/config.json``.
            kind: what the file should contain, for messages: "config of an EAGLE-3 head".

        Raises:
            SettingsError: `raw` is not an object, lacks fields, or has a field of another type or out of range.
        """
        if not isinstance(raw, dict):
            raise SettingsError(f"{place} is not a {kind}: {shortened(json.dumps(raw))} is not an object")
        try:
            return cls.model_validate({name: value for name, value in raw.items() if value is not None})
        except ValidationError as error:
            problems = error.errors()
            wrong = [_explained(item) for item in problems if item["type"] != "missing"]
            missing = [_field(item) for item in problems if item["type"] == "missing"]
            what = f": {'; '.join(wrong)}" if wrong else f" is not a {kind}: it has no {', '.join(missing)}"
            raise SettingsError(f"{place}{what}") from error


def _field(problem: Any) -> str:
    return ".".join(map(str, problem["loc"]))


def _explained(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:  # a rule about several fields; its message names the fields
        return message
    return f"{_field(problem)}: {message} (got {shortened(repr(problem['input']))})"


class LlamaLayerConfig(FileConfig):
    """The config of decoder layers that are built from Llama's modules. Its fields are named as in ``LlamaConfig``."""

    hidden_size: Count
    num_attention_heads: Count
    intermediate_size: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count | None = None
    rms_norm_eps: Positive | None = None
    hidden_act: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    max_position_embeddings: Count | None = None
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    @field_validator("hidden_act")
    @classmethod
    def _known_activation(cls, name: str) -> str:
        if name not in ACT2FN:
            raise ValueError(f"Unknown activation. {suggest(name, ACT2FN)}")
        return name

    @field_validator("rope_scaling", "rope_parameters")
    @classmethod
    def _known_rope(cls, rope: dict[str, Any]) -> dict[str, Any]:
        kind, choices = rope.get("rope_type", rope.get("type", "default")), {"default", *ROPE_INIT_FUNCTIONS}
        if str(kind) not in choices:
            raise ValueError(f"Unknown rope_type {kind!r}. {suggest(str(kind), choices)}")
        return rope

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            raise ValueError(f"num_attention_heads is {heads}, which does not divide hidden_size, {width}")
        if heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}, which does not divide num_attention_heads, {heads}"
            )
        if (self.head_dim or width // heads) % 2:
            raise ValueError(f"head_dim is {self.head_dim or width // heads}, but rotary positions need an even number")
        return self

    def llama(self, place: str, **fields: Any) -> LlamaConfig:
        """This config as transformers' ``LlamaConfig``, with further `fields`. place: as in :meth:`of`.

        Raises:
            SettingsError: transformers rejects the config.
        """
        own = self.model_dump(include=set(LlamaLayerConfig.model_fields), exclude_none=True)
        try:
            config = LlamaConfig(**own | fields)
            LlamaRotaryEmbedding(config)
        except Exception as error:  # kinds of rotary positions raise different errors
            rope = [f"{name} is {own[name]!r}" for name in ("rope_scaling", "rope_parameters") if name in own]
            what = shortened(", ".join(rope) or "the layer's config", 120)
            raise SettingsError(
                f"{place}: {what}: transformers cannot build this Llama layer: {shortened(str(error), 300)}"
            ) from error
        return config


class WindowedLayerConfig(LlamaLayerConfig):
    """The config of decoder layers, some of which may have a sliding window."""

    num_hidden_layers: Whole = 1
    layer_types: list[str] | None = None
    sliding_window: Annotated[Whole, Field(ge=0)] | None = None
    use_sliding_window: bool = True

    def windows(self, place: str, everywhere: bool) -> tuple[int | None, ...]:
        """For each layer its ``sliding_window``, or None without a window; empty if no layer has a window. place: as in :meth:`of`.

        Args:
            everywhere: whether all layers of a config without ``layer_types`` have the window.

        Raises:
            UnsupportedError: there is no layer, or ``layer_types`` does not name a known type for every layer.
            SettingsError: a layer has a window, but ``sliding_window`` is missing.
        """
        count, window = self.num_hidden_layers, self.sliding_window
        windowed = everywhere and self.use_sliding_window and bool(window)
        types = self.layer_types or ["sliding_attention" if windowed else "full_attention"] * count
        if set(types) - {"full_attention", "sliding_attention"} or len(types) != count or not count:
            raise UnsupportedError(
                f"{place}: num_hidden_layers is {count}, and layer_types are {', '.join(types) or 'none'}: there must be at least one "
                "layer, and each must be full_attention or sliding_attention"
            )
        if "sliding_attention" not in types:
            return ()
        if not window:
            raise SettingsError(f"{place} has layers with a sliding window, but no field sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in types)


Network = TypeVar("Network", bound=nn.Module)
#: Name, modification time (ns) and size of each of several files.
Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(files: Iterable[Path]) -> Stamp:
    """A cache key that changes when one of `files` changes: the names, times and sizes of the files that exist."""
    return tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())


def find_network(named: str | None, config: Any, kind: str, what: str, argument: str, advice: str = "") -> Path:
    """The folder of a drafting network: `named`, or else the subfolder `kind` of the folder of the target, which has this `config`.

    Args:
        named: a path. ``demo`` stands for the network of this `kind` that comes with the demo model.
        kind: the strategy's name, which is also the name of the subfolder in the target's folder: "eagle3".
        what: the kind of network in messages: "a head".
        argument: the strategy's setting that names the folder.
        advice: how to get a network, for messages: "`my-command` makes one".

    Raises:
        UnsupportedError: no folder is named, and the target's folder has no such subfolder.
    """
    demo = Path(__file__).parent.parent / "demo" / "models" / "target" / kind
    if named == DEMO and demo.is_dir():
        return demo
    own = getattr(config, "name_or_path", "")
    if named is None and own and (Path(own) / kind / CONFIG).is_file():
        return Path(own) / kind
    if named is None:
        raise UnsupportedError(
            f"{kind} needs {what} trained for the model: name its folder as {argument}=, or keep it as {kind!r} in the model's own "
            f"folder{advice and f'; {advice}'}"
        )
    return Path(named).expanduser()


def read_json(path: Path, missing: str, owner: str) -> Any:
    """The content of a JSON file.

    Args:
        missing: text of the error if the file cannot be read: "there is no head at …".
        owner: the strategy, for messages.

    Raises:
        SettingsError: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{owner}: {missing}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{owner}: {path} is not JSON: {error}") from error


def read_tensors(path: Path, owner: str) -> dict[str, Tensor]:
    """Reads weights by name, on the CPU, from a safetensors file, or from a pickle that torch's ``weights_only`` loader can read.

    Raises:
        SettingsError: the file cannot be read, or holds no mapping of names to tensors.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # readers raise errors of many kinds for damaged files
        raise SettingsError(f"{owner}: {path} cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise SettingsError(f"{owner}: {path} must hold a mapping of names to tensors, not a {type(state).__name__}")
    return state


def filled(
    network: Network, state: dict[str, Tensor], place: Path, owner: str, device: torch.device, dtype: torch.dtype
) -> Network:
    """Loads the weights `state` into `network`, and returns it frozen, on `device` and in `dtype`.

    Args:
        state: all weights of the network by name, and no others.
        place: the weights' file, for messages.
        owner: the strategy, for messages.

    Raises:
        SettingsError: names or shapes of the weights differ from the network's.
    """
    expected = network.state_dict()
    wrong = sorted(
        [f"{name} is missing" for name in expected.keys() - state.keys()]
        + [f"{name} has no place" for name in state.keys() - expected.keys()]
        + [
            f"{name} is {list(state[name].shape)}, not {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in state and state[name].shape != tensor.shape
        ]
    )
    if wrong:
        raise SettingsError(f"{owner}: the weights in {place} do not fit its config: {'; '.join(wrong[:4])}")
    network.load_state_dict(state)
    network.requires_grad_(False)
    return network.to(device=device, dtype=dtype).eval()
