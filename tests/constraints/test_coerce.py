"""What may be given as ``grammar=``: each becomes the specification a user would expect, or an error that says what to give."""

from __future__ import annotations

import ast
import json
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, Union
from uuid import UUID

import llguidance
import pytest
from pydantic import AfterValidator, BaseModel, Field, Json
from typing_extensions import TypeAliasType, TypedDict  # Pydantic reads that of typing from Python 3.12 on

import decoders
from decoders.constraints import library
from decoders.constraints.coerce import as_spec, as_specs
from decoders.constraints.specs import Choice, JsonSchema, Lark, Regex, Spec
from decoders.errors import GrammarError, UnknownNameError


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Point(BaseModel):
    x: int
    colour: Colour = Colour.RED


class Address(TypedDict):
    street: str


@dataclass
class Size:
    width: int


def weather(city: str, days: int = 1) -> None: ...


Count = NewType("Count", int)


def accepts(spec: Spec | None, text: str) -> bool:
    assert spec is not None
    language = spec.language()
    kind, source = ("regex", language.regex) if language.regex is not None else ("lark", language.lark)
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from(kind, source or ""), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and (not tokens or matcher.consume_tokens(tokens))
        and matcher.is_accepting()
    )


def test_none_and_specifications_pass() -> None:
    spec = decoders.regex("a")
    assert as_spec(spec) is spec
    assert as_spec(None) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("json", Lark), ("iso_date", Regex), ("iso-date", Regex), ("uuid.regex", Regex), ("tool_call", JsonSchema)],
)
def test_a_name_is_one_of_the_library(name: str, kind: type[Spec]) -> None:
    spec = as_spec(name)
    assert isinstance(spec, kind)
    assert spec.label == re.sub(r"\..*", "", name.replace("-", "_"))


def test_an_unknown_name_suggests_and_says_how_to_give_the_rest() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'sql_select'.*decoders\.regex\(pattern\)"):
        as_spec("sql_selct")
    with pytest.raises(UnknownNameError) as caught:
        as_spec('{"type": "object", "properties": ' + "{" * 500)
    assert len(str(caught.value)) < 600


PLAIN: list[tuple[Any, list[str], list[str]]] = [
    (int, ["0", "-5", "+12"], ["", "01", "1.0", "٣", "a"]),
    (Count, ["7"], ["7.0"]),
    (float, ["0", "-1.5", "2e10", "1.5E-3"], [".5", "1.", "inf"]),
    (bool, ["True", "False"], ["true", "1"]),
    (str, ['"a b"', '""', '"\\"\\u00e9"'], ["a", '"a"b"', '"\n"', '"\\d"', '"a']),
    (date, ["2024-02-29"], ["2023-02-29", "٢٠٢٣-01-01", "2024-2-9"]),
    (time, ["23:59:59"], ["24:00:00", "1:02:03"]),
    (datetime, ["2024-02-29 23:59:59"], ["2023-02-29 00:00:00", "2024-02-29T23:59:59", "2024-02-29\n23:59:59"]),
    (Literal["a", "b.c"], ["a", "b.c"], ["bxc", '"a"', ""]),
    (Literal[1, True, None, "x"], ["1", "True", "None", "x"], ["true", "null"]),
    (Colour, ["red", "green"], ["RED", '"red"']),
    (Optional[int], ["3", "None"], ["null", ""]),  # noqa: UP045
    (int | Literal["none"], ["3", "none"], ["None"]),
    (Union[bool, date], ["True", "2024-01-01"], ["2024-01-32"]),  # noqa: UP007
    (UUID, ["f81d4fae-7dec-11d0-a765-00a0c91e6bf6"], ["f81d4fae"]),
    (IPv4Address, ["1.2.3.4"], ["1.2.3"]),
    (IPv6Address, ["::1"], [":1"]),
    (dict, ["{}", '{"a": [1]}'], ["[]", "1"]),
    (list, ["[]", '[{"a": 1}]'], ["{}", "1"]),
]


