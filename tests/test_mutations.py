"""The defects of tests/mutations.py still fit the code, so that the script can be run at any time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_defect_fits_the_code_and_names_tests_that_are_there() -> None:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "tests" / "mutations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations"] = module  # its dataclass looks itself up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["mutations"]
    assert len(module.MUTATIONS) >= 20
    for mutation in module.MUTATIONS:
        assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation.name
        assert mutation.tests and mutation.old != mutation.new
        for test in mutation.tests:
            assert (ROOT / "tests" / test).exists(), f"{mutation.name}: {test}"
