"""What a ``config.json`` says, checked when it is read: errors name the file, the field and what it may be."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..errors import SettingsError, shortened, suggest


def _number(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("Input should be a number")
    return value


#: ``6.0`` is a whole number, ``"6"`` and ``true`` are none.
Whole = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Whole, Field(ge=1)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]


class FileConfig(BaseModel):
    """What is read of a file; all else in it is of no use. A field that is ``null`` is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def of(cls, raw: object, place: str, kind: str) -> Self:
        """The fields of `raw`, which a JSON file holds.

        Args:
            place: who reads it and which file, for messages: ``eagle3: /heads/config.json``.
            kind: what the file should be: "config of an EAGLE-3 head".

        Raises:
            SettingsError: it is no object, lacks fields, or has one that is of another type or out of range.
        """
        if not isinstance(raw, dict):
            raise SettingsError(
                f"{place} is no {kind}: it holds {shortened(json.dumps(raw))}, and names with values are looked for"
            )
        try:
            return cls.model_validate({name: value for name, value in raw.items() if value is not None})
        except ValidationError as error:
            problems = error.errors()
            wrong = [_explained(item) for item in problems if item["type"] != "missing"]
            missing = [_field(item) for item in problems if item["type"] == "missing"]
            what = f": {'; '.join(wrong)}" if wrong else f" is no {kind}: it has no {', '.join(missing)}"
            raise SettingsError(f"{place}{what}") from error


def _field(problem: Any) -> str:
    return ".".join(map(str, problem["loc"]))


def _explained(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:  # a rule between fields, which names them
        return message
    return f"{_field(problem)}: {message} (got {shortened(repr(problem['input']))})"


class LlamaLayerConfig(FileConfig):
    """Of decoder layers that are made of Llama's parts."""

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
            raise ValueError(f"head_dim is {self.head_dim or width // heads}, and rotary positions need an even one")
        return self

    def llama(self, place: str, **fields: Any) -> LlamaConfig:
        """The same for transformers' modules, with `fields` of the caller's beside them.

        Raises:
            SettingsError: transformers makes no rotary positions of it; `place` as in :meth:`of`.
        """
        own = self.model_dump(include=set(LlamaLayerConfig.model_fields), exclude_none=True)
        try:
            config = LlamaConfig(**own | fields)
            LlamaRotaryEmbedding(config)
        except Exception as error:  # each kind of rotary positions has parameters of its own, and errors
            rope = [f"{name} is {own[name]!r}" for name in ("rope_scaling", "rope_parameters") if name in own]
            what = shortened(", ".join(rope) or "the layer's config", 120)
            raise SettingsError(
                f"{place}: {what}, and transformers makes no Llama layer of it: {shortened(str(error), 300)}"
            ) from error
        return config
