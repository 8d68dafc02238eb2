"""Tests that need a CUDA device: ``pytest -m gpu``, under four minutes on one card.

``GPU_TESTS_DEVICE=cpu pytest -m gpu`` runs what a CPU can run of them: to see that they are right before a card is at hand.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

#: What compilers, transformers and peft say and nobody here can mend. Everything else is an error: a fallback warns.
BYSTANDERS = ("ignore:.*TensorFloat32", "ignore:.*torch.jit", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            for warning in BYSTANDERS:
                item.add_marker(pytest.mark.filterwarnings(warning), append=False)


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
