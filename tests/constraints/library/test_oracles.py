"""Random texts of the ready grammars are what others read, and what others write is accepted."""

from __future__ import annotations

import ast
import csv
import ipaddress
import json
import re
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date, datetime, time, timedelta, timezone
from io import StringIO
from urllib.parse import urlsplit

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from decoders.constraints import library

Accepts = Callable[[str, str], bool]
Texts = Callable[..., Iterator[str]]
OFFSETS = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
PLAIN = st.text(st.characters(blacklist_categories=["Cc", "Cs"]))


FINITE = st.floats(allow_nan=False, allow_infinity=False)


def json_values(numbers: SearchStrategy[float]) -> SearchStrategy[object]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | PLAIN,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PLAIN, inner, max_size=4),
        max_leaves=10,
    )


JSON = json_values(FINITE)
# Numbers of schemas have exponents of up to 307.
MODERATE = json_values(FINITE.filter(lambda number: number == 0 or 1e-307 <= abs(number) <= 1e307))
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**39), 10**39) | FINITE | PLAIN | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
LITERALS = st.recursive(
    HASHABLE
    | st.complex_numbers(allow_nan=False, allow_infinity=False).map(lambda z: complex(abs(z.real), abs(z.imag))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


def sums(depth: int = 3) -> SearchStrategy[str]:
    number = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)
    if not depth:
        return number
    inner = sums(depth - 1)
    operator = st.sampled_from(["+", "-", "*", "/", "%", " + ", " - ", " * ", "* "])
    return (
        number | inner.map("({})".format) | inner.map("(-({}))".format) | st.tuples(inner, operator, inner).map("".join)
    )


@st.composite
def tables(draw: st.DrawFn) -> str:
    words = st.text("abcXYZ019éß東_*`<", min_size=1, max_size=5)
    cell = st.lists(words, min_size=1, max_size=3).map(" ".join)
    columns = draw(st.integers(1, 8))
    row = st.lists(cell, min_size=columns, max_size=columns).map(
        lambda cells: "".join(f"| {each} " for each in cells) + "|"
    )
    rule = st.lists(st.sampled_from(["---", ":---", "---:", ":---:"]), min_size=columns, max_size=columns)
    return "\n".join(
        [draw(row), "".join(f"| {each} " for each in draw(rule)) + "|", *draw(st.lists(row, min_size=1, max_size=3))]
    )


WRITTEN: dict[str, SearchStrategy[str]] = {
    "arithmetic": sums(),
    "csv_row": st.lists(PLAIN, min_size=2, max_size=8).map(lambda row: csv_line(row)),
    "ipv4": st.ip_addresses(v=4).map(str),
    "ipv6": st.ip_addresses(v=6).map(str) | st.ip_addresses(v=6).map(lambda address: address.exploded),
    "iso_date": st.dates().map(date.isoformat),
    "iso_datetime": st.datetimes(timezones=OFFSETS).map(datetime.isoformat),
    "iso_time": st.times().map(time.isoformat) | st.times(timezones=OFFSETS).map(time.isoformat),
    "json": JSON.map(json.dumps) | JSON.map(lambda value: json.dumps(value, indent=2, ensure_ascii=False)),
    "json_array": st.lists(JSON).map(json.dumps),
    "json_object": st.dictionaries(PLAIN, JSON).map(json.dumps),
    "markdown_table": tables(),
    "openai_function_call": st.dictionaries(PLAIN, JSON).map(
        lambda arguments: json.dumps({"name": "f", "arguments": json.dumps(arguments)})
    ),
    "python_literal": LITERALS.map(repr),
    "tool_call": st.dictionaries(PLAIN, MODERATE).map(
        lambda arguments: json.dumps({"name": "f.g-1", "arguments": arguments})
    ),
    "uuid": st.uuids(version=4).map(str),
}


def csv_line(row: list[str]) -> str:
    out = StringIO()
    csv.writer(out, lineterminator="").writerow(row)
    return out.getvalue()


@pytest.mark.parametrize("examples", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_others_write_is_accepted(name: str, accepts: Accepts, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(WRITTEN[name])
    def check(text: str) -> None:
        assert accepts(name, text), text

    check()


def parse_csv(text: str) -> None:
    (row,) = csv.reader([text], strict=True)
    assert row and csv_line(row).replace('"', "") == text.replace('"', "")


def parse_json(kind: type) -> Callable[[str], None]:
    def parse(text: str) -> None:
        assert isinstance(json.loads(text), kind)

    return parse


def parse_arithmetic(text: str) -> None:
    tree = ast.parse(text, mode="eval")
    kinds = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    assert all(isinstance(node, kinds) for node in ast.walk(tree))


def parse_schema(name: str) -> Callable[[str], None]:
    validator = jsonschema.Draft202012Validator(json.loads(library.read(name)))
    return lambda text: validator.validate(json.loads(text))


def parse_function_call(text: str) -> None:
    call = json.loads(text)
    assert [*call] == ["name", "arguments"] and isinstance(json.loads(call["arguments"]), dict)


def parse_sql(text: str) -> None:
    """SQLite reads the syntax first: what it says about unknown tables and columns comes later."""
    try:
        with closing(sqlite3.connect(":memory:")) as database:
            database.execute(f"EXPLAIN {text}")
    except sqlite3.OperationalError as error:
        assert not re.search("syntax error|incomplete input|unrecognized token", str(error)), error


def parse_email(text: str) -> None:
    name, host = text.rsplit("@", 1)
    assert len(name) <= 64 and "@" not in name and not re.search(r"^\.|\.\.|\.$", name)
    assert len(host) <= 253 and all(0 < len(label) <= 63 and label.strip("-") == label for label in host.split("."))


def parse_url(text: str) -> None:
    parts = urlsplit(text)
    assert parts.geturl() == text.rstrip("#").replace("?#", "#").rstrip("?")
    assert parts.hostname and (parts.port is None or 0 < parts.port < 65536)


def parse_table(text: str) -> None:
    widths = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in text.split("\n")}
    assert len(widths) == 1 and 2 <= widths.pop() <= 9


READ: dict[str, Callable[[str], object]] = {
    "arithmetic": parse_arithmetic,
    "csv_row": parse_csv,
    "email": parse_email,
    "geojson": parse_schema("geojson"),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "iso_date": date.fromisoformat,
    "iso_datetime": lambda text: datetime.fromisoformat(text).utcoffset() or 0,
    "iso_time": time.fromisoformat,
    "json": parse_json(object),
    "json_array": parse_json(list),
    "json_object": parse_json(dict),
    "markdown_table": parse_table,
    "openai_function_call": parse_function_call,
    "python_literal": ast.literal_eval,
    "sql_select": parse_sql,
    "tool_call": parse_schema("tool_call"),
    "url": parse_url,
    "uuid": lambda text: uuid.UUID(text).version,
}


@pytest.mark.parametrize("number", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READ)
def test_random_texts_are_read_by_others(name: str, texts: Texts, number: int) -> None:
    closing = {"closing": b" |\n-"} if name == "markdown_table" else {}
    for text in texts(name, number, **closing):
        try:
            READ[name](text)
        except Exception as error:
            raise AssertionError(f"{name}: {text!r}") from error


def test_every_day_of_a_gregorian_cycle_is_accepted(accepts: Accepts) -> None:
    days = [date(1999, 12, 1) + timedelta(days) for days in range(0, 146_097, 97)]
    assert all(accepts("iso_date", day.isoformat()) for day in days)
    for year in (1600, 1700, 1999, 2000, 2004, 2100):
        for month in range(1, 13):
            for day in (28, 29, 30, 31):
                text = f"{year}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(text)
                except ValueError:
                    assert not accepts("iso_date", text), text
                else:
                    assert accepts("iso_date", text), text
