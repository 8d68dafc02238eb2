"""The ready grammars accept what they should and nothing else; names, descriptions and texts are found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from decoders.constraints import library
from decoders.errors import UnknownNameError

NESTED = {"a": [1, {"b": "é\x7f"}], "c": []}

GOOD: dict[str, list[str]] = {
    "arithmetic": ["0", "1+2", "1 + 2 * 3", "-(4 - 2) % 3", "((0.5))", "2 - -1", "3--1", "10/4/2", "999999999999999.5"],
    "csv_row": [
        "a,b,c",
        "one",
        '"a ""quoted"" word",2',
        ",",
        ",,",
        'a,"",',
        "Zürich, 8001 ,1.5",
        '"with, comma"',
        '""',
        ",".join("x" * 32),
    ],
    "email": [
        "ada@example.org", "first.last@sub.example.co.uk", "o'brien+tag@x-y.io", "a.b.c.d@example.com",
        "!#$%&*/=?^_`{|}~-@example.org", "x" * 64 + "@example.org", "UPPER@EXAMPLE.ORG", f"a@{'l' * 63}.museum",
        f"{'x' * 64}@{'l' * 63}.{'m' * 63}.museum", f"{'x' * 64}@{'l' * 54}.{'m' * 54}.{'n' * 54}.{'t' * 24}",
    ],
    "geojson": [
        '{"type": "Point", "coordinates": [8.5, 47.3]}',
        '{"type": "Point", "coordinates": [8.5, 47.3, 408]}',
        '{"type": "LineString", "coordinates": [[0, 0], [1, 1.5]]}',
        '{"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 0]]]}',
        '{"type": "MultiPoint", "coordinates": []}',
        '{"type": "GeometryCollection", "geometries": [{"type": "Point", "coordinates": [-0.5, 1e2]}]}',
        '{"type": "Feature", "geometry": null, "properties": null}',
        '{"type": "Feature", "id": "a", "geometry": {"type": "Point", "coordinates": [0, 0]}, "properties": {"n": [1]}}',
        '{"type": "FeatureCollection", "features": []}',
    ],
    "ipv4": ["0.0.0.0", "255.255.255.255", "127.0.0.1", "10.20.30.40", "249.250.199.99", "1.2.3.4"],
    "ipv6": [
        "::", "::1", "1::", "2001:db8::8a2e:370:7334", "2001:0DB8:0000:0000:0000:8a2e:0370:7334", "::ffff:192.0.2.128",
        "64:ff9b::192.0.2.33", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1:2:3:4:5:6:1.2.3.4", "1:2:3::5:6:7:8",
    ],
    "iso_date": ["2024-02-29", "2000-02-29", "1999-12-31", "2023-04-30", "0001-01-01", "9999-06-15"],
    "iso_datetime": [
        "2024-02-29T23:59:59Z", "1985-04-12T23:20:50.52Z", "1996-12-19T16:39:57-08:00", "1937-01-01T12:00:27.87+00:20",
        "2000-01-01T00:00:00.000000001Z", "2023-06-30T12:00:00-00:00",
    ],
    "iso_time": ["00:00:00", "23:59:59", "12:30:05.5", "12:30:05Z", "12:30:05.123456789+05:45", "01:02:03-23:59"],
    "json": [
        '{"a": [1, 2.5e-3, -0], "b": {"c": null}}',
        "[]",
        "{}",
        '"\\u00e9\\n"',
        "true",
        json.dumps(NESTED, indent=2),
        json.dumps(NESTED, separators=(",", ":")),
    ],
    "json_array": ["[]", "[ ]", "[1]", "[[], {}]", '["a", true, null]', "[1,2]", json.dumps([NESTED], indent=4)],
    "json_object": ["{}", '{"a": 1}', '{"a":{"a":[]}}', json.dumps(NESTED), json.dumps(NESTED, indent=1), '{"": ""}'],
    "markdown_table": [
        "| a |\n| --- |\n| 1 |", "| a | b |\n| --- | :---: |\n| 1 | 2 |\n| 3 | 4 |",
        "| long name | b |\n| :--- | ---: |\n| two words | |", "| a |\n| ------------ |\n| x \\| y |", "| é |\n| --- |\n| 東京 |",
        "| 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |\n" + "| --- " * 8 + "|\n" + "| x " * 8 + "|",
    ],
    "openai_function_call": [
        '{"name": "now", "arguments": "{}"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',
        '{"name":"a_b-1","arguments":"{\\"n\\":[1,-2.5e3,null]}"}',
        json.dumps(
            {"name": "say", "arguments": json.dumps({"text": 'a "b" \\ \n é'}, ensure_ascii=False)}, ensure_ascii=False
        ),
        json.dumps({"name": "say", "arguments": json.dumps({"text": "é"})}),
        json.dumps({"name": "nest", "arguments": json.dumps({"a": {"b": [{}, [], True]}})}),
    ],
    "python_literal": [
        "None", "-1_000", "0xFF", "1.5e-3", "1-2j", "'it\\'s'", '"\\u00e9\\n"', "b'\\x00\\377'", "()", "(1,)", "(1, 'a', [])",
        "[1, [2, [3]], ]", "{'a': [1], (1, 2): {3, 4}}", "{1}", "set()", "{}", "[\n    1,\n    2\n]",
    ],
    "semver": ["0.0.0", "1.2.3", "1.0.0-alpha.1", "1.0.0-0A.is.legal", "1.0.0+build.5", "2.0.0-rc.1+exp.sha-5114f85"],
    "sql_select": [
        "SELECT * FROM users",
        "SELECT DISTINCT name, age + 1 AS older FROM users WHERE age >= 18 AND NOT name LIKE 'A%';",
        "SELECT u.name, COUNT(*) FROM users AS u LEFT JOIN orders AS o ON u.id = o.user_id GROUP BY u.name HAVING COUNT(*) > 2",
        "SELECT id FROM orders WHERE total BETWEEN 1 AND 2.5 OR note IS NOT NULL ORDER BY total DESC, id LIMIT 10 OFFSET 5",
        "SELECT name FROM users WHERE id IN (SELECT user_id FROM orders) AND name IN ('O''Brien', 'x')",
        "SELECT CASE WHEN age < 18 THEN 'minor' ELSE 'adult' END AS kind FROM users",
        "SELECT t.n FROM (SELECT COUNT(*) AS n FROM users) AS t",
        'SELECT "first name" FROM users\nWHERE EXISTS (SELECT * FROM orders)',
        "SELECT MAX(age), COALESCE(name, 'none') FROM users",
        "SELECT 1 - -1 FROM users",
        "SELECT COUNT(name), COUNT(DISTINCT age), COUNT((age)), COUNT(-1) FROM users",
        'SELECT COUNT("first name") FROM users GROUP BY age HAVING COUNT(*) > COUNT(id)',
    ],
    "tool_call": [
        '{"name": "now", "arguments": {}}', '{"name": "weather", "arguments": {"city": "Paris"}}',
        '{"name": "a.b-c_1", "arguments": {"n": [1, 2.5, null, {"x": true}]}}', '{"name": "x", "arguments": {"": ""}}',
        '{"name": "x", "arguments": {"text": "a \\"b\\" \\u00e9"}}', '{"name": "' + "x" * 64 + '", "arguments": {}}',
    ],
    "url": [
        "http://example.org", "https://example.org/", "https://www.example.co.uk:8443/a/b.html?x=1&y=%20z#top",
        "http://localhost:5000/", "http://127.0.0.1/?q", "https://a-b.c/~user/(x)", "https://example.org:65535",
        "http://255.255.255.255", "http://1.2.example", "http://3com.com", "http://xn--bcher-kva.example", "http://a.b1",
        "http://a.b//c?#",
    ],
    "uuid": [
        "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "0190163d-8694-739b-aea5-966c26f8ad91", "919108f7-52d1-4320-9bac-f847db4148a8",
        "2ed6657d-e927-568b-95e1-2665a8aea6a2", "1ec9414c-232a-6b00-b3c8-9e6bdeced846", "2489e9ad-2ee2-8e00-8ec9-32d5f69181c0",
    ],
}  # fmt: skip

BAD: dict[str, list[str]] = {
    "arithmetic": [
        "", "1+", "+1", "(1", "1)", "()", "01", "1.", ".5", "1  + 2", "2**3", "1//2", "a", "1 2", "1e5", "--1",
    ],
    "csv_row": ["", 'a"b', '"a', '"a"b', "a\nb", '"a\nb"', 'a,"b', '"a" ,b', "\t", ",".join("x" * 33)],
    "email": [
        "", "ada", "ada@", "@example.org", "ada@localhost", ".ada@example.org", "ada.@example.org", "a..b@example.org",
        "ada@-x.org", "ada@x-.org", "ada@example.org.", "ada@[127.0.0.1]", '"a b"@example.org', "a b@example.org",
        "x" * 65 + "@example.org", f"{'x' * 32}.{'y' * 32}@example.org", "ada@example.0rg", "é@example.org",
        f"a@{'l' * 64}.org", f"{'x' * 64}@{'l' * 63}.{'m' * 63}.{'n' * 63}.org",
    ],
    "geojson": [
        "", "{}", '{"type": "Point", "coordinates": [8.5]}', '{"type": "Point", "coordinates": [1, 2, 3, 4]}',
        '{"type": "Point"}', '{"type": "Circle", "coordinates": [0, 0]}', '{"type": "LineString", "coordinates": [[0, 0]]}',
        '{"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [0, 0]]]}', '{"type": "Feature", "geometry": null}',
        '{"type": "FeatureCollection", "features": [{"type": "Point", "coordinates": [0, 0]}]}',
        '{"type": "Point", "coordinates": ["0", "0"]}', '{"type": "Point", "coordinates": [0, 0], "color": "red"}',
    ],
    "ipv4": [
        "", "1.2.3", "1.2.3.4.5", "256.0.0.1", "01.2.3.4", "1.2.3.", "1.2.3.-4", "a.b.c.d", "1,2,3,4", "999.1.1.1", "٣.1.1.1",
    ],
    "ipv6": [
        "", ":", ":::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1::2::3", "12345::", "g::", "1:2:3:4:5:6:7:8::",
        "::1:2:3:4:5:6:7:8", "1:2:3:4::5:6:7:8", ":1:2:3:4:5:6:7", "::256.0.0.1", "1.2.3.4::", "1:2:3:4:5:6:7:1.2.3.4",
        "fe80::1%eth0", "[::1]",
    ],
    "iso_date": [
        "1900-02-29", "2023-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "2023-1-1", "2023-01-01T", "٢٠٢٣-01-01",
        "20230101", "0000-01-01", "0000-02-29", "",
    ],
    "iso_datetime": [
        "", "2024-02-29", "2023-02-29T00:00:00Z", "2024-02-29T23:59:59", "2024-02-29 23:59:59Z", "2024-02-29t23:59:59z",
        "2024-02-29T24:00:00Z", "2024-02-29T23:59:60Z", "2024-02-29T23:59Z", "2024-02-29T23:59:59.Z",
        "2024-02-29T23:59:59+0100", "2024-02-29T23:59:59+24:00",
    ],
    "iso_time": [
        "", "24:00:00", "1:02:03", "12:60:00", "12:30", "12:30:60", "12:30:00.", "12:30:00z", "12:30:00+5:00", "T12:30:00",
    ],
    "json": [
        "", "{", "[1,]", "{'a': 1}", "01", "+1", "1.", '{"a" 1}', '"\n"', '"\\x"', "nul", '{"a": 1,}', "[1 2]", "[1,      2]",
    ],
    "json_array": ["", "{}", "1", "[", "[1,]", "[,1]", "[1]]", '["a]', "[01]", "[1,      2]", " []", "[] "],
    "json_object": [
        "", "[]", "1", '"a"', "{", "{a: 1}", '{"a"}', '{"a": 1,}', "{1: 2}", '{"a": 1}}', '{"a": undefined}', "{     }",
    ],
    "markdown_table": [
        "", "| a |", "| a |\n| --- |", "| a |\n| 1 |", "| a | b |\n| --- |\n| 1 | 2 |", "| a | b |\n| --- | --- |\n| 1 |",
        "| a |\n| --- |\n| 1 | 2 |", "a | b\n--- | ---\n1 | 2", "| a  b |\n| --- |\n| 1 |", "| a |\n| -- |\n| 1 |",
        "| |\n| --- |\n| 1 |", "| a |\n| --- |\n| 1 |\n", "| x |\n" * 3,
        "| x " * 9 + "|\n" + "| --- " * 9 + "|\n" + "| x " * 9 + "|",
    ],
    "openai_function_call": [
        "", "{}", '{"name": "now", "arguments": {}}', '{"name": "now", "arguments": ""}', '{"name": "now", "arguments": "[]"}',
        '{"name": "now", "arguments": "{"a": 1}"}', '{"name": "now", "arguments": "{\\"a\\"}"}',
        '{"name": "now", "arguments": "{\\"a\\": \\"\\n\\"}"}', '{"name": "now", "arguments": "{\\"a\\": 1"}',
        '{"name": "a b", "arguments": "{}"}', '{"arguments": "{}", "name": "now"}', '{"name": "", "arguments": "{}"}',
    ],
    "python_literal": [
        "", "x", "true", "01", "1 + 1", "'a", "'a\"", "'\n'", "'\\d'", "b'é'", "(,)", "[1 2]", "{[1]}", "{{1}: 2}", "{1: 2, 3}",
        "{([],): 1}", "f'x'", "print(1)", "[1]]", "'\\U00110000'", "1_", "--1",
    ],
    "semver": ["1", "1.2", "01.2.3", "1.2.3-", "1.2.3-01", "1.2.3+", "v1.2.3", "1.2.3-a..b", ""],
    "sql_select": [
        "", "SELECT", "SELECT * users", "select * from users", "SELECT FROM users", "SELECT * FROM order",
        "SELECT select FROM users", "SELECT a, FROM users", "SELECT * FROM users WHERE", "SELECT * FROM users WHERE name = 'x",
        "SELECT * FROM users LIMIT x", "SELECT a --b FROM users", "SELECT * FROM users; DROP TABLE users", "DROP TABLE users",
        "SELECT * FROM users WHERE a = b = ", "SELECT *  FROM users", "SELECT a-1 FROM users",
    ],
    "tool_call": [
        "", "{}", '{"name": "now"}', '{"arguments": {}}', '{"name": "now", "arguments": []}',
        '{"name": "now", "arguments": "{}"}', '{"name": "", "arguments": {}}', '{"name": "a b", "arguments": {}}',
        '{"name": 1, "arguments": {}}', '{"name": "now", "arguments": {}, "x": 1}',
        '{"name": "' + "x" * 65 + '", "arguments": {}}',
    ],
    "url": [
        "", "example.org", "ftp://example.org", "http://", "http:/example.org", "http://-a.org", "http://a..org",
        "http://example.org:0", "http://example.org:65536", "http://example.org:", "http://example.org/a b",
        "http://example.org/%2", "http://example.org/é", "http://user@example.org", "http://example.org/" + "x" * 128,
        'http://example.org/"', "http://example.org/#a#b", "http://256.1.1.1", "http://1.2.3", "http://1.2.3.4.5",
        "http://01.2.3.4", "http://0x7f.1", "http://2130706433", "http://example.0rg", "http://[::1]/", "http://a_b.org",
        f"http://{'.'.join(['l' * 63] * 4)}.org",
    ],
    "uuid": [
        "", "F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6", "f81d4fae7dec11d0a76500a0c91e6bf6", "f81d4fae-7dec-91d0-a765-00a0c91e6bf6",
        "f81d4fae-7dec-01d0-a765-00a0c91e6bf6", "f81d4fae-7dec-11d0-c765-00a0c91e6bf6",
        "{f81d4fae-7dec-11d0-a765-00a0c91e6bf6}", "f81d4fae-7dec-11d0-a765-00a0c91e6bf", "g81d4fae-7dec-11d0-a765-00a0c91e6bf6",
    ],
}  # fmt: skip
CASES = [(name, text, good) for table, good in ((GOOD, True), (BAD, False)) for name in table for text in table[name]]


@pytest.mark.parametrize(("name", "text", "good"), CASES)
def test_grammar_accepts_exactly_its_language(
    name: str, text: str, good: bool, accepts: Callable[[str, str], bool]
) -> None:
    assert accepts(name, text) is good


@pytest.mark.parametrize("name", [file.removesuffix(".regex") for file in library.names() if file.endswith(".regex")])
def test_patterns_mean_the_same_to_python(name: str) -> None:
    pattern = re.compile(library.read(name))
    assert all(pattern.fullmatch(text) for text in GOOD[name])
    assert not any(pattern.fullmatch(text) for text in BAD[name])


def test_every_grammar_is_tested_well() -> None:
    stems = {library.find(name).name for name in library.names()}
    assert stems == set(GOOD) == set(BAD)
    assert all(len(set(GOOD[name])) >= 6 and len(set(BAD[name])) >= 8 for name in stems)


def test_every_grammar_is_in_the_readme() -> None:
    readme = (Path(__file__).parents[3] / "grammars" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\S+)` \|", readme, re.M) == library.names()


def test_every_grammar_says_what_it_accepts() -> None:
    for file in library.names():
        ready = library.find(file)
        assert ready.file == file and file.startswith(ready.name)
        assert 20 < len(ready.description) < 130, file


def test_names_are_unique_without_their_suffix() -> None:
    stems = [file.rsplit(".", 1)[0] for file in library.names()]
    assert len(stems) == len(set(stems))


def test_kind_follows_the_suffix() -> None:
    assert library.find("json").kind == "lark"
    assert library.find("uuid").kind == "regex"
    assert library.find("geojson").kind == "json_schema"
    assert json.loads(library.read("geojson"))["title"] == "geojson"


def test_text_of_a_pattern_is_one_line_without_comments() -> None:
    for file in library.names():
        if file.endswith(".regex"):
            assert "\n" not in library.read(file) and not library.read(file).startswith("#")


def test_suffix_is_optional_and_a_hyphen_is_an_underscore() -> None:
    assert library.read("uuid") == library.read("uuid.regex")
    assert library.find("iso-date") == library.find("iso_date")


def test_unknown_names_suggest() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'json\.lark'"):
        library.read("jsn.lark")
    with pytest.raises(UnknownNameError, match="Did you mean 'sql_select'"):
        library.find("sql_selct")
