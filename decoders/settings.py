"""One frozen pydantic class per strategy and verifier, and the loop's own. Values come from :mod:`.setting_sources`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import core_schema

from .deprecated import moved, warn
from .errors import SettingsError, suggest

#: Setting ``attention``.
Attention = Literal["auto", "sdpa", "triton"]


class Settings(BaseModel):
    """Base of every settings class: immutable, unknown names are errors, every field carries a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    #: Old names of settings, and what they are called now; both work until the next version.
    renamed: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates `values`; errors name the setting, its allowed values and the nearest match.

        Raises:
            SettingsError: unknown setting or value out of range.
        """
        try:
            return cls(**under_present_names(cls, values))
        except ValidationError as error:
            raise SettingsError(explained(cls, error, {})) from error


class Configured:
    """What is made of settings: strategies and verifiers.

    Args:
        settings: an instance of the class's `settings_class`; or its values as keywords.

    Raises:
        SettingsError: unknown setting or value out of range. TypeError: settings of another class, or given twice.
    """

    settings_class: ClassVar[type[Settings]] = Settings

    def __init__(self, settings: Settings | None = None, /, **values: Any) -> None:
        if settings is not None and values:
            raise TypeError("give either a settings object or keyword settings, not both")
        if settings is not None and not isinstance(settings, self.settings_class):
            raise TypeError(
                f"{type(self).__name__} takes {self.settings_class.__name__}, not {type(settings).__name__}"
            )
        self.settings: Any = settings if settings is not None else self.settings_class.parse(values)

    def settings_in_force(self) -> dict[str, Any]:
        """The settings as the report shows them, JSON-safe."""
        settings = getattr(self, "settings", None)  # a subclass with a constructor of its own may have none
        return settings.model_dump(mode="json") if settings is not None else {}

    def __repr__(self) -> str:
        settings = getattr(self, "settings", None)
        values = settings.model_dump() if settings is not None else {}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class Table(dict):
    """A mapping as the value of a setting: JSON-safe, and hashable, as frozen settings are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=repr))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.dict_schema(core_schema.str_schema()),
            serialization=core_schema.plain_serializer_function_ser_schema(_json_safe, when_used="json"),
        )


def _json_safe(value: Any) -> Any:
    """`value` with whatever JSON has no word for (a loaded model, say) as the name of its type."""
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


