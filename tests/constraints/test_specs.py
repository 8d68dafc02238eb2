"""Specifications: what they mean, what they refuse, and that they can be told apart."""

from __future__ import annotations

import itertools
import random
import re
import time
from enum import Enum, StrEnum
from pathlib import Path

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decoders
from decoders.constraints.coerce import as_spec
from decoders.constraints.patterns.python import whole_text
from decoders.constraints.patterns.tree import quoted
from decoders.constraints.specs import CHOICES_LIMIT
from decoders.errors import GrammarError, UnknownNameError
from decoders.registry import resolve_grammar

SHORT_TEXTS = ["".join(letters) for size in range(5) for letters in itertools.product("ab", repeat=size)]


def compiled(pattern: str) -> llguidance.LLMatcher:
    grammar = llguidance.grammar_from("regex", pattern)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: llguidance.LLMatcher, text: str) -> bool:
    matcher, tokens = matcher.deep_copy(), list(text.encode())
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and (not tokens or matcher.consume_tokens(tokens))
        and matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        ("^ab$", "ab"),
        (r"\Aab\Z", "ab"),
        (r"\Aab\z", "ab"),
        ("^a|b$", "a|b"),
        ("(^a$|^b)", "a|b"),
        ("^(^a)$", "a"),
        ("a+?b*?c??", "a+b*c?"),
        ("a{2,3}?", "a{2,3}"),
        ("a{,3}", "a{0,3}"),
        ("(?P<x>a)(?<y>b)(?:c)", "abc"),
        ("a(?#a remark)b", "ab"),
        ('{"a": [0-9]{1,3}}', r'\{"a": [0-9]{1,3}\}'),
        ("[]a]", r"[\]a]"),
        (r"[^\b]", r"[^\x08]"),
        (r"\/\<\é", "/<é"),
        ("a\nb", r"a\x0ab"),
        (r"\u00e9\x41\p{L}\d\pN\P{L}", r"éA\p{L}\d\p{N}\P{L}"),
        (r"\w[^\w-]", r"[\p{L}\p{N}_][^\p{L}\p{N}_\-]"),
        (r"[\Wa]", r"[[^\p{L}\p{N}_]a]"),
        ("[+-9-]", r"[\+-9]"),
        ("x(a|b)", "x(?:a|b)"),
        ("(?:ab){2}(c)+", "(?:ab){2}c+"),
        ("..", ".."),
        ("", ""),
    ],
)
def test_what_is_idle_is_left_out(pattern: str, plain: str) -> None:
    assert decoders.regex(pattern).language().regex == plain
    compiled(plain)


@pytest.mark.parametrize(
    ("pattern", "what", "at"),
    [
        ("ab(?=c)c", "(?=", 2),
        ("(?!a)b", "(?!", 0),
        ("a(?<=a)b", "(?<=", 1),
        ("(?<!a)b", "(?<!", 0),
        (r"(a)\1", r"\1", 3),
        (r"(?P<x>a)(?P=x)", "(?P=", 8),
        (r"(?<x>a)\k<x>", r"\k", 7),
        (r"a\bb", r"\b", 1),
        (r"\Bb", r"\B", 0),
        ("a$b", "$", 1),
        ("(a$|b)c", "$", 2),
        ("a^b", "^", 1),
        ("a*^b", "^", 2),
        ("(^a)*", "*", 4),
        ("^*a", "*", 1),
        ("(?i)a", "(?i)", 0),
        ("(?i:a)", "(?i:", 0),
        ("(?>a)", "(?>", 0),
        ("(a)?(?(1)b|c)", "(?(", 4),
        ("a++", "++", 1),
        ("a**", "*", 2),
        ("|*a", "*", 1),
        ("a{3,2}", "{3,2}", 1),
        ("a{1000000}", "{1000000}", 1),
        ("a{" + "9" * 5000 + "}", "{999999999999999999…", 1),
        ("(ab", "(", 0),
        ("a(?#b", "(?#", 1),
        ("ab)", ")", 2),
        ("[ab", "[", 0),
        ("[[:alpha:]]", "[", 1),
        ("[a-z&&b]", "&&", 4),
        ("[a--b]", "--", 2),
        ("[b-a]", "b-a", 1),
        (r"[a-\d]", r"a-\d", 1),
        (r"x[\w-z]", r"\w-z", 2),
        (r"[\x41-\t]", r"\x41-\t", 1),
        (r"\x4g", r"\x4g", 0),
        (r"[\u12]", r"\u12]", 1),
        (r"\ud800", r"\ud800", 0),
        (r"\U00110000", r"\U00110000", 0),
        (r"\x{zz}", r"\x{zz}", 0),
        (r"\R", r"\R", 0),
        (r"\0", r"\0", 0),
        ("a\\", "\\", 1),
    ],
)
def test_what_is_not_regular_is_refused_with_its_place(pattern: str, what: str, at: int) -> None:
    with pytest.raises(GrammarError) as caught:
        decoders.regex(pattern)
    assert caught.value.keyword == what
    assert f"{what!r} at character {at}: " in str(caught.value)


