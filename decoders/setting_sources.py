"""Where the values of settings come from: call, generation config, environment, file.

The loop's own settings are :class:`~decoders.settings.RuntimeSettings`: ``DECODERS_COMPILE=0``, or ``compile = false`` at the top of
``decoders.toml``. A strategy's are a *section*: ``DECODERS_PROMPT_LOOKUP_MAX_NGRAM=4``, or a table ``[prompt_lookup]``.
In ``pyproject.toml`` the same stands under ``[tool.decoders]``.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from .errors import SettingsError, suggest
from .settings import RuntimeSettings, Settings, explained, under_present_names

#: Names after ``DECODERS_`` that are no settings: where the file is, the plugin lists, and the key of `decoders serve`.
NOT_SETTINGS = ("config", "plugins_block", "plugins_allow", "plugins_strict", "api_key")

S = TypeVar("S", bound=Settings)


def variable_of(section: str | None, name: str) -> str:
    """The environment variable of a setting."""
    return "_".join(["DECODERS", *([section] if section else []), name]).upper()


#: Variables that the loop and the registry read; no strategy's setting can have one.
OWN_VARIABLES = {variable_of(None, name): name for name in (*RuntimeSettings.model_fields, *NOT_SETTINGS)}


def load_settings(
    cls: type[S],
    section: str | None,
    call: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    *,
    sections: Collection[str] = (),
) -> S:
    """Settings in force: call > generation config > environment > file > default. Each setting is taken whole.

    Args:
        cls: what to fill.
        section: the strategy it belongs to, None for the loop's own.
        call: values given in the call.
        generation_config: values found in the generation config.
        sections: all section names there are. They tell ``DECODERS_PROMPT_LOOKUP_LENGTH`` (of ``prompt_lookup``) from a
            setting ``lookup_length`` of ``prompt``, and a misspelt table from that of an absent plugin.

    Raises:
        SettingsError: unknown setting or bad value, naming the variable or file it stands in; unreadable file.
    """
    section = section.replace("-", "_") if section else None
    known = {name.replace("-", "_") for name in sections} | ({section} if section else set())
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def take(source: Mapping[str, Any], place: str) -> None:
        for name, value in under_present_names(cls, source).items():
            values[name] = value
            origin[name] = place

    path, content = _file()
    if content:
        take(_file_values(content, section, known, path), f"in {path}" + (f" [{section}]" if section else ""))
    environment = under_present_names(cls, _environment(cls, section, known))
    for name, value in environment.items():
        values[name], origin[name] = value, f"from environment variable {variable_of(section, name)}"
    take(generation_config, "in the generation config")
    take(call, "")
    try:
        return cls(**values)
    except ValidationError as error:
        raise SettingsError(explained(cls, error, origin)) from error


def unknown_variables(sections: Collection[str]) -> list[str]:
    """``DECODERS_*`` variables that are set and that neither the loop nor any of `sections` reads."""
    prefixes = tuple(variable_of(name.replace("-", "_"), "") for name in sections)
    return sorted(
        v for v in os.environ if v.startswith("DECODERS_") and v not in OWN_VARIABLES and not v.startswith(prefixes)
    )


def _environment(cls: type[Settings], section: str | None, known: Collection[str]) -> dict[str, Any]:
    """Values that the environment gives to `section`, still unvalidated."""
    prefix = variable_of(section, "")
    names = {key[len(prefix) :].lower() for key in os.environ if key.upper().startswith(prefix)}
    if section:
        names = {name for name in names if variable_of(section, name) not in OWN_VARIABLES}
    if not names:  # the usual case, and this runs in every generate
        return {}
    # What belongs to a section with a longer name ("prompt_lookup" beside "prompt") is not ours.
    start = f"{section}_" if section else ""
    others = tuple(f"{name[len(start) :]}_" for name in known if name.startswith(start) and name != section)
    names = {name for name in names if not name.startswith(others)}
    for name in sorted(names - set(cls.model_fields) - cls.renamed.keys()):
        variable = variable_of(section, name)
        if section:
            raise SettingsError(
                f"{cls.__name__}: unknown setting {name!r} from environment variable {variable}. "
                f"{suggest(name, cls.model_fields)}"
            )
        # At top level other programs may own DECODERS_* variables: only a likely misspelling is an error.
        near = difflib.get_close_matches(name, [*cls.model_fields, *NOT_SETTINGS], n=1, cutoff=0.8)
        if name not in NOT_SETTINGS and near:
            raise SettingsError(f"unknown environment variable {variable}. Did you mean {variable_of(None, near[0])}?")
    renamed = {name: os.environ.get(variable_of(section, name), "") for name in names & cls.renamed.keys()}
    if not names & set(cls.model_fields):
        return renamed
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
    # pydantic-settings reports under the field's name whatever the section's longer-named neighbours hold.
    return renamed | {name: value for name, value in values.items() if name in names}


def _file() -> tuple[Path | None, dict[str, Any]]:
    """The configuration file in force and its content: DECODERS_CONFIG, ./decoders.toml or ./pyproject.toml."""
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
    """Content of `path`; modification time and size are in the key, so an edited file is read again."""
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
    """What the file says about `section`; settings of the loop are the keys outside any table."""
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