class RuntimeSettings(Settings):
    """How the shared loop runs, whatever the strategy."""

    strategy: str | None = Field(None, description="Strategy of an enabled model when the call names none.")
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="torch.compile: auto decodes uncompiled at once and compiles in the background when a model has been used "
        "so long that it pays; true compiles before the first step; false never compiles.",
    )
    reuse: bool = Field(
        True,
        description="Keep the last rows' keys and values: a prompt that begins as an earlier text is not read again.",
    )
    memory: bool = Field(
        True,
        description="Let strategies keep what they learn between calls (rates, statistics, texts); false starts every call cold. "
        "The tokens are the same.",
    )
    prune: bool = Field(
        True,
        description="Where rows share a step, leave out draft tokens that are not worth their time, by how often they are right and "
        "what nodes cost; false verifies all of them, so that equal calls take equal steps. The tokens are the same.",
    )
    weights: Literal["keep", "packed", "int8", "int4"] = Field(
        "keep",
        description="keep leaves the model as it is; packed frees the dense weights of which the engine has a packed copy: until "
        "decoders.release or decoders.disable the model can only be used with strategy=. int8 and int4 decode with quantized "
        "copies, which changes the text (on CPUs); the model itself is left as it is.",
    )
    draft_weights: Literal["auto", "keep", "int8", "int4"] = Field(
        "auto",
        description="Number format that draft models compute with, as weights has it; auto takes that of weights. Which tokens are "
        "drafted depends on it; which are written does not.",
    )
    kv_cache: Literal["keep", "int8"] = Field(
        "keep",
        description="int8 stores keys and values as int8 with a scale per head and token, which changes the text (on CPUs).",
    )
    prefill_chunk: int | None = Field(
        None,
        ge=1,
        description="Most prompt tokens per forward pass of the prefill; by default 512, and 2048 where each pass makes wider "
        "matrices of int4 weights.",
    )
    attention: Attention = Field(
        "auto",
        description="Attention of the target: triton is a kernel for CUDA whose cost follows the length of each row, sdpa PyTorch's "
        "with masks. auto takes triton on CUDA where the model's design allows it and its logits are right, else sdpa.",
    )
    exact_products: bool = Field(
        True,
        description="On CUDA, in bfloat16 and float16: multiply up to 128 rows, and compute norms, by kernels in which a row has the "
        "same bits however many there are, so that strategies write the tokens of plain decoding; false leaves that to PyTorch.",
    )

    @field_validator("attention", mode="before")
    @classmethod
    def _without_flex(cls, value: Any) -> Any:
        if value == "flex":
            warnings.warn(
                "attention='flex' is gone, since its logits were wrong on CUDA: 'auto' is taken", stacklevel=2
            )
            return "auto"
        return value

    slots: int | None = Field(None, ge=1, description="Least capacity of a call's cache, in tokens per row.")
    verifier: str = Field("coupled", description="Rule that decides which proposed tokens are accepted.")
    cost_cache: Path | None = Field(
        None,
        description="Folder that keeps measured costs of steps between processes; by default one in the user's cache folder.",
    )
    constraint_backend: str = Field("auto", description="What compiles a grammar that names no backend itself.")
    constraint_cache: Path | None = Field(None, description="Folder that keeps compiled grammars between processes.")
    constraint_seconds: float = Field(
        2.0, gt=0, description="Most time on the processor that compiling one grammar may take, in seconds."
    )


def parse_assignments(assignments: Sequence[str], place: str = "--set") -> dict[str, Any]:
    """``["max_ngram=4", "prompt_lookup.length=8"]`` as nested settings; a value is JSON, or else the text itself.

    Raises:
        SettingsError: an item without ``=``, or a name that is both a value and a table. `place` says where it stands.
    """
    settings: dict[str, Any] = {}
    for item in assignments:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"{place} takes key=value, not {item!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *tables, last = name.strip().replace("-", "_").split(".")
        table = settings
        for key in tables:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise SettingsError(f"{place} {item}: {key!r} already has a value")
        table[last] = value
    return settings


def under_present_names(cls: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the settings of `cls` that were renamed under the names they have now."""
    for old in values.keys() & cls.renamed.keys():
        warn(f"the setting {old!r} of {cls.__name__}", repr(cls.renamed[old]), stacklevel=4)
    return {cls.renamed.get(name, name): value for name, value in values.items()}


def explained(cls: type[Settings], error: ValidationError, origin: Mapping[str, str]) -> str:
    """The message of `error`. `origin` says for each setting where its value stands ("" for the call itself)."""
    problems = []
    for item in error.errors():
        field = ".".join(map(str, item["loc"]))
        place = origin.get(str(item["loc"][0]) if item["loc"] else "", "")
        if not item["loc"]:  # a rule between settings: any of them may be the culprit
            place = ", ".join(f"{name} {where}" for name, where in origin.items() if where)
        if item["type"] == "extra_forbidden":
            where = f" {place}" if place else ""
            problems.append(f"unknown setting {field!r}{where}. {suggest(field, cls.model_fields)}")
        else:
            where = f" ({place})" if place else ""
            problems.append(f"{field}: {item['msg']} (got {item.get('input')!r}){where}".removeprefix(": "))
    return f"{cls.__name__}: " + "; ".join(problems)


__getattr__ = moved(__name__, dict.fromkeys(("load_settings", "unknown_variables"), "decoders.setting_sources"))