def test_look_around_names_what_would_handle_it() -> None:
    with pytest.raises(GrammarError, match=r"decoders\.grammar, whose terminals have & \(and\) and ~ \(not\)"):
        decoders.regex("(?!if)[a-z]+")


def test_a_long_pattern_is_not_shown_in_full() -> None:
    with pytest.raises(GrammarError) as caught:
        decoders.regex("x" * 5000 + r"\b" + "y" * 5000)
    assert len(str(caught.value)) < 400 and "at character 5000" in str(caught.value)


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(GrammarError, match="surrogate"):
        decoders.regex("a\ud800")


def test_a_deep_pattern_is_read_in_bounded_time() -> None:
    begin = time.process_time()  # about 0.2 s
    whole_text("(" * 50_000 + "a" + ")" * 50_000)
    assert time.process_time() - begin < 5


def patterns() -> st.SearchStrategy[str]:
    atom = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "^", "$", r"\A", r"\Z"])
    sign = st.sampled_from(["*", "+", "?", "{2}", "{,2}", "{1,}", "*?", "??"])
    return st.recursive(
        atom,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3).map("".join)
            | st.lists(inner, min_size=1, max_size=3).map("|".join)
            | inner.map("({})".format)
            | st.tuples(inner.map("(?:{})".format), sign).map("".join)
        ),
        max_leaves=6,
    )


@settings(derandomize=True, database=None)
@given(patterns())
def test_a_pattern_means_what_it_means_in_python(pattern: str) -> None:
    try:
        whole = whole_text(pattern)
    except GrammarError:
        return
    python, ours = re.compile(pattern), compiled(whole)
    for text in SHORT_TEXTS:
        assert accepts(ours, text) is bool(python.fullmatch(text)), (whole, text)


@pytest.mark.parametrize(
    "pattern", [r"\w", r"\W", r"\s", r"\S", r"[^\w\s]", r"[\W\d]", r"[^\S\n]", r"[\s\S]", r"[^\Wa]"]
)
def test_classes_are_those_of_python(pattern: str) -> None:
    """A combining mark is no letter to Python, U+001C is white space, superscripts are digits of words."""
    python, ours = re.compile(pattern), compiled(whole_text(pattern))
    for text in "aé日²½Ⅷ٣_-‿\u0301\u200d \t\n\x1c\x1f\x85\u2028\u200b😀":
        assert accepts(ours, text) is bool(python.fullmatch(text)), text


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_quoted_text_matches_itself_only(text: str) -> None:
    matcher = compiled(quoted(text))
    assert accepts(matcher, text)
    assert not accepts(matcher, text + "x") and not accepts(matcher, text[:-1])


def test_a_compiled_pattern_is_read_unless_it_has_flags() -> None:
    assert decoders.regex(re.compile("a+")) == decoders.regex("a+")
    with pytest.raises(GrammarError, match="IGNORECASE"):
        decoders.regex(re.compile("a+", re.IGNORECASE))
    for flag, instead in (
        (re.ASCII, "[0-9] for"),
        (re.DOTALL, "any character"),
        (re.VERBOSE, "leave out the white space"),
    ):
        with pytest.raises(GrammarError, match=re.escape(instead)) as caught:
            decoders.regex(re.compile("a+", flag))
        assert "both cases" not in str(caught.value)


