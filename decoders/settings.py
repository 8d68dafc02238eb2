"""Settings: a frozen pydantic class for each strategy and verifier, and one for the loop.

Values come from the call, the generation config, ``enable()``, the environment and a file. A setting of the loop
(:class:`RuntimeSettings`) is written as ``DECODERS_COMPILE=0``, or as ``compile = false`` at the top of ``decoders.toml``. The settings
of a strategy form a *section*: they are written as ``DECODERS_PROMPT_LOOKUP_MAX_NGRAM=4``, or in a table ``[prompt_lookup]`` of the
file. If there is no ``decoders.toml``, the table ``[tool.decoders]`` of ``pyproject.toml`` is read instead.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import core_schema

from .errors import SettingsError, canonical, suggest

#: Values of the setting ``attention``.
Attention = Literal["auto", "sdpa", "triton"]


class Settings(BaseModel):
    """Base of every settings class. Instances are immutable, unknown names raise an error, and every field has a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Returns settings with `values`. Raises SettingsError for a wrong value, or for an unknown name, with the nearest match."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError(_explained(cls, error, {})) from error


class Configured:
    """Base of classes with settings: strategies and verifiers.

    Args:
        settings: an instance of `settings_class`. The values can be given as keywords instead.

    Raises:
        SettingsError: a setting is unknown, or its value is out of range.
        TypeError: the settings object has another class, or keywords are given with it.
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
        """The value of each setting, by name, for the report; values have JSON's types."""
        settings = getattr(self, "settings", None)  # a subclass with its own constructor may have none
        return settings.model_dump(mode="json") if settings is not None else {}

    def __repr__(self) -> str:
        settings = getattr(self, "settings", None)
        values = settings.model_dump() if settings is not None else {}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class Table(dict):
    """A dict as the value of a setting. It is JSON-safe, and hashable because settings are frozen."""

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
    """`value` in JSON's types. Any other object, such as a loaded model, is replaced by the name of its type."""
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def _without_packed(weights: Any) -> Any:
    """Replaces the former value "packed" of ``RuntimeSettings.weights`` by "keep", with a warning."""
    if weights == "packed":
        _warn_of_packed()
        return "keep"
    return weights


@cache
def _warn_of_packed() -> None:
    warnings.warn("weights='packed' no longer exists and counts as 'keep': set weights='keep'", stacklevel=2)


