"""What Pydantic's JSON schemas leave out of a type and a schema can say: versions of UUIDs, time zones, digits of decimals."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from .rust_patterns import translated
from .schemas.formats import FORMATS
from .typed_dicts import readable

_UUID = "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-%d[0-9A-Fa-f]{3}-[89ABab][0-9A-Fa-f]{3}-[0-9A-Fa-f]{12}$"
_UUIDS = {f"uuid{version}": _UUID % version for version in range(1, 9)}
_NAIVE = rf"^(?:{FORMATS['date']})T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?$"
#: Most digits of a decimal that the schema counts. Floats hold 15; a number of more is left to the type.
_DIGITS = 15


def completed(schema: Any, kind: Any) -> Any:
    """`schema`, which :func:`~decoders.constraints.python_types.schema_of` has made of `kind`, with what Pydantic leaves out."""
    adapter = TypeAdapter(readable(kind))
    new = translated(adapter.json_schema(schema_generator=_Schemas), adapter.core_schema)
    return _completed(new, schema)


def _completed(new: Any, old: Any) -> Any:
    """`new` with the patterns that are anchored in `old`, and versions of UUIDs, which Pydantic tells as a format."""
    if isinstance(new, list):
        same = isinstance(old, list) and len(old) == len(new)
        return [_completed(*pair) for pair in zip(new, old if same else [None] * len(new), strict=True)]
    if not isinstance(new, dict):
        return old if old == f"^(?:{new})$" else new
    whole = {key: _completed(part, old.get(key) if isinstance(old, dict) else None) for key, part in new.items()}
    if whole.get("type") == "string" and (pattern := _UUIDS.get(str(whole.get("format")))):
        del whole["format"]
        whole["pattern"] = pattern
    return whole


class _Schemas(GenerateJsonSchema):
    """Schemas of Pydantic that say more where they can."""

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> dict[str, Any]:
        """Date and time; without an offset for those that must have none."""
        if schema.get("tz_constraint") == "naive":
            return {"type": "string", "pattern": _NAIVE}
        return super().datetime_schema(schema)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> dict[str, Any]:
        """A number, or one as a string. A string cannot be bounded: where there are bounds, only numbers are written."""
        arms = super().decimal_schema(schema).get("anyOf", [])
        number = next((arm for arm in arms if arm.get("type") == "number"), {"type": "number"})
        most, places = schema.get("max_digits"), schema.get("decimal_places")
        if conditions := _counted(most, places):
            number = number | {"allOf": [conditions]}
        if any(schema.get(name) is not None for name in ("gt", "ge", "lt", "le", "multiple_of")):
            return number
        return {"anyOf": [number, {"type": "string", "pattern": _spelled(most, places)}]}


def _counted(most: int | None, places: int | None) -> dict[str, Any]:
    """Keywords for numbers of so many digits, so many of them behind the point."""
    conditions: dict[str, Any] = {}
    if places is not None and places <= _DIGITS:
        conditions["multipleOf"] = json.loads(f"1e-{places}") if places else 1
    if most is not None and (whole := max(most - (places or 0), 0)) <= _DIGITS:
        conditions |= {"exclusiveMinimum": -(10**whole), "exclusiveMaximum": 10**whole}
    return conditions


def _spelled(most: int | None, places: int | None) -> str:
    """The pattern of such numbers in strings; how many digits there are on both sides together is left to the type."""
    whole = "[0-9]*" if most is None else f"[0-9]{{0,{most - (places or 0) - 1}}}"
    integer = "0" if most is not None and most <= (places or 0) else f"(?:0|[1-9]{whole})"
    behind = places if places is not None else most
    fraction = "" if behind == 0 else rf"(?:\.[0-9]{'+' if behind is None else f'{{1,{behind}}}'})?"
    return f"^-?{integer}{fraction}$"