def test_a_pattern_of_bytes_is_refused() -> None:
    with pytest.raises(GrammarError, match="not bytes"):
        decoders.regex(b"a")  # type: ignore[arg-type]


def test_choices_are_texts_verbatim_and_the_rest_as_json() -> None:
    spec = decoders.choice(["a.b", 1, 2.5, True, None, "", "a.b"])
    assert spec.texts == ("a.b", "1", "2.5", "true", "null", "")
    matcher = compiled(spec.language().regex or "")
    assert all(accepts(matcher, text) for text in spec.texts)
    assert not any(accepts(matcher, text) for text in ("axb", "a.b1", "True", "2", "nul"))


def test_a_member_of_an_enum_is_its_value() -> None:
    class Answer(Enum):
        YES = "yes"
        ONE = 1

    assert decoders.choice([Answer.YES, Answer.ONE]).texts == decoders.choice(Answer).texts == ("yes", "1")


def test_a_member_of_a_text_enum_is_its_text() -> None:
    class Plain(str, Enum):  # noqa: UP042 -- str() of its members is not their text
        RED = "red"

    class Text(StrEnum):
        BLUE = "blue"

    assert decoders.choice([Plain.RED, Text.BLUE]).texts == ("red", "blue")


@settings(derandomize=True, database=None)
@given(st.lists(st.text("ab(é", max_size=5), min_size=1, max_size=8))
def test_a_choice_accepts_its_texts_and_nothing_else(texts: list[str]) -> None:
    matcher = compiled(decoders.choice(texts).language().regex or "")
    near = {text[:end] for text in texts for end in range(6)} | {text + "a" for text in texts} | {"b", "aab"}
    for text in {*texts, *near}:
        assert accepts(matcher, text) is (text in texts), text


def test_what_all_choices_share_is_written_once() -> None:
    assert decoders.choice(["item-1.html", "item-2.html", "item-15.html"]).whole == r"item\-(?:1|15|2)\.html"
    assert decoders.choice(["aa", "aaa"]).whole == "aa(?:|a)"