def assert_tells_apart(spec: Spec, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(spec, text)] == [], "texts of the language that are refused"
    assert [text for text in bad if accepts(spec, text)] == [], "other texts that are accepted"


@pytest.mark.parametrize(("value", "good", "bad"), PLAIN)
def test_plain_types_are_written_as_python_writes_them(value: Any, good: list[str], bad: list[str]) -> None:
    assert_tells_apart(as_spec(value), good, bad)


def test_python_reads_what_plain_types_write() -> None:
    readers: list[tuple[Any, Callable[[str], object]]] = [
        (int, int), (float, float), (str, json.loads), (str, ast.literal_eval), (bool, ast.literal_eval),
        (date, date.fromisoformat), (time, time.fromisoformat), (datetime, datetime.fromisoformat),
    ]  # fmt: skip
    table: dict[Any, list[str]] = {value: good for value, good, _ in PLAIN if isinstance(value, type)}
    for value, read in readers:
        for text in table[value]:
            read(text)


STRUCTURED: list[tuple[Any, list[str], list[str]]] = [
    (Point, ['{"x": 1, "colour": "red"}', '{"x": -3}'], ["{}", '{"x": "1"}', '{"x": 1, "y": 2}', "1"]),
    (Address, ['{"street": "Hill Road"}'], ["{}", '{"street": 1}', '{"street": "a", "town": "b"}']),
    (Size, ['{"width": 3}'], ["{}", '{"width": 1.5}']),
    (list[int], ["[]", "[1, -2]"], ["1", "[+1]", "[1,]", '["1"]']),
    (list[Colour], ['["red", "green"]'], ["[red]"]),
    (dict[str, bool], ["{}", '{"a": true}'], ['{"a": True}', "{a: true}", '{"a": 1}']),
    (tuple[int, bool], ["[1, true]"], ["[1]", "(1, True)", "[true, 1]"]),
    (list[Point], ['[{"x": 1}]'], ['[{"y": 1}]', '{"x": 1}']),
    (Point | None, ['{"x": 1}', "null"], ["None", "{}"]),
    (Annotated[int, Field(ge=0, le=9)], ["0", "9"], ["10", "-1", "+1"]),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, ["[]", "[5]"], ["[1, 2]", "5"]),
    (weather, ['{"city": "Paris", "days": 2}', '{"city": "Rome"}'], ["{}", '{"city": 1}', '{"city": "Rome", "x": 1}']),
]


@pytest.mark.parametrize(("value", "good", "bad"), STRUCTURED)
def test_what_has_a_structure_is_json(value: Any, good: list[str], bad: list[str]) -> None:
    spec = as_spec(value)
    assert isinstance(spec, JsonSchema)
    assert_tells_apart(spec, good, bad)


def test_a_schema_builder_of_genson_is_read_as_outlines_reads_it() -> None:
    builder = pytest.importorskip("genson").SchemaBuilder()
    builder.add_object({"a": 1})
    for spec in (as_spec(builder), decoders.json_schema(builder.to_schema(), strict=False, closed=True)):
        assert accepts(spec, '{"a": 2}') and not accepts(spec, '{"b": 2}') and not accepts(spec, '{"a": "2"}')
    whole = spec.language().whole
    assert whole is not None
    whole('{"a": 2}')


@pytest.mark.parametrize(
    ("value", "name"),
    [(int, "type int"), (str | None, "type str | None"), (date, "type date")],
)
def test_types_are_called_by_their_name(value: Any, name: str) -> None:
    spec = as_spec(value)
    assert isinstance(spec, Spec) and spec.language().name.startswith(name)


