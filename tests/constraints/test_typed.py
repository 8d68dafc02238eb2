"""Types that ask for more than their JSON schema says: what is written in the language, and what the type judges afterwards."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import (
    UUID1,
    UUID4,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NaiveDatetime,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    condecimal,
)

import decoders
from decoders.constraints import typed
from decoders.constraints.auto import Auto
from decoders.constraints.python_types import schema_of
from decoders.constraints.typed import asks_more
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError

STOP = 256
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), None], [STOP])


class Odd(enum.Enum):
    TEXT = "a"
    PAIR = (1, 2)


class Plain(enum.Enum):
    TEXT = "a"
    NUMBER = 1


class Stripped(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)
    a: Annotated[str, Field(min_length=2)]


class Known(BaseModel):
    """Fields may be called as the keys of a core schema are."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Annotated[int, Field(ge=0, description="a number")]
    schema_: Annotated[list[Plain] | None, Field(alias="schema")] = None
    pattern: Annotated[str, Field(pattern=r"^\d{2}$", max_length=9)] = "12"
    default: dict[str, tuple[float, ...]] = {}
    expected: Literal["a", 1, None] = "a"


class Tagged(BaseModel):
    inner: Annotated[Known | None, Field()] = None
    more: list[Tagged] = []


def compiled(kind: Any) -> tuple[Any, Any]:
    language = decoders.json_schema(kind).language()
    return language, Auto().compile(language, BYTES)


def accepts(grammar: Any, text: str) -> bool:
    matcher = grammar.start()
    return matcher.advance([*text.encode()]) == len(text.encode()) and matcher.accepting


def reads(kind: Any, text: str) -> bool:
    try:
        TypeAdapter(kind).validate_json(text)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (UUID4, ['"3b241101-e2bb-4255-8caf-4136c566a962"'], ['"i"', '"3b241101-e2bb-1255-8caf-4136c566a962"']),
        (list[UUID1], ['["3b241101-e2bb-1255-8CAF-4136c566a962"]'], ['["3b241101-e2bb-4255-8caf-4136c566a962"]']),
        (NaiveDatetime, ['"2024-02-29T07:04:00"', '"2024-02-28T07:04:00.5"'], ['"2024-02-28T07:04:00Z"', '"2023-02-29T07:04:00"']),
        (AwareDatetime, ['"2024-02-29T07:04:00Z"'], ['"2024-02-29T07:04:00"']),
        (Decimal, ["1.5", '"1.5"', '"-0"'], ['"]"', '""', '"1.5.5"', '"NaN"']),
        (condecimal(max_digits=4, decimal_places=2), ["12.34", '"12.34"', "-0.5", '"0.25"'], ["123", "1.234", '"123"', '"1.234"']),
        (condecimal(decimal_places=0), ["12", '"12"'], ["1.5", '"1.5"']),
        (condecimal(max_digits=2, decimal_places=2), ["0.12", '"0.12"'], ["1", '"1.0"']),
        (condecimal(gt=Decimal(5)), ["6", "5.5"], ["5", '"5"']),
    ],
    ids=str,
)  # fmt: skip
def test_the_language_knows_what_the_schema_does_not_say(kind: Any, good: Sequence[str], bad: Sequence[str]) -> None:
    language, grammar = compiled(kind)
    for text in good:
        assert accepts(grammar, text) and reads(kind, text), text
    for text in bad:
        assert not accepts(grammar, text) and not reads(kind, text), text
    assert language.whole is not None and not any("is not known" in warning for warning in language.warnings)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (condecimal(max_digits=3), '"12.5"', '"123.5"'),
        (condecimal(max_digits=40, decimal_places=20), "1.5", "1" + "0" * 30),
        (Annotated[str, StringConstraints(strip_whitespace=True, min_length=2)], '"ab"', '" a"'),
        (Annotated[str, StringConstraints(to_lower=True, pattern="^[A-Z]$")], '"A"', None),
        (Annotated[str, StringConstraints(pattern=r"^\W$")], '"-"', '"\u0663"'),
        (Stripped, '{"a": "ab"}', '{"a": "  "}'),
        (FiniteFloat, "1e9", "9" * 400),
        (Odd, '"a"', "[1, 2]"),
        (Annotated[date, Field(ge=date(2024, 1, 1))], '"2024-01-01"', '"2023-12-31"'),
        (Annotated[bytes, Field(max_length=2)], '"ab"', '"éé"'),
        (Annotated[int, WithJsonSchema({"type": "number"})], "1", "1.5"),
        (list[UUID4], "[]", None),
    ],
    ids=str,
)
def test_the_finished_text_is_judged_by_a_type_that_asks_for_more(kind: Any, good: str, bad: str | None) -> None:
    language, grammar = compiled(kind)
    assert language.whole is not None and accepts(grammar, good)
    language.whole(good)
    if bad is not None:
        assert accepts(grammar, bad)
        with pytest.raises(GrammarError, match="the text is not a valid "):
            language.whole(bad)


@pytest.mark.parametrize(
    "kind", [Known, Tagged, Plain, datetime, list[bytes], Literal[1, "a"], dict[str, Any]], ids=str
)
def test_a_type_whose_schema_says_everything_is_not_judged(kind: Any) -> None:
    assert not asks_more(kind)


def test_equal_types_share_what_is_compiled_and_types_of_one_name_do_not() -> None:
    def key_of(multiple: int) -> str:
        return decoders.json_schema(dict[Odd, Annotated[int, Field(multiple_of=multiple)]]).key  # type: ignore[valid-type]

    assert key_of(3) == key_of(3) != key_of(5)
    one, other = (type("Same", (Known,), {}) for _ in range(2))
    assert typed._identity(list[one]) != typed._identity(list[other])  # type: ignore[valid-type]


@pytest.mark.parametrize(
    "schema",
    [{"type": "int", "prime": True}, {"type": "quaternion"}, {"type": "model", "config": {"later": 1}}],
    ids=str,
)
def test_what_a_later_pydantic_adds_is_judged(schema: dict[str, Any]) -> None:
    assert not typed._more({"type": "int", "gt": 3, "strict": True}) and typed._more(schema)


def test_conditions_of_a_number_stay_when_places_are_bounded() -> None:
    kind = condecimal(gt=Decimal(5), max_digits=4, decimal_places=2)
    _, grammar = compiled(kind)
    assert all(accepts(grammar, text) for text in ("5.01", "99.99"))
    assert not any(accepts(grammar, text) for text in ("5", "4.5", "100", "6.125", '"6"'))


def test_a_function_is_not_called_by_its_judge() -> None:
    called = []

    def book(at: NaiveDatetime, price: Decimal = Decimal(1)) -> None:
        called.append(at)

    language, _ = compiled(book)
    assert language.whole is not None
    language.whole('{"at": "2024-02-29T07:04:00", "price": "1.5"}')
    with pytest.raises(GrammarError, match=r"the text is not a valid book: \$\.price"):
        language.whole('{"at": "2024-02-29T07:04:00", "price": "x"}')
    assert not called


def test_a_term_of_outlines_stays_anchored_beside_a_type_that_asks_for_more() -> None:
    dsl = pytest.importorskip("outlines.types.dsl")

    class Both(BaseModel):
        id: UUID4
        letters: dsl.Regex("a+")  # type: ignore[valid-type]

    _, grammar = compiled(Both)
    text = json.dumps({"id": "3b241101-e2bb-4255-8caf-4136c566a962", "letters": "aa"})
    assert accepts(grammar, text) and not accepts(grammar, text.replace("aa", "ab"))
    assert schema_of(Both)["properties"]["id"]["format"] == "uuid4"