def test_a_hundred_thousand_choices_are_quick() -> None:
    draw = random.Random(0)
    texts = [f"https://example.org/{draw.getrandbits(48):x}/view" for _ in range(100_000)]
    begin = time.process_time()  # other processes add nothing to it
    spec = decoders.choice(texts)
    matcher = compiled(spec.language().regex or "")
    assert time.process_time() - begin < 20  # about 1 s; the limit is for slow machines
    assert accepts(matcher, texts[-1]) and not accepts(matcher, texts[-1][:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to choose from"),
        ("abc", "must be a list of texts, not 'abc'"),
        (5, "must be a list of texts"),
        ([["a"]], "option 0 is"),
        (["a", {"b": 1}], "option 1 is"),
        ([float("nan")], "option 0 is nan"),
        (["a", "\udc00"], "surrogate"),
        (["x" * (CHOICES_LIMIT + 1)], f"limit is {CHOICES_LIMIT:,}"),
    ],
)
def test_choices_without_a_text_are_refused(options: object, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        decoders.choice(options)  # type: ignore[arg-type]


LARK = 'start: "a" b\nb: "b"*\n'


def test_a_grammar_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ab.lark").write_text(LARK)
    (tmp_path / "ab").write_text(LARK)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "ab.lark", str(tmp_path / "ab.lark"), "ab.lark", "ab", Path("ab")):
        spec = decoders.grammar(path)
        assert spec.text == LARK and spec == decoders.grammar(LARK)
    assert decoders.grammar("ab.lark").language().name == "ab.lark"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"nowhere\.lark cannot be read"):
        decoders.grammar("nowhere.lark")
    with pytest.raises(GrammarError, match="cannot be read"):
        decoders.grammar(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_grammar(tmp_path: Path) -> None:
    for suffix, text in ((".lark", LARK), (".json", '{"enum": [1]}'), (".regex", "[0-9]")):
        file = tmp_path / f"a{suffix}"
        file.write_text(text, encoding="utf-8-sig")
        assert as_spec(file).language() and as_spec(file).key == as_spec(_rewritten(file, text)).key


def _rewritten(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def test_a_defect_in_a_file_is_told_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"a\.lark has no rule `start"):
        as_spec(_rewritten(tmp_path / "a.lark", "print(1)"))
    for text, message in (("{", "is not JSON"), ("[1]", r"\[1\] is not a schema"), ('"a"', "is not a schema")):
        with pytest.raises(GrammarError, match=rf"b\.json.*{message}"):
            as_spec(_rewritten(tmp_path / "b.json", text))


def test_one_line_of_lark_is_no_path() -> None:
    assert decoders.grammar('start: "a"').text == 'start: "a"'
    assert decoders.grammar("start: " + '"a" ' * 5000).language().lark


def test_gbnf_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    with pytest.raises(GrammarError, match=r"llguidance\.gbnf_to_lark\.gbnf_to_lark\(text\)"):
        decoders.grammar(tmp_path / "x.gbnf")
    assert decoders.grammar(gbnf_to_lark('root ::= "a" | "b"')).language().lark
    with pytest.raises(GrammarError, match=r"looks like GBNF"):
        decoders.grammar('root ::= "a"\n')
    with pytest.raises(GrammarError, match=r"looks like GBNF"):
        decoders.grammar('start ::= "a"\n')


def test_half_of_a_surrogate_pair_in_a_grammar_is_refused() -> None:
    with pytest.raises(GrammarError, match="surrogate") as caught:
        decoders.grammar('start: "\ud800"')
    str(caught.value).encode()


def test_a_grammar_needs_a_rule_to_start_with() -> None:
    with pytest.raises(GrammarError, match=r"no rule `start: …`"):
        decoders.grammar('begin: "a"\n')
    for rule in ("start: x", "?start: x", "  start : x", "start[temperature=0.5]: x"):
        decoders.grammar(f'x: "a"\n{rule}\n')


def test_keys_tell_specifications_apart() -> None:
    specs = [
        decoders.regex("a"),
        decoders.regex("b"),
        decoders.regex("a", policy="canonical"),
        decoders.regex("a", backend="llguidance"),
        decoders.grammar('start: "a"'),
        decoders.choice(["a"]),
        decoders.choice(["a", "b"]),
        decoders.choice(["a,b"]),
    ]
    assert len({spec.key for spec in specs}) == len(specs) == len(set(specs))


def test_keys_are_those_of_the_language() -> None:
    assert decoders.regex("^a$").key == decoders.regex("a").key
    assert decoders.choice(["b", "a", "a"]).key == decoders.choice(["a", "b"]).key
    assert decoders.regex("a").key == "Regex/-/full/ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'canonical'"):
        decoders.choice(["a"], policy="cannonical")  # type: ignore[arg-type]


def test_a_file_that_is_given_as_a_string_is_named(tmp_path: Path) -> None:
    there = tmp_path / "rules.lark"
    there.write_text('start: "a"')
    for name, message in (
        (str(there), "this is a file: give pathlib.Path"),
        (str(tmp_path / "ruls.lark"), r"there is no file '.*ruls\.lark', .* Did you mean '.*rules\.lark'"),
        ("missing.json", "there is no file 'missing.json'"),
        ("./missing.regex", r"there is no file './missing\.regex'"),
    ):
        for read in (as_spec, resolve_grammar):
            with pytest.raises(GrammarError, match=message):
                read(name)
    (tmp_path / "a.json").write_text("{}")
    for wrong, near in (("nope.json", None), ("rule.json", "rules.lark"), ("rulse.lark", "rules.lark")):
        with pytest.raises(GrammarError, match="there is no file") as refused:
            as_spec(str(tmp_path / wrong))  # only names that are alike are suggested, whatever the suffix
        assert str(refused.value).partition("lists them).")[2] == (
            f" Did you mean {str(tmp_path / near)!r}?" if near else ""
        )
    with pytest.raises(GrammarError, match="the schema 'missing' is not JSON"):
        decoders.json_schema("missing").language()