def test_only_terms_of_outlines_need_outlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its releases exclude Python 3.14."""
    for name in [name for name in sys.modules if name.split(".")[0] == "outlines"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "outlines", None)
    for value, good, bad in (*PLAIN, *STRUCTURED):
        assert_tells_apart(as_spec(value), good, bad)


def unannotated(city, days: int = 1) -> None: ...  # type: ignore[no-untyped-def]


def positional(city: str, /) -> None: ...


def several(*cities: str) -> None: ...


@pytest.mark.parametrize("function", [unannotated, positional, several])
def test_functions_without_annotations_or_names_of_arguments_are_refused(function: Any) -> None:
    with pytest.raises(GrammarError, match=r"argument '(city|cities)' needs an annotation and a name in calls"):
        as_spec(function)
    with pytest.raises(GrammarError, match="its arguments are not known"):
        as_spec({}.update)


def test_python_types_are_closed_and_schemas_are_as_the_standard_has_it() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert accepts(decoders.json_schema(schema), '{"x": 1, "y": 2}')
    assert not accepts(decoders.json_schema(schema, closed=True), '{"x": 1, "y": 2}')
    assert accepts(decoders.json_schema(Point, closed=False), '{"x": 1, "y": 2}')


def test_a_schema_is_read_from_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "bit.json").write_text('{"enum": [0, 1]}')
    for schema in ('{"enum": [0, 1]}', tmp_path / "bit.json", str(tmp_path / "bit.json")):
        assert accepts(decoders.json_schema(schema), "1") and not accepts(decoders.json_schema(schema), "2")
    with pytest.raises(GrammarError, match="cannot be read"):
        decoders.json_schema(tmp_path / "nowhere.json")
    with pytest.raises(GrammarError, match="cannot be read"):
        decoders.json_schema("nowhere.json")


@pytest.mark.parametrize("value", [None, 3, [1], (int,), b"{}"], ids=repr)
def test_what_is_no_schema_is_not_given_to_pydantic(value: Any) -> None:
    with pytest.raises(GrammarError, match="is not a schema: give a dict, JSON text, a file.s path, or a Python type"):
        decoders.json_schema(value)


@pytest.mark.parametrize("file", library.names())
def test_a_copy_of_a_grammar_of_the_library_means_the_same(file: str, tmp_path: Path) -> None:
    """With its comments, and its pattern on several lines."""
    copy = tmp_path / file
    text = (Path(__file__).parents[2] / "grammars" / file).read_text(encoding="utf-8")
    copy.write_text(text.rstrip("\n"), encoding="utf-8")
    assert as_spec(copy) == as_spec(file)
    assert as_spec(copy).label == file


class Step(typing.TypedDict, total=False):
    n: typing.Required[int]
    note: str


class Chain(typing.TypedDict):
    next: Chain | None


class Plan(typing.TypedDict):
    steps: list[Step]
    last: typing.NotRequired[Step | None]


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        (Plan, "{}"),
        (list[Plan], "[{}]"),
        (Plan | None, "{}"),
        (Optional[Plan], "{}"),  # noqa: UP045
        (Annotated[Plan, "x"], "{}"),
        (dict[str, Plan], '{{"a": {}}}'),
        (Sequence[Plan], "[{}]"),
    ],
    ids=str,
)
def test_typed_dicts_are_those_of_typing_too(kind: Any, around: str) -> None:
    """Pydantic refuses them before Python 3.12."""
    text = around.format('{"steps": [{"n": 1}, {"n": 2, "note": "a"}], "last": null}')
    spec = as_spec(kind)
    assert accepts(spec, text)
    assert not accepts(spec, text.replace('"n": 1', '"m": 1')) and not accepts(spec, text.replace("steps", "step"))


def test_a_typed_dict_that_refers_to_itself_is_refused_or_read() -> None:
    try:
        assert accepts(as_spec(Chain), '{"next": {"next": null}}')
    except GrammarError as error:
        assert "Chain" in str(error) and "only a typing_extensions.TypedDict may" in str(error)


def _even(n: int) -> int:
    if n % 2:
        raise ValueError("odd")
    return n


@dataclass
class Even:
    n: int

    def __post_init__(self) -> None:
        _even(self.n)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "why"),
    [
        (Annotated[int, AfterValidator(_even)], "2", "3", "$: Value error, odd"),
        (list[Annotated[int, AfterValidator(_even)]], "[2]", "[2, 3]", "$[1]: Value error, odd"),
        (dict[int, str], '{"1": "a"}', '{"x": "a"}', "$.x"),
        (Even, '{"n": 2}', '{"n": 3}', "odd"),
        (Json[int], '"1"', '"a"', "$: Invalid JSON"),
    ],
    ids=["annotated", "list", "dict", "dataclass", "json"],
)
def test_what_a_type_asks_for_beyond_its_schema_is_judged_at_the_end(kind: Any, good: str, bad: str, why: str) -> None:
    spec = decoders.json_schema(kind)
    language = spec.language()
    assert accepts(spec, good) and accepts(spec, bad) and language.whole is not None
    language.whole(good)
    with pytest.raises(GrammarError, match=re.escape(why)):
        language.whole(bad)
    assert any("left to the validation" in warning for warning in language.warnings)


def test_types_whose_schema_says_all_are_not_judged() -> None:
    for kind in (Point, Address, Size, list[int], dict[str, Colour], int | None, date, Plan):
        assert decoders.json_schema(kind).language().whole is None


def test_judges_are_told_apart_in_caches() -> None:
    def other(n: int) -> int:
        return n

    keys = {decoders.json_schema(kind).key for kind in (dict[int, int], dict[int, int], dict[UUID, int])}
    assert len(keys) == 2, "equal types share a grammar"
    validated = [decoders.json_schema(Annotated[int, AfterValidator(each)]).key for each in (_even, other)]
    assert len({*validated, decoders.json_schema(int).key}) == 3


def test_options_reach_the_specification() -> None:
    spec = decoders.json_schema({}, whitespace="compact", strict=False, backend="llguidance", policy="canonical")
    assert (spec.whitespace, spec.strict, spec.backend, spec.policy) == ("compact", False, "llguidance", "canonical")


def test_a_type_statement_is_what_it_stands_for() -> None:
    assert accepts(as_spec(TypeAliasType("Flag", bool)), "True")


@pytest.mark.parametrize("value", [5, True, 1.5, b"a", object(), lambda x: x, type("Odd", (), {})])
def test_whatever_else_is_refused_with_what_can_be_given(value: Any) -> None:
    with pytest.raises(GrammarError, match=r"What can be given|has no JSON schema"):
        as_spec(value)


def test_a_path_is_a_grammar_and_a_compiled_pattern_a_regex(tmp_path: Path) -> None:
    (tmp_path / "a.lark").write_text('start: "a"')
    assert as_spec(tmp_path / "a.lark") == decoders.grammar('start: "a"')
    assert as_spec(re.compile("a+")) == decoders.regex("a+")


def test_one_specification_is_for_all_rows() -> None:
    specs = as_specs("uuid", prompts=2, per_prompt=3)
    assert len(specs) == 6 and all(spec is specs[0] for spec in specs)
    assert as_specs(None, prompts=2) == [None, None]


def test_a_list_has_one_for_each_prompt_and_is_expanded_in_order() -> None:
    a, b = decoders.regex("a"), decoders.regex("b")
    assert as_specs([a, None, b], prompts=3, per_prompt=2) == [a, a, None, None, b, b]
    assert as_specs((a, b), prompts=2) == [a, b]


def test_equal_entries_are_made_once() -> None:
    one, two = as_specs([Point, Point], prompts=2)
    assert one is two


def test_a_list_of_another_length_is_refused_with_what_was_perhaps_meant() -> None:
    with pytest.raises(GrammarError, match=r"a list of 3 for 1 prompt.*decoders\.choice"):
        as_specs(["yes", "no", "maybe"], prompts=1)


def test_an_entry_of_a_list_is_no_list() -> None:
    with pytest.raises(GrammarError, match="is not a grammar"):
        as_specs([["json"]], prompts=1)


def test_choices_of_types_keep_their_order_and_are_told_apart() -> None:
    assert as_spec(Literal["b", "a", "b"]) == Choice(("b", "a"))
