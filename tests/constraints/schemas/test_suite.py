"""The official suite and a sample of JSONSchemaBench: floors as measured, and no invalid instance accepted.

The data are not part of the project: the folder is ``shared/data`` next to the checkout, or ``DECODERS_SHARED_DATA``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from decoders.constraints.schemas.judge import Validation
from decoders.errors import GrammarError

GENERATOR = Path(__file__).parents[3] / "docs" / "generate_schema_report.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_schema_report", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


report = load()
needs_data = pytest.mark.skipif(
    report.data() is None, reason="no shared/data next to the checkout, no DECODERS_SHARED_DATA"
)


def test_a_checkout_may_lie_at_the_root_of_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROOT", Path("/repo"))
    monkeypatch.delenv("DECODERS_SHARED_DATA", raising=False)
    report.data()


def judged(groups: Iterable[Any]) -> tuple[float, list[Any]]:
    found = report.measure(groups)
    invalid = [one for one in found if one.verdict == "under-constrained"]
    assert not invalid
    return sum(one.verdict == "right" for one in found) / len(found), found


@needs_data
@pytest.mark.parametrize(("draft", "floor"), [("2020-12", 0.89), pytest.param("7", 0.93, marks=pytest.mark.slow)])
def test_official_suite(draft: str, floor: float) -> None:
    right, found = judged(report.suite(report.data(), draft))
    assert right >= floor
    assert {one.keyword for one in found if one.verdict == "over-constrained"} <= {"format"}


@needs_data
def test_sample_of_the_bench() -> None:
    right, found = judged(report.bench(report.data()))
    assert right >= 0.99
    assert sum(one.accepted for one in found) >= 0.99 * sum(one.valid for one in found)


@needs_data
@pytest.mark.parametrize("draft", ["2020-12", "7"])
def test_finished_texts_are_judged_as_the_suite_says(draft: str) -> None:
    for group in report.suite(report.data(), draft):
        for instance, is_valid in group.instances:
            try:
                Validation(group.schema)(json.dumps(instance))
                judged_valid = True
            except GrammarError as problem:
                if "refers to nothing" in str(problem) or "$schema" in str(problem):  # nothing is fetched
                    continue
                assert "not valid" in str(problem), (group, instance)
                judged_valid = False
            assert judged_valid is is_valid, (group, instance)


def test_report_counts_every_verdict() -> None:
    tests = {
        "right": ({"type": "integer"}, [(1, True), ("a", False)]),
        "over-constrained": ({"format": "date"}, [("someday", True)]),
        "under-constrained": ({"type": "integer"}, [(1, False)]),
        "refused": ({"type": "array", "uniqueItems": True}, [([], True)]),
    }
    groups = [report.Group(name, schema, tuple(instances)) for name, (schema, instances) in tests.items()]
    groups.append(report.Group("right", False, ((1, False),)))
    found = report.measure(groups)
    assert [one.verdict for one in found] == [*tests, "right"]
    page = report.page({"Made up": found})
    assert "| Made up | 5 | **40.0 %** | 1 | 1 | 1 | 33.3 % | 33.3 % | 1 |" in page
    assert "| refused | 1 | 0 | 0 | 0 | `uniqueItems` 1 |" in page
    assert "| `STATES` | 3,000 |" in page