class RuntimeSettings(Settings):
    """Settings of the decoding loop. All strategies share them."""

    strategy: str | None = Field(
        None,
        description="Default strategy of an enabled model, for calls that name none. None: these calls run transformers' own "
        "generate.",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="torch.compile. auto: decode uncompiled at first, and compile in the background for later calls once a "
        "model has run long enough for it to pay. true: compile before the first step. false: never compile.",
    )
    reuse: bool = Field(
        True,
        description="Prefix caching: keep the KV cache of the last rows, so that a prefix that a prompt shares with an "
        "earlier text is not computed again.",
    )
    memory: bool = Field(
        True,
        description="Let strategies keep between calls what they learn: acceptance rates, statistics, texts. false: every "
        "call starts without it. The output tokens are the same.",
    )
    prune: bool = Field(
        True,
        description="On CPUs: skip draft tokens that are not worth verifying, by acceptance rates and measured costs. false: "
        "verify all draft tokens, so that equal calls take equal steps. The output tokens are the same.",
    )
    weights: Annotated[Literal["keep", "16bit", "int8", "int4"], BeforeValidator(_without_packed)] = Field(
        "keep",
        description="keep: compute with the model's own weights. 16bit (CPUs): copy float32 weights to 16 bits where this is "
        "lossless, as for most checkpoints; half of the bytes are read, and the text is the same. int8, int4 "
        "(CPUs): compute with quantized copies, which changes the text. The model itself does not change.",
    )
    draft_weights: Literal["auto", "keep", "16bit", "int8", "int4"] = Field(
        "auto",
        description="The same as `weights`, for draft models. auto: the value of `weights`. It changes the draft tokens, not "
        "the output tokens.",
    )
    kv_cache: Literal["keep", "int8"] = Field(
        "keep",
        description="keep: the KV cache has the model's dtype. int8 (CPUs): keys and values are stored as int8 with a scale "
        "per head and token, which changes the text.",
    )
    prefill_chunk: int | None = Field(
        None, ge=1, description="Chunked prefill: maximum number of prompt tokens per forward pass. None: 512."
    )
    attention: Attention = Field(
        "auto",
        description="Attention of the target. sdpa: PyTorch's attention with masks. triton: a CUDA kernel whose cost follows "
        "the length of each row. auto: a kernel (triton on CUDA, C++ on CPUs) if it supports the model and its "
        "logits pass a check, else sdpa.",
    )
    exact_products: bool = Field(
        True,
        description="On CUDA, in bfloat16 and float16: use batch-invariant kernels for norms and for matrix products of up to "
        "128 rows, so that strategies generate the tokens of plain decoding. false: PyTorch's kernels.",
    )
    trace: bool = Field(
        False,
        description="Keep the draft tree of every step in the report; `print(out.report.tree(0))` draws it. On CUDA, whole "
        "steps are then not captured as CUDA graphs.",
    )

    slots: int | None = Field(
        None, ge=1, description="Minimum length of a call's KV cache, in tokens per row. None: what the call needs."
    )
    verifier: str = Field(
        "coupled", description="Rule that decides which draft tokens are accepted; `decoders verifiers` lists them."
    )
    cost_cache: Path | None = Field(
        None,
        description="Folder in which the measured costs of steps are kept between processes. None: one in the user's cache folder.",
    )
    constraint_backend: str = Field(
        "auto", description="Grammar backend of grammars that name none; `decoders grammar-backends` lists them."
    )
    constraint_cache: Path | None = Field(
        None,
        description="Folder in which compiled grammars are kept between processes. None: they are kept in memory only.",
    )
    constraint_seconds: float = Field(
        2.0, gt=0, description="Time limit for compiling a grammar, in seconds of CPU time."
    )


def parse_assignments(assignments: Sequence[str], place: str = "--set") -> dict[str, Any]:
    """Parses ``["max_ngram=4", "prompt_lookup.length=8"]`` to nested settings. A value that is not JSON is a string.

    Raises:
        SettingsError: an item has no ``=``, or a name has both a value and a table. The error names `place` as the origin.
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


#: What error messages say about the origin of a setting that was given to :func:`decoders.enable`.
ENABLED = "given to enable()"


def _explained(
    cls: type[Settings], error: ValidationError, origin: Mapping[str, str], strategies: Collection[str] = ()
) -> str:
    """The message for `error`. origin: where the value of each setting comes from ("" for the call). strategies: all strategy names."""
    problems, alternatives = [], defaultdict(list)
    for item in error.errors():  # a value of a union type has one error per type, which together are one problem
        whole = item["loc"][:1] + tuple(part for part in item["loc"][1:] if isinstance(part, int))
        alternatives[whole, id(item["input"])].append(item)
    for (whole, _), (item, *others) in alternatives.items():
        field = ".".join(map(str, whole if others else item["loc"]))
        place = origin.get(str(item["loc"][0]) if item["loc"] else "", "")
        if not item["loc"]:  # a rule about several settings, any of which may be wrong
            place = ", ".join(f"{name} {where}" for name, where in origin.items() if where)
        if item["type"] == "extra_forbidden":
            where = f" {place}" if place else ""
            beside = ("tokenizer", "strategy_config") if place == ENABLED else ()
            hint = suggest(field, [*cls.model_fields, *beside])
            if field in RuntimeSettings.model_fields:
                hint = f"It is a setting of the loop: decoders_config={{{field!r}: …}}"
            elif cls is RuntimeSettings and canonical(field) in strategies:
                hint = f"It is a strategy, whose settings stand apart: strategy={field!r}, strategy_config={{'setting': …}}"
            problems.append(f"unknown setting {field!r}{where}. {hint}")
        else:
            where = f" ({place})" if place else ""
            said = ", or ".join(dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in (item, *others)))
            problems.append(f"{field}: {said} (got {item['input']!r}){where}".removeprefix(": "))
    return f"{cls.__name__}: " + "; ".join(problems)


#: Names of ``DECODERS_…`` variables that are not settings: the settings file, lists of plugins, the server's API key, CPU kernels.
NOT_SETTINGS = ("config", "plugins_block", "plugins_allow", "plugins_strict", "api_key", "cpu_kernels")

S = TypeVar("S", bound=Settings)


def variable_of(section: str | None, name: str) -> str:
    """The name of a setting's environment variable. section: the strategy's name; None for the loop's settings."""
    return "_".join(["DECODERS", *([section] if section else []), name]).upper()


