"""Every causal design of transformers, tiny: it writes what transformers writes or is refused, as docs/reference/models.md says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decoders.testing.images import BLIND, HEARING, SEEING

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_models", DOCS / "generate_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("design", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_design_writes_the_same_text_or_is_refused(design: str, generator: ModuleType) -> None:
    outcome = generator.outcome(design)
    assert outcome.verdict in ("equal", "refused", "untried"), outcome.why
    page = generator.PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}:" in page:
        assert generator.verdict_in(page, design) == outcome.verdict, "run python docs/generate_models.py"


@pytest.mark.slow
@pytest.mark.parametrize("design", [*SEEING, *HEARING, *BLIND])
def test_a_design_that_sees_or_hears_writes_the_same_text_or_is_refused(design: str, generator: ModuleType) -> None:
    outcome = generator.seeing_outcome(design)
    assert outcome.verdict == ("refused" if design in BLIND else "equal"), outcome.why
    page = generator.PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}:" in page:
        *_, line = generator._seeing_lines({design: outcome})
        assert line in page, "run python docs/generate_models.py"


def test_verdicts_are_read_from_the_page(generator: ModuleType) -> None:
    outcomes = {"one": generator.Outcome("equal"), "other": generator.Outcome("refused", "it has a <b> | c")}
    page = generator.page(outcomes, {"one": generator.Outcome("refused", "blind")})
    assert [generator.verdict_in(page, name) for name in ("one", "other", "third")] == ["equal", "refused", None]
    assert "| `other` | it has a &lt;b> \\| c |" in page


@pytest.mark.parametrize("verdict", ["differs", "raises", "untried"])
def test_every_design_is_equal_or_refused(generator: ModuleType, verdict: str) -> None:
    assert generator.TITLES[verdict] not in generator.PAGE.read_text(encoding="utf-8")
