"""Tests that need a CUDA device: ``python tests/gpu/run.py``, or ``pytest -m gpu``, one after the other.

``GPU_TESTS_DEVICE=cpu`` before it runs what a CPU can run of them: to see that they are right before a card is at hand.
With ``OUT=FOLDER`` the card, the versions and every result are written to ``FOLDER/gpu-tests.jsonl`` as they come.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from decoders.bench import machine

#: What compilers, transformers and peft say and nobody here can mend. Everything else is an error: a fallback warns.
BYSTANDERS = ("ignore:.*TensorFloat32", "ignore:.*torch.jit", "ignore::FutureWarning", "ignore::DeprecationWarning")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)
    for warning in BYSTANDERS:
        item.add_marker(pytest.mark.filterwarnings(warning), append=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if part := os.environ.get(
        "GPU_TESTS_PART"
    ):  # of run.py: "1/8" is every eighth test of those chosen, beginning with the second
        first, count = map(int, part.split("/"))
        items[:] = items[first::count]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "OUT" not in os.environ or (report.when != "call" and report.passed):
        return
    with (Path(os.environ["OUT"]) / "gpu-tests.jsonl").open("a") as file:
        if not file.tell():
            on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            file.write(json.dumps(machine.facts(on)) + "\n")
        said = str(report.longrepr)[-2000:] if report.longrepr is not None else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "said": said}
        file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where models are decoded."""
    chosen = torch.device(os.environ.get("GPU_TESTS_DEVICE", "cuda"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return chosen


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The same, for what a CPU cannot do at all."""
    if device.type != "cuda":
        pytest.skip("needs CUDA itself")
    return device