#: The variables of the loop and of the registry, each with its setting's name. They are never read as settings of a strategy.
OWN_VARIABLES = {variable_of(None, name): name for name in (*RuntimeSettings.model_fields, *NOT_SETTINGS)}


def load_settings(
    cls: type[S], section: str | None, call: Mapping[str, Any], generation_config: Mapping[str, Any], *,
    enabled: Mapping[str, Any] | None = None, sections: Collection[str] = (),
) -> S:  # fmt: skip
    """The settings in force: call > generation config > ``enable()`` > environment > file > default. Tables are replaced, not merged.

    Args:
        section: the strategy's name; None for the loop's settings.
        call, generation_config, enabled: values in the call, in the generation config, and in ``decoders.enable``.
        sections: all section names. They tell whether ``DECODERS_PROMPT_LOOKUP_LENGTH`` is the setting ``length`` of ``prompt_lookup``
            or the setting ``lookup_length`` of ``prompt``. A table whose name resembles a section's name is an error.

    Raises:
        SettingsError: a setting is unknown or its value is wrong (the error names its variable or file), or the file is unreadable.
    """
    values, origin = _surroundings(cls, section, sections)
    for source, place in ((enabled, ENABLED), (generation_config, "in the generation config"), (call, "")):
        values.update(source or {})
        origin.update(dict.fromkeys(source or {}, place))
    try:
        return cls(**values)
    except ValidationError as error:
        raise SettingsError(_explained(cls, error, origin, sections)) from error


def origins(cls: type[Settings], section: str | None, *, sections: Collection[str] = ()) -> dict[str, str]:
    """The origin of each setting in a call without settings: variable, file or "default". Raises errors like :func:`load_settings`."""
    load_settings(cls, section, {}, {}, sections=sections)
    return dict.fromkeys(cls.model_fields, "default") | _surroundings(cls, section, sections)[1]


