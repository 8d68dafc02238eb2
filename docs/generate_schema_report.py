"""Writes docs/reference/json-schema.md from measurements: ``python docs/generate_schema_report.py [FILE]``.

Needs the data: ``shared/data`` next to the checkout, or the folder in ``DECODERS_SHARED_DATA``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import llguidance

from decoders.constraints import JsonSchema
from decoders.constraints.patterns import limits as pattern_limits
from decoders.constraints.schemas import limits as schema_limits
from decoders.errors import GrammarError

ROOT = Path(__file__).parents[1]


def _spell() -> Callable[[JsonSchema, Any], str | None]:
    """The function of tests/constraints/schemas, which is no package that can be imported."""
    spec = importlib.util.spec_from_file_location(
        "schema_spelling", ROOT / "tests" / "constraints" / "schemas" / "spelling.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.spell


spell = _spell()
DRAFTS = {"2020-12": ("draft2020-12", None), "7": ("draft7", "http://json-schema.org/draft-07/schema#")}
VERDICTS = ("right", "over-constrained", "under-constrained", "refused")


@dataclass(frozen=True)
class Group:
    """A schema with its instances.

    Attributes:
        keyword: what it is about. instances: (value, whether it is valid).
    """

    keyword: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]


@dataclass(frozen=True)
class Measured:
    """How a group went.

    Attributes:
        verdict: one of ``VERDICTS``. valid, accepted, raw: valid instances, those accepted in the order of the grammar, and
            those accepted as they stand. invalid: accepted ones that are invalid. seconds: from schema to grammar.
        why: the keyword of a refusal. regular: whether there is an expression.
    """

    keyword: str
    verdict: str
    valid: int
    accepted: int = 0
    raw: int = 0
    invalid: int = 0
    seconds: float = 0.0
    why: str = ""
    regular: bool = False


def data() -> Path | None:
    """The folder of test data, if it is there."""
    places = [
        os.environ.get("DECODERS_SHARED_DATA"),
        ROOT.parent / "shared" / "data",
        ROOT.parent.parent / "shared" / "data",
    ]
    return next((Path(place) for place in places if place and (Path(place) / "json-schema-bench").is_dir()), None)


def suite(folder: Path, draft: str) -> Iterator[Group]:
    """The groups of the official suite."""
    name, dialect = DRAFTS[draft]
    for file in sorted((folder / "json-schema-test-suite" / name).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            if dialect and isinstance(schema, dict):
                schema = {"$schema": dialect, **schema}
            yield Group(file.stem, schema, tuple((test["data"], test["valid"]) for test in group["tests"]))


def bench(folder: Path) -> Iterator[Group]:
    """The sample of JSONSchemaBench."""
    for file in sorted((folder / "json-schema-bench").glob("*.json")):
        group = json.loads(file.read_text(encoding="utf-8"))
        tests = tuple((test["data"], test["valid"]) for test in group["tests"])
        yield Group(file.name.split("---")[0], group["schema"], tests)


class Judge:
    """Reads texts by llguidance, byte by byte."""

    def __init__(self) -> None:
        self.tokenizer = llguidance.LLTokenizer("byte")

    def measure(self, group: Group) -> Measured:
        """How `group` goes, in strict mode with the default settings."""
        valid = sum(good for _, good in group.instances)
        spec = JsonSchema(group.schema)
        begin = time.perf_counter()
        try:
            language = spec.language()
        except GrammarError as problem:
            # That nothing is valid is an answer, if it is the right one.
            verdict = "right" if problem.keyword is None and "no value" in str(problem) and not valid else "refused"
            return Measured(group.keyword, verdict, valid, why=problem.keyword or "size")
        seconds = time.perf_counter() - begin
        start = llguidance.LLMatcher(self.tokenizer, llguidance.grammar_from("lark", language.lark), log_level=0)
        if start.is_error():
            raise ValueError(start.get_error())
        accepted = raw = invalid = 0
        for value, good in group.instances:
            stands = self.accepts(start, json.dumps(value, ensure_ascii=False))
            spelled = spell(spec, value)
            ordered = stands or (spelled is not None and self.accepts(start, spelled))
            accepted, raw, invalid = (
                accepted + (good and ordered),
                raw + (good and stands),
                invalid + (ordered and not good),
            )
        verdict = "under-constrained" if invalid else "right" if accepted == valid else "over-constrained"
        return Measured(
            group.keyword, verdict, valid, accepted, raw, invalid, seconds, regular=language.regex is not None
        )

    def accepts(self, start: Any, text: str) -> bool:
        """Whether `text` is a complete text."""
        matcher, tokens = start.deep_copy(), self.tokenizer.tokenize_str(text)
        taken = matcher.validate_tokens(tokens) == len(tokens) and (not tokens or matcher.consume_tokens(tokens))
        return bool(taken and matcher.is_accepting())


def measure(groups: Iterable[Group]) -> list[Measured]:
    """How all `groups` go."""
    judge = Judge()
    return [judge.measure(group) for group in groups]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def summary(results: dict[str, list[Measured]]) -> list[str]:
    columns = [
        "",
        "groups",
        "right",
        "over",
        "under",
        "refused",
        "valid accepted",
        "… as they stand",
        "invalid accepted",
    ]
    columns += ["with an expression", "compile, median", "slowest"]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * 11]
    for name, found in results.items():
        verdicts, built = Counter(one.verdict for one in found), [one for one in found if one.seconds]
        valid = sum(one.valid for one in found)
        counts = [f"{verdicts[v]}" for v in VERDICTS[1:]]
        lines.append(
            f"| {name} | {len(found)} | **{share(verdicts['right'], len(found))}** | {' | '.join(counts)} "
            f"| {share(sum(one.accepted for one in found), valid)} | {share(sum(one.raw for one in found), valid)} "
            f"| {sum(one.invalid for one in found)} | {sum(one.regular for one in found)} "
            f"| {1000 * median(one.seconds for one in built):.1f} ms | {1000 * max(one.seconds for one in built):.0f} ms |"
        )
    return lines


def by_keyword(found: list[Measured]) -> list[str]:
    lines = ["| | groups | right | over | under | refused because of |", "|---|---:|---:|---:|---:|---|"]
    for keyword in sorted({one.keyword for one in found}):
        of = [one for one in found if one.keyword == keyword]
        verdicts = Counter(one.verdict for one in of)
        why = Counter(one.why for one in of if one.verdict == "refused")
        reasons = ", ".join(f"`{name}` {count}" for name, count in sorted(why.items()))
        lines.append(
            f"| {keyword} | {len(of)} | " + " | ".join(str(verdicts[v]) for v in VERDICTS[:3]) + f" | {reasons} |"
        )
    return lines


def page(results: dict[str, list[Measured]]) -> str:
    """The page."""
    lines = [
        "<!-- Made by docs/generate_schema_report.py from measurements. Do not edit. -->",
        "",
        "# JSON Schema",
        "",
        "What `JsonSchema` makes of the official test suite (json-schema-org/JSON-Schema-Test-Suite) and of 150 schemas drawn",
        "from JSONSchemaBench (guidance-ai/jsonschemabench), in strict mode with the default settings.",
        "",
        "A group is one schema with its instances. It is *right* if every valid instance is accepted and every invalid one is",
        "not; *over*-constrained if a valid one is not accepted; *under*-constrained if an invalid one is; *refused* if there",
        "is an error in place of a grammar, which counts as not right. A valid instance counts as accepted if its text in the",
        "order of the grammar is (declared keys first, 1 for 1.0); the column after that counts texts as",
        "`json.dumps` writes the instance. An invalid instance counts as accepted if either text is. Nothing is fetched: groups",
        "about remote schemas are refused. A known `format` is a condition here, an annotation in the suite.",
        "",
        *summary(results),
        "",
    ]
    for name, found in results.items():
        lines += [f"## {name}", "", *by_keyword(found), ""]
    lines += [
        "## Limits",
        "",
        "Beyond one of these a schema is refused, with the limit's name.",
        "",
        "| | | |",
        "|---|---|---:|",
    ]
    lines += [
        f"| `{module.__name__}` | `{name}` | {value:,} |"
        for module in (schema_limits, pattern_limits)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int)
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    folder = data()
    if folder is None:
        raise SystemExit(
            "no data: set DECODERS_SHARED_DATA to the folder that has json-schema-test-suite and json-schema-bench"
        )
    results = {f"Draft {draft}": measure(suite(folder, draft)) for draft in DRAFTS}
    results["JSONSchemaBench"] = measure(bench(folder))
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference" / "json-schema.md"
    file.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