def _surroundings(
    cls: type[Settings], section: str | None, sections: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Two dicts by setting: the unvalidated values of `section` from environment and file, and the origin of each value."""
    section = section.replace("-", "_") if section else None
    known = {name.replace("-", "_") for name in sections} | ({section} if section else set())
    path, content = settings_file()
    values = _file_values(content, section, known, path) if content else {}
    origin = dict.fromkeys(values, f"in {path}" + (f" [{section}]" if section else ""))
    for name, value in _environment(cls, section, known).items():
        values[name], origin[name] = value, f"from environment variable {variable_of(section, name)}"
    return values, origin


def unknown_variables(sections: Collection[str]) -> list[str]:
    """The ``DECODERS_*`` variables of this environment that neither the loop nor a strategy in `sections` reads."""
    prefixes = tuple(variable_of(name.replace("-", "_"), "") for name in sections)
    return sorted(
        v for v in os.environ if v.startswith("DECODERS_") and v not in OWN_VARIABLES and not v.startswith(prefixes)
    )


def _environment(cls: type[Settings], section: str | None, known: Collection[str]) -> dict[str, Any]:
    """The unvalidated values of `section` from the environment."""
    prefix = variable_of(section, "")
    names = {key[len(prefix) :].lower() for key in os.environ if key.upper().startswith(prefix)}
    if section:
        names = {name for name in names if variable_of(section, name) not in OWN_VARIABLES}
    if not names:  # the usual case, in every call of generate
        return {}
    # Variables of a section "prompt_lookup" also begin with the prefix of a section "prompt", which must not read them.
    start = f"{section}_" if section else ""
    others = tuple(f"{name[len(start) :]}_" for name in known if name.startswith(start) and name != section)
    names = {name for name in names if not name.startswith(others)}
    for name in sorted(names - set(cls.model_fields)):
        variable = variable_of(section, name)
        if section:
            raise SettingsError(
                f"{cls.__name__}: unknown setting {name!r} from environment variable {variable}. "
                f"{suggest(name, cls.model_fields)}"
            )
        # Other programs may have DECODERS_* variables, so only a likely misspelling of a setting of the loop is an error.
        near = difflib.get_close_matches(name, [*cls.model_fields, *NOT_SETTINGS], n=1, cutoff=0.8)
        if name not in NOT_SETTINGS and near:
            raise SettingsError(f"unknown environment variable {variable}. Did you mean {variable_of(None, near[0])}?")
    if not names & set(cls.model_fields):
        return {}
    from pydantic_settings import EnvSettingsSource
    from pydantic_settings import SettingsError as SourceError

    try:
        values = EnvSettingsSource(cls, env_prefix=prefix, env_ignore_empty=True)()  # type: ignore[arg-type]
    except SourceError as error:  # a list or table that is not JSON
        field = next((name for name in sorted(names) if f'"{name}"' in str(error)), "")
        variable = variable_of(section, field)
        raise SettingsError(
            f"{cls.__name__}: {field} from environment variable {variable} must be JSON, such as '[1, 2]' or "
            f"'{{\"name\": 1}}', not {os.environ.get(variable, '')!r} ({error.__cause__ or error})"
        ) from error
    # pydantic-settings also reads variables of sections with longer names. `names` does not contain these variables.
    return {name: value for name, value in values.items() if name in names}


def settings_file() -> tuple[Path | None, dict[str, Any]]:
    """Path and content of the configuration file: DECODERS_CONFIG, ./decoders.toml or ./pyproject.toml. ``None, {}`` without a file."""
    named = os.environ.get("DECODERS_CONFIG")
    for path in [Path(named)] if named else [Path("decoders.toml"), Path("pyproject.toml")]:
        try:
            state = path.stat()
        except OSError as error:
            if named:
                raise SettingsError(
                    f"DECODERS_CONFIG names {named!r}, which cannot be read: {error.strerror}"
                ) from error
            continue
        content = _read(path.absolute(), state.st_mtime_ns, state.st_size)
        if content or named or path.name != "pyproject.toml":
            return path.absolute(), content
    return None, {}


@lru_cache(maxsize=8)
def _read(path: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    """The content of `path`. Time and size are part of the cache key, so that an edited file is read again."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if path.name == "pyproject.toml":
        tools = content.get("tool", {})
        content = tools.get("decoders", {}) if isinstance(tools, dict) else {}
        if not isinstance(content, dict):
            raise SettingsError(f"tool.decoders in {path} must be a table [tool.decoders], not {content!r}")
    return {key.replace("-", "_"): value for key, value in content.items()}


def _file_values(
    content: dict[str, Any], section: str | None, known: Collection[str], path: Path | None
) -> dict[str, Any]:
    """The file's values for `section`. Keys outside of tables are the loop's settings."""
    if section is None:
        for name, value in content.items():
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if isinstance(value, dict) and name not in known and near:
                raise SettingsError(f"unknown table [{name}] in {path}. Did you mean [{near[0]}]?")
        return {name: value for name, value in content.items() if not isinstance(value, dict)}
    table = content.get(section, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{section} in {path} must be a table [{section}], not {table!r}")
    return {key.replace("-", "_"): value for key, value in table.items()}
